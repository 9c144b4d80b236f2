"""One optimizer step of policy and drafter over packed micro-batches, under Megatron's parallelisms.

Megatron's pipeline schedule runs the policy. On the last stage the loss function also runs the drafter, forward and
backward, on the detached hidden states of the same micro-batch.

Every loss is a sum divided by the step's global count, known before the first backward (`PackedBatch.counts`). So
the split into micro-batches, packings and ranks changes a gradient by rounding only.

`run/loading.py` builds the `Trainer`. `updates.py` calls `train_step` for each mini-batch of a rollout. Packing
(`packing/pack.py`), rollouts and pushes to engines are elsewhere; a push reads `Trainer.export`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rlspec.config import Config
from megatron_rlspec.losses.drafter import Student
from megatron_rlspec.losses.logprobs import Observer
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.headers import read_object
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.train import checkpoint, runtime, shards
from megatron_rlspec.train.attention import PackedSequences
from megatron_rlspec.train.drafter import Drafter, build_drafter
from megatron_rlspec.train.drafter_step import (
    DrafterStep,
    DrafterTargets,
    follow_rounds,
    objective_of,
    pop_prediction,
)
from megatron_rlspec.train.model import (
    Policy,
    describe,
    eagle3_identity,
    embedding_for_drafter,
    transformer_config,
)
from megatron_rlspec.train.objectives import OBJECTIVES, OutputLayer, Sums, means, reduce_sums
from megatron_rlspec.train.optimizer import Learner
from megatron_rlspec.train.reference import Reference
from megatron_rlspec.types import PackedBatch, Scope


class Trainer:
    """Policy, drafter and their optimizers on this rank.

    All ranks must call every method but `learners` and `output_layer`, in the same order.

    hf_config      the parsed config.json; with an EAGLE-3 drafter's under `DRAFTER`
    name_table     names of the tensors of policy and drafter, and how they are cut over ranks
    last_stage     whether this rank is on the last pipeline stage, which has the output layer, losses and drafter
    learner        the policy's gradient buffers and optimizer
    drafter        None on all pipeline stages but the last, and without `drafter.train`; so are `drafter_step` and
                   `drafter_learner`
    prediction     predicted acceptance of the next rollout, computed in the last step, the same on every rank; None if
                   that step was not GRPO or trained no drafter, and if the drafter's loss was not finite
    totals         sums of the newest step over all ranks, for `objectives.means`; read by `train/updates.py`
    sharpness      of coupled drafts (one of `types.SHARPNESS`), from the newest prediction that has one; None before
    temperature    divides the logits in training and in log-probs; 1 in its place where SFT trains the policy
    reference      the policy as it was at `keep_reference`; None before
    embedding      what the drafter reads, `[V / tensor, H]`, detached; see `embedding_for_drafter`
    """

    def __init__(self, config: Config, hf_config: Mapping[str, Any]) -> None:
        if config.train.deterministic:
            runtime.be_deterministic()
        runtime.init_distributed(config.parallel, config.train.seed)
        self.config = config
        self.hf_config = dict(hf_config)
        self.device = runtime.device()
        self.last_stage = ps.is_pipeline_last_stage()
        self.model_config = transformer_config(hf_config, config.model, config.parallel)
        self.rope = Rope.of(hf_config)
        policy = Policy(self.model_config, hf_config, config.model.max_length)
        self.policy = policy.to(self.device)
        self.name_table = shards.job_name_table(hf_config)
        overlap = runtime.has_transformer_engine()
        self.learner = Learner(self.policy, config.optimizer, pipelined=True, overlap=overlap)
        self.drafter: Drafter | None = None
        self.drafter_step: DrafterStep | None = None
        self._objective = objective_of(
            config.drafter,
            config.rollout.sampling,
            config.spec.steps,
            config.spec.verifier,
            coupled=config.spec.drafts == "coupled",
        )
        # The draft vocabulary, `[S]` int64; None: all tokens
        self._draft_ids: Tensor | None = None
        if config.drafter.train and self.last_stage:
            # With the policy's seed, both would begin with the same random numbers.
            seed = config.train.seed + 1
            drafter = build_drafter(self.model_config, hf_config, seed)
            self.drafter = drafter.to(self.device)
            self.drafter_step = DrafterStep(
                self.drafter, config.drafter, config.optimizer, self._objective, pace=self.learner
            )
        # Set these two methods only after the models are built. Megatron's layers with experts can make a deep copy of
        # this configuration while they are built. With the methods in it, the copy would contain learner and model.
        self.model_config.finalize_model_grads_func = self.learner.finalize
        self.model_config.no_sync_func = self.learner.ddp.no_sync if overlap else None
        self.prediction: Prediction | None = None
        self.totals: dict[str, list[float]] = {}
        self.sharpness: float | None = None
        # Greedy rollouts have temperature 0, by which logits cannot be divided.
        self.temperature = config.rollout.temperature or 1.0
        self.reference: Reference | None = None
        self.embedding: Tensor | None = None
        self.refresh_embedding()

    @property
    def drafter_learner(self) -> Learner | None:
        return None if self.drafter_step is None else self.drafter_step.learner

    def load_hf(self, tensors: Mapping[str, Tensor], *, fresh_drafter: bool = False) -> None:
        """Load full tensors under Hugging Face names.

        `fresh_drafter` leaves the drafter and its optimizer as they are; its tensors may be missing.

        Raises CheckpointError if one is missing or has another shape, but only on the ranks that hold a shard of it.
        """
        learners = self.learners()
        if fresh_drafter:
            learners.pop("drafter", None)
        modules = [learner.ddp.module for learner in learners.values()]
        shards.load(self.name_table, modules, self.model_config, tensors)
        # The optimizer updates float32 copies. Without this, the next update would write the old ones over the weights.
        for learner in learners.values():
            learner.optimizer.reload_model_params()
        self.refresh_embedding()

    def export(self, scope: Scope = "all", live: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names on rank 0; other ranks must exhaust the (empty) iterator too.

        `scope` and `live` are those of `shards.export`, and equal on all ranks.
        """
        return shards.export(
            self.name_table, self.policy, self.drafter, self.model_config, scope, live
        )

    def save(self, directory: Path) -> None:
        """Write all that a later `load` needs to continue bit for bit, whole or not at all. Raises `SaveError`."""
        # `load` compares only the keys of `_layout`. The sharpness is none of them, so it may differ from this run's.
        state = _layout(self) | {"sharpness": self.sharpness}
        checkpoint.save(directory, self.learners(), state)

    def load(self, directory: Path) -> None:
        """Continue from `save`, by as many ranks in the same layout. Raises CheckpointError if the layout differs.

        Call `set_draft_vocabulary` first: otherwise the draft vocabulary of an EAGLE-3 drafter is not compared.
        """
        checkpoint.load(directory, self.learners(), _layout(self))
        self.sharpness = read_object(directory / checkpoint.LAYOUT)["sharpness"]
        self.refresh_embedding()

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        *,
        objective: Literal["sft", "grpo"] = "sft",
        train_policy: bool = True,
        train_drafter: bool = True,
        logprob_gap: float = math.inf,
    ) -> dict[str, float]:
        """Take one optimizer step over this rank's micro-batches; the returned metrics are the same on all ranks.

        All ranks must have the same number of micro-batches, at least one (`packing/pack.py` returns so many): stages
        and ranks with experts exchange tensors in each. Returns {} if nothing is trained.

        train_policy  False: the policy only computes hidden states; only the drafter learns
        train_drafter False: the drafter does not run
        logprob_gap   largest allowed mean |log-prob difference| between engines and policy; above it, the engines
                      sampled from other weights

        If the policy's loss or gradient norm is not finite, or the gap is above `logprob_gap`, the policy is not
        updated (`policy/skipped` = 1). The drafter is not updated if its own norm is not finite (`drafter/skipped`).
        """
        if not train_policy and not train_drafter:
            self.prediction = None
            return {}
        self.policy.train()
        self.learner.zero_grad()
        if self.drafter is not None and self.drafter_step is not None and train_drafter:
            self.drafter.train()
            self.drafter_step.begin()
        losses = partial(self._losses, objective, train_policy, train_drafter)
        sums = self.run_schedule(batches, losses, forward_only=not train_policy)
        predicted_steps = self._objective.predicted_steps
        # Before `reduce_sums`, which needs equal shapes: the table of `DrafterStep.learn` has a row for each position.
        follow_rounds(sums, predicted_steps)
        self.totals = reduce_sums(sums)
        # Before `means`, which cannot average the sums of the prediction: this removes them from `totals`.
        self.learn_prediction(pop_prediction(self.totals, predicted_steps))
        metrics = means(self.totals)
        if train_policy:
            # These metrics are reduced over all ranks, so all ranks update or none does. SFT has no gap, so 0. A gap of
            # NaN compares as False, so it skips the update, too.
            gap_allowed = metrics.get("policy/train_rollout_logprob_abs_diff", 0.0) <= logprob_gap
            finite = math.isfinite(metrics["policy/loss"])
            norm, updated = self.learner.step(allowed=gap_allowed and finite)
            metrics["policy/grad_norm"] = norm
            metrics["policy/skipped"] = float(not updated)
            metrics["policy/lr"] = self.learner.rate()
        # By the options, not by `self.drafter`: stages without a drafter must join the broadcast of its metrics.
        if self.config.drafter.train and train_drafter:
            metrics |= self._update_drafter()
        if train_policy:
            self.refresh_embedding()
        return metrics

    def set_draft_vocabulary(self, draft_ids: np.ndarray) -> None:
        """Train the drafter on the draft vocabulary `[S] int64` in later steps: the ids that engines draft from.

        For an EAGLE-3 drafter: those of its output layer, in the order of its file. Do not change the array afterwards.
        """
        self._draft_ids = torch.from_numpy(draft_ids)
        if self.drafter_step is not None:
            self.drafter_step.draft_ids = self._draft_ids

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return log-probabilities of labels at `temperature`, on the CPU, `[T]` per micro-batch; 0 if not trained.

        They are the same on all pipeline stages, in float32, or in float64 for a model in float64. Sets eval mode.
        """
        self.policy.eval()
        logprobs = self.run_forward(batches, self._report_logprobs)
        if self.last_stage:
            logprobs = [values.cpu() for values in logprobs]
        else:
            # The broadcast below fills them: shape and dtype are those of `policy_logprobs` on the last stage.
            exact = torch.promote_types(self.model_config.params_dtype, torch.float32)
            logprobs = [torch.empty(len(batch.tokens), dtype=exact) for batch in batches]
        return [_from_last_stage(values) for values in logprobs]

    @torch.no_grad()
    def accept_lengths(
        self, batches: Sequence[PackedBatch], steps: Sequence[int]
    ) -> dict[int, float]:
        """Return the tokens per round that these texts accept with k drafts a round, for each k of `steps`.

        The figures hold for texts that the policy generated. Drafts are coupled, with the best sharpness, if
        spec.drafts says so and the texts' seeds are known; else a draft is the likeliest token. `batches` are packed
        with depth=max(steps), which may be more than `drafter.depth`: all depths run the same layers.

        Changes no weight, but can change `sharpness`. Needs `drafter.train`. `steps`: at least one, above 0, ascending.
        """
        self.policy.eval()
        seeds_known = all(batch.noise_seeds is not None for batch in batches)
        # "ce" and sampled=False: a draft is accepted where it is the text's own token, so no teacher is needed.
        objective = replace(
            self._objective,
            depth=max(steps),
            loss="ce",
            depth_decay=1.0,
            predicted_steps=tuple(steps),
            sampled=False,
            coupled=self._objective.coupled and seeds_known,
        )
        # A shallow copy has the same weights, but an objective of its own: that of the training steps stays.
        measuring_step = copy.copy(self.drafter_step)
        if self.drafter is not None and measuring_step is not None:
            self.drafter.eval()
            measuring_step.objective = objective
        # On other stages than the last, `measuring_step` is None, and `_report_acceptance` is never called.
        sums = self.run_forward(batches, partial(self._report_acceptance, measuring_step))
        follow_rounds(sums, objective.predicted_steps)
        totals = reduce_sums(sums)
        prediction = pop_prediction(totals, objective.predicted_steps)
        if prediction is None:  # the loss was not finite
            return dict.fromkeys(steps, 1.0)
        self.sharpness = prediction.sharpness or self.sharpness
        return {k: prediction.tokens_per_round(k) for k in steps}

    def learn_prediction(self, prediction: Prediction | None) -> None:
        """Set `prediction`, and the `sharpness` of drafts if the prediction has one. `updates.py` calls it, too."""
        self.prediction = prediction
        if prediction is not None:
            self.sharpness = prediction.sharpness or self.sharpness

    def keep_reference(self) -> None:
        """Set `reference` to a copy of the current policy: call it when the policy has the weights to compare with."""
        self.reference = Reference(self)

    def refresh_embedding(self) -> None:
        """Update `embedding`; call it after every change of the policy's weights. It broadcasts between stages."""
        if self.config.drafter.train:
            self.embedding = embedding_for_drafter(self.policy, self.embedding)

    def learners(self) -> dict[str, Learner]:
        """Return the learners on this rank, "policy" and "drafter"; checkpoint files begin with these names."""
        learners = {"policy": self.learner}
        if self.drafter_learner is not None:
            learners["drafter"] = self.drafter_learner
        return learners

    def run_schedule(
        self, batches: Sequence[PackedBatch], loss: Any, *, forward_only: bool
    ) -> list[Any]:
        """Run Megatron's schedule over the micro-batches; return what `loss` reports for each, [] on earlier stages.

        loss          called on the last stage as loss(batch, packed, hidden `[T, 1, H]`); returns (the loss, whose
                      backward the schedule runs; a token count, which `Learner.finalize` ignores, but without which
                      Megatron scales the loss; the report)
        forward_only  run no backward of the policy
        """

        def forward(iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            packed = describe(batch, self.model_config, self.rope, self.device)
            tokens = to_device(batch.tokens, self.device)
            positions = to_device(batch.position_ids, self.device)
            # Not around the schedule: within it `loss` runs the drafter's backward, also with `forward_only`.
            with torch.set_grad_enabled(not forward_only):
                hidden = model(tokens[None], positions[None], None, packed_seq_params=packed)
            return hidden, partial(loss, batch, packed)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self.learner.ddp],
            num_microbatches=len(batches),
            # With several stages Megatron exchanges the real lengths (`variable_seq_lengths` in `model.py`).
            seq_length=max(len(batch.tokens) for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def run_forward(self, batches: Sequence[PackedBatch], report: Callable[..., Any]) -> list[Any]:
        """Run the policy without gradients; return `report(batch, packed, hidden)` of each, [] on earlier stages.

        `hidden` is `[T, 1, H]`. The caller sets train or eval mode.
        """

        def loss(batch: PackedBatch, packed: PackedSequences, hidden: Tensor) -> tuple:
            with torch.no_grad():
                reported = report(batch, packed, hidden)
            return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), reported

        return self.run_schedule(batches, loss, forward_only=True)

    def output_layer(self, temperature: float) -> OutputLayer:
        """Return the policy's output layer on this rank of the last stage, at a temperature."""
        return OutputLayer(self.policy.head_weight(), temperature)

    def _losses(
        self,
        objective: str,
        train_policy: bool,
        train_drafter: bool,
        batch: PackedBatch,
        packed: PackedSequences,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor, Sums]:
        """Return the policy's loss, whose backward the schedule runs; run the drafter's forward and backward.

        The order is fixed. The student exists before the policy's loss, whose computation hands each chunk of the
        teacher's logits to `student.observe`. The drafter's loss is complete only after the last chunk.
        """
        hidden = hidden[:, 0]  # `[T, 1, H]` to `[T, H]`
        # SFT is at 1. A drafter that learns alone learns the distribution that engines sample from, as in an RL step.
        temperature = 1.0 if objective == "sft" and train_policy else self.temperature
        layer = self.output_layer(temperature)
        loss = hidden.new_zeros(())
        sums: Sums = {}
        step = self.drafter_step if train_drafter else None
        student: Student | None = None
        observe: Observer | None = None
        if step is not None:
            targets = _drafter_targets(batch)
            predict = objective == "grpo" and bool(step.objective.predicted_steps)
            outputs = self._draft(batch, packed, hidden)
            student = step.make_student(outputs, targets, layer, predict=predict)
            if step.shares_policy_logits:
                observe = student.observe
        if train_policy:
            compute = OBJECTIVES[objective]
            loss, sums = compute(layer, batch, hidden, self.config.algorithm, observe)
        elif observe is not None:
            # Only for its calls of `observe`: in the chunks of the policy's loss, so the drafter learns the same bits.
            with torch.no_grad():
                layer.logprobs(batch, hidden, observe=observe)
        if step is not None and student is not None:
            teacher_hidden = None
            if observe is None:  # then `learn` computes the teacher's logits itself
                teacher_hidden = _drafter_rows_of(batch, hidden)
            sums |= step.learn(student, targets, teacher_hidden)
        return loss, torch.zeros((), dtype=torch.int), sums

    def _draft(self, batch: PackedBatch, packed: PackedSequences, hidden: Tensor) -> list[Tensor]:
        """Run the drafter's forward; return the input of the output layer, `[t, H]` per depth.

        An EAGLE-3 drafter reads the policy's newest forward pass (`Policy.taps`), which must be that of `batch`.
        """
        assert self.drafter is not None
        assert self.drafter_learner is not None
        assert self.embedding is not None
        eagle3 = DRAFTER in self.hf_config
        if eagle3:
            hidden = self.policy.taps()
        if eagle3 or batch.drafter_part is not None:
            hidden = _drafter_rows_of(batch, hidden)
            batch = batch.drafter_part or batch
            # Other sequences than the policy's, or another number of key/value heads, need another plan of attention.
            packed = describe(batch, self.drafter.config, self.rope, self.device)
        tokens = [to_device(tokens, self.device) for tokens in batch.drafter_tokens]
        positions = to_device(batch.position_ids, self.device)
        # `detach`: no gradient of the drafter may reach the policy. DDP's hooks fill the drafter's gradient buffers.
        module = self.drafter_learner.ddp
        return module(hidden.detach(), tokens, self.embedding, positions, packed)

    def _report_logprobs(
        self, batch: PackedBatch, packed: PackedSequences, hidden: Tensor
    ) -> Tensor:
        layer = self.output_layer(self.temperature)
        logprobs, _ = layer.logprobs(batch, hidden[:, 0])
        return logprobs

    def _report_acceptance(
        self,
        step: DrafterStep | None,
        batch: PackedBatch,
        packed: PackedSequences,
        hidden: Tensor,
    ) -> Sums:
        """Report what the texts of a micro-batch accept, for `accept_lengths`; on the last stage, which has a step."""
        assert step is not None
        hidden = hidden[:, 0]
        targets = _drafter_targets(batch)
        outputs = self._draft(batch, packed, hidden)
        layer = self.output_layer(self.temperature)
        student = step.make_student(outputs, targets, layer, predict=True)
        return step.learn(student, targets, None)  # its loss is "ce", without a teacher

    def _update_drafter(self) -> dict[str, float]:
        """Update the drafter on the last stage; return its metrics on all stages, each of which must call this."""
        result = [0.0, 0.0, 0.0]  # on stages without a drafter; the broadcast below overwrites it
        learner = self.drafter_learner
        if self.drafter_step is not None and learner is not None:
            norm, updated = self.drafter_step.update()
            result = [norm, float(not updated), learner.rate()]
        values = _from_last_stage(torch.tensor(result, dtype=torch.float64))
        names = ("drafter/grad_norm", "drafter/skipped", "drafter/lr")
        return dict(zip(names, values.tolist(), strict=True))


def _layout(trainer: Trainer) -> dict[str, Any]:
    """Return what must be equal between a checkpoint and the run that resumes from it, as JSON values.

    These are keys of `layout.json`: a renamed key refuses older checkpoints. `conversion/run_checkpoint.py` reads
    "tensor", "drafter" (false, or the drafter's kind) and "eagle3".
    """
    parallel = trainer.config.parallel
    drafter = trainer.config.drafter
    layout: dict[str, Any] = {}
    if drafter.train and DRAFTER in trainer.hf_config and trainer._draft_ids is not None:
        layout["eagle3"] = eagle3_identity(trainer.hf_config, trainer._draft_ids)
    return layout | {
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "expert": parallel.expert,
        "replicas": ps.get_data_parallel_world_size(with_context_parallel=True),
        "distributed": bool(trainer.config.optimizer.distributed),
        "dtype": trainer.config.model.dtype,
        "drafter": drafter.train and drafter.kind,
    }


def _drafter_rows_of(batch: PackedBatch, hidden: Tensor) -> Tensor:
    """Return the hidden states `[t, H]` of the positions in `drafter_part`; all of them if there is no such part."""
    if batch.drafter_rows is None:
        return hidden
    return hidden.index_select(0, to_device(batch.drafter_rows, hidden.device))


def _drafter_targets(batch: PackedBatch) -> DrafterTargets:
    """Return the targets of the samples that the drafter learns from."""
    rows = batch.drafter_rows  # read before `batch` is replaced: `drafter_part` has None here
    batch = batch.drafter_part or batch
    return DrafterTargets(
        labels=batch.drafter_labels,
        weight=[mask * batch.drafter_weight for mask in batch.drafter_mask],
        counts=batch.counts["drafter"],
        cu_seqlens_padded=batch.cu_seqlens_padded,
        rows=rows,
        seeds=batch.noise_seeds,
        positions=batch.position_ids,
    )


def _from_last_stage(x: Tensor) -> Tensor:
    """Return the `x` of the last pipeline stage, on every stage, on the CPU if there are several.

    Collective over the pipeline; `x` has the same shape and dtype on all of its ranks. Other stages' values are lost.
    """
    if ps.get_pipeline_model_parallel_world_size() == 1:
        return x
    x = x.to(runtime.device())  # NCCL sends no tensors of the CPU
    dist.broadcast(
        x,
        ps.get_pipeline_model_parallel_last_rank(),
        group=ps.get_pipeline_model_parallel_group(),
    )
    return x.cpu()

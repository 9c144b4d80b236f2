"""One optimizer step of policy and drafter over packed micro-batches, under every parallelism that Megatron has.

Megatron's pipeline schedule runs the policy. On the last stage the loss function also runs the drafter, forward and
backward, on the detached hidden states of the same micro-batch: its graph ends there.

Every loss is a sum divided by the step's global count, known before the first backward (`PackedBatch.counts`), so how
tokens fall into micro-batches, packings and ranks changes a gradient by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rlspec.config import Config
from megatron_rlspec.mtp.loss import Student
from megatron_rlspec.mtp.predict import Prediction, deepen, of_rows, walk
from megatron_rlspec.packing.context_parallel import cp_index, join_from_cp
from megatron_rlspec.train import checkpoint, experts, runtime, shards
from megatron_rlspec.train.attention import PackedSequences
from megatron_rlspec.train.drafter import ZERO_FIRST_EMBEDDING, Drafter
from megatron_rlspec.train.model import Policy, describe, rotary_base, transformer_config
from megatron_rlspec.train.objectives import OBJECTIVES, Head, Sums, means, reduce_sums
from megatron_rlspec.train.optimizer import AdamW, Learner
from megatron_rlspec.types import PackedBatch, Scope


class Trainer:
    """Policy, drafter and their optimizers on this rank. Every method is collective: all ranks call it alike.

    `hf_config` is the parsed config.json. Without `config.drafter.train` there is no drafter at all.
    """

    def __init__(self, config: Config, hf_config: Mapping[str, Any]) -> None:
        runtime.init_distributed(config.parallel, config.train.seed)
        self.config, self.hf_config, self.device = config, dict(hf_config), runtime.device()
        self.last_stage = ps.is_pipeline_last_stage()
        self.model_config = transformer_config(hf_config, config)
        self.rotary_base = rotary_base(hf_config)
        self.policy = Policy(self.model_config, hf_config, config.model.max_length).to(self.device)
        self.learner = Learner(self.policy, _policy_adam(config), pipelined=True)
        self.drafter: Drafter | None = None
        self.drafter_learner: Learner | None = None
        options = config.drafter
        self.table = shards.family(hf_config, 1 if options.repeated_layer else options.depth)
        if options.train and self.last_stage:
            self.drafter = Drafter(
                self.model_config,
                depth=options.depth,
                repeated_layer=options.repeated_layer,
                zero_first_embedding=self.table.name in ZERO_FIRST_EMBEDDING,
                rotary_base=self.rotary_base,
                seed=config.train.seed + 1,
            ).to(self.device)
            self.drafter_learner = Learner(self.drafter, _drafter_adam(config), pipelined=False)
        # Last: layers with experts copy the configuration that they are built from.
        self.model_config.finalize_model_grads_func = self.learner.finalize
        self.prediction: Prediction | None = None  # of the next rollout's acceptance, by the last GRPO step
        self._steps = _predicted_steps(config)
        # Greedy rollouts are trained at temperature 1: the distribution that they are the mode of.
        self.temperature = config.rollout.temperature or 1.0
        self.reference: list[Tensor] = []
        self.embedding: Tensor | None = None
        self.refresh_embedding()

    def load_hf(self, tensors: Mapping[str, Tensor], *, fresh_drafter: bool = False) -> None:
        """Take the weights of a checkpoint; with `fresh_drafter` its MTP tensors are neither needed nor read."""
        modules = [self.policy] if self.drafter is None or fresh_drafter else [self.policy, self.drafter]
        shards.load(self.table, modules, self.model_config, tensors)
        for learner in (self.learner, self.drafter_learner):
            if learner is not None:
                learner.optimizer.reload_model_params()
        self.refresh_embedding()

    def export(self, scope: Scope = "all") -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names on rank 0; other ranks must exhaust the (empty) iterator too."""
        return shards.export(self.table, self.policy, self.drafter, self.model_config, scope)

    def save(self, directory: Path) -> None:
        """Write all that a later `load` needs to continue bit for bit; the directory appears whole or not at all."""
        checkpoint.save(directory, self._learners(), self._layout())

    def load(self, directory: Path) -> None:
        """Continue from `save`, by as many ranks in the same layout. Raises ValueError if anything differs."""
        checkpoint.load(directory, self._learners(), self._layout())
        self.refresh_embedding()

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        *,
        objective: Literal["sft", "grpo"] = "sft",
        train_policy: bool = True,
        logprob_gap: float = math.inf,
    ) -> dict[str, float]:
        """One optimizer step over this rank's micro-batches; the returned metrics are the same on all ranks.

        train_policy  False: the policy only computes hidden states, and just the drafter learns
        logprob_gap   mean |log-prob difference| between engines and policy above which the samples are another model's

        A policy loss or gradient norm that is not finite leaves the policy as it was (`policy/skipped` = 1), and the
        drafter likewise by its own. A gap above `logprob_gap` also leaves the policy as it was.
        """
        if not train_policy and self.config.drafter.train and not self.config.drafter.mtp_detach_heads:
            raise ValueError(
                "drafter.mtp_detach_heads=false trains the policy through the drafter; it cannot stay frozen"
            )
        self.policy.train()
        self.learner.zero_grad()
        if coefficient := self.config.model.moe_aux_loss_coeff:
            tokens, sequence = sum(len(batch.tokens) for batch in batches), self.config.parallel.sequence
            each = experts.coefficient_of_a_token(coefficient, tokens, sequence=sequence)
            self.model_config.moe_aux_loss_coeff = each
        if self.drafter_learner is not None:
            self.drafter.train()
            self.drafter_learner.zero_grad()
        sums = self._run(batches, partial(self._losses, objective, train_policy), forward_only=not train_policy)
        totals = reduce_sums(sums)
        found = [totals.pop(f"prediction/{name}", None) for name in ("reached", "accepted")]
        metrics = means(totals)
        told = found[0] is not None and math.isfinite(metrics["drafter/objective"])  # else its matches say nothing
        self.prediction = Prediction.of_sums(self._steps, *found) if told else None
        if train_policy:
            agree = metrics.get("policy/train_rollout_logprob_abs_diff", 0.0) <= logprob_gap
            norm, updated = self.learner.step(allowed=agree and math.isfinite(metrics["policy/loss"]))
            metrics |= {"policy/grad_norm": norm, "policy/skipped": float(not updated)}
        if self.config.drafter.train:
            metrics |= self._drafter_step()
        if train_policy:
            self.refresh_embedding()
        return metrics

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-probability of every trained label at the rollouts' temperature, `[T]` per micro-batch; elsewhere 0."""
        self.policy.eval()
        rows = self._run(batches, self._report_logprobs, forward_only=True)
        if self.last_stage:
            rows = [row.cpu() for row in rows]
        else:
            exact = torch.promote_types(self.model_config.params_dtype, torch.float32)
            rows = [torch.empty(len(batch.tokens), dtype=exact) for batch in batches]
        return [self._from_last_stage(row) for row in rows]

    def keep_reference(self) -> None:
        """Remember the policy as it is now, on the CPU: the one that `reference_logprobs` speaks of."""
        self.reference = [parameter.detach().cpu().clone() for parameter in self.policy.parameters()]

    @torch.no_grad()
    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """`logprobs` of the remembered policy. It takes the present one's place meanwhile, bit for bit."""
        parameters = list(self.policy.parameters())
        present = [parameter.clone() for parameter in parameters]
        try:
            for parameter, value in zip(parameters, self.reference, strict=True):
                parameter.copy_(value)
            return self.logprobs(batches)
        finally:
            for parameter, value in zip(parameters, present, strict=True):
                parameter.copy_(value)

    def refresh_embedding(self) -> None:
        """Give the drafter the policy's present embedding: a view of it, or a replica on a later pipeline stage."""
        stages = ps.get_pipeline_model_parallel_world_size()
        if stages == 1:
            self.embedding = self.policy.embedding.word_embeddings.weight.detach()
        elif self.policy.share_embeddings_and_output_weights:
            self.embedding = self.policy.head_weight().detach() if self.last_stage else None
        elif self.config.drafter.train and (self.last_stage or ps.is_pipeline_first_stage()):
            if not self.last_stage:
                self.embedding = self.policy.embedding.word_embeddings.weight.detach()
            elif self.embedding is None:
                self.embedding = torch.empty_like(self.policy.head_weight()).detach()
            dist.broadcast(
                self.embedding, src=ps.get_pipeline_model_parallel_first_rank(), group=ps.get_embedding_group()
            )

    def _learners(self) -> dict[str, Learner]:
        both = {"policy": self.learner, "drafter": self.drafter_learner}
        return {name: learner for name, learner in both.items() if learner is not None}

    def _layout(self) -> dict[str, Any]:
        parallel, drafter = self.config.parallel, self.config.drafter
        return {
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "replicas": ps.get_data_parallel_world_size(with_context_parallel=True),
            "distributed": self.config.optimizer.distributed,
            "dtype": self.config.model.dtype,
            "drafter": drafter.train,
            "drafter_layers": 1 if drafter.repeated_layer else drafter.depth,
        }

    def _run(self, batches: Sequence[PackedBatch], loss: Any, *, forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; what `loss` reports for each, on the last stage."""

        def forward(iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            packed = describe(batch, self.model_config, self.rotary_base, self.device)
            tokens, positions = batch.tokens.to(self.device), batch.position_ids.to(self.device)
            with torch.set_grad_enabled(not forward_only):
                hidden = model(tokens[None], positions[None], None, packed_seq_params=packed)
            return hidden, partial(loss, batch, packed)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self.learner.ddp],
            num_microbatches=len(batches),
            seq_length=max(len(batch.tokens) for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _losses(
        self, objective: str, train_policy: bool, batch: PackedBatch, packed: PackedSequences, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Sums]:
        """Policy loss (its backward is the schedule's), and the drafter's forward and backward."""
        hidden = hidden[:, 0]
        head = self._head(1.0 if objective == "sft" else self.temperature)
        loss, sums = hidden.new_zeros(()), {}
        predict = objective == "grpo" and bool(self._steps)
        student = None if self.drafter is None else self._student(head, batch, packed, hidden, predict)
        # A teacher row is a row of the policy's own loss: where no other rank holds it, its logits are computed once.
        shared = student is not None and self.config.drafter.loss != "ce" and ps.get_context_parallel_world_size() == 1
        if train_policy:
            observe = student.observe if shared else None
            loss, sums = OBJECTIVES[objective](head, batch, hidden, self.config.algorithm, observe)
        if student is not None:
            if self.config.drafter.loss == "ce":
                student.learn_labels()
            elif not (shared and train_policy):
                student.learn_from(_of_all_ranks(hidden.detach(), batch))
            drafter, metrics = student.finish()
            if student.rows is not None:
                sums |= self._predict(student.rows, batch)
            sums |= {f"drafter/{name}": value for name, value in metrics.items()}
            sums["drafter/objective"] = drafter.detach()
            if self.config.drafter.mtp_detach_heads:
                drafter.backward()
            else:
                loss = loss + drafter
        return loss, torch.zeros((), dtype=torch.int), sums

    def _student(
        self, head: Head, batch: PackedBatch, packed: PackedSequences, hidden: Tensor, predict: bool
    ) -> Student:
        """The drafter's forward at all depths, in one batch of rows, ready to learn."""
        options, T = self.config.drafter, len(batch.tokens)
        assert self.drafter_learner is not None and self.embedding is not None
        outputs = self.drafter_learner.ddp(
            hidden.detach() if options.mtp_detach_heads else hidden,
            [tokens.to(self.device) for tokens in batch.drafter_tokens],
            self.embedding,
            batch.position_ids.to(self.device),
            packed,
        )
        scale = [options.depth_decay**d / batch.counts["drafter"][d] for d in range(options.depth)]
        weight = torch.cat([mask * batch.drafter_weight * s for mask, s in zip(batch.drafter_mask, scale, strict=True)])
        # Depth d at position t learns what the policy says at t + d; rows without a loss may point anywhere.
        size, rank = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
        position = cp_index(batch.cu_seqlens_padded, rank, size).to(self.device)
        teacher = torch.cat([(position + d).clamp(max=size * T - 1) for d in range(1, options.depth + 1)])
        return Student(
            torch.cat(outputs),
            head.weight.detach(),
            torch.cat(batch.drafter_labels).to(self.device),
            weight.to(self.device),
            options.loss,
            teacher_index=teacher,
            groups=torch.arange(options.depth, device=self.device).repeat_interleave(T),
            num_groups=options.depth,
            temperature=head.temperature,
            tp_group=head.tensor_group,
            keep_rows=predict,
        )

    def _predict(self, rows: Mapping[str, Tensor], batch: PackedBatch) -> Sums:
        """Sums over round starts (`mtp/predict.py`) of this micro-batch; a context-parallel group counts once."""
        options, depth, rollout = self.config.spec, self.config.drafter.depth, self.config.rollout
        sampled = rollout.temperature > 0 and rollout.top_p >= 1 and rollout.top_k < 0
        if not rows:  # nothing is trained in this share of a batch; the record and the other ranks want its zeros
            exact = torch.promote_types(self.model_config.params_dtype, torch.float32)
            zeros = torch.zeros(depth * len(batch.tokens), dtype=exact, device=self.device)
            rows = dict.fromkeys(("match", "overlap", "label_ratio"), zeros)
        accept, reach = of_rows(rows, depth, options.verifier, sampled=sampled)
        mask = torch.stack([m * (batch.drafter_weight != 0) for m in batch.drafter_mask], 1).to(accept)
        table = _of_all_ranks(torch.cat([accept, reach, mask], 1), batch)
        if ps.get_context_parallel_rank():
            table = table[:0]
        deep = (deepen(part, max(self._steps)) for part in table.split(depth, 1))
        found = walk(*deep, self._steps)
        return {f"prediction/{n}": torch.from_numpy(getattr(found, n)).to(accept) for n in ("reached", "accepted")}

    def _report_logprobs(
        self, batch: PackedBatch, packed: PackedSequences, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            rows, _ = self._head(self.temperature).logprobs(batch, hidden[:, 0])
        return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), rows

    def _head(self, temperature: float) -> Head:
        return Head(self.policy.head_weight(), temperature)

    def _from_last_stage(self, x: Tensor) -> Tensor:
        if ps.get_pipeline_model_parallel_world_size() == 1:
            return x
        x = x.to(self.device)
        dist.broadcast(x, ps.get_pipeline_model_parallel_last_rank(), group=ps.get_pipeline_model_parallel_group())
        return x.cpu()

    def _drafter_step(self) -> dict[str, float]:
        result = [0.0, 0.0]
        if self.drafter_learner is not None:
            self.drafter_learner.finalize()
            norm, updated = self.drafter_learner.step()
            result = [norm, float(not updated)]
        norm, skipped = self._from_last_stage(torch.tensor(result, dtype=torch.float64)).tolist()
        return {"drafter/grad_norm": norm, "drafter/skipped": skipped}


def _predicted_steps(config: Config) -> tuple[int, ...]:
    """The step counts that rollouts may run, ascending; none where this training step cannot predict acceptance."""
    spec, rollout = config.spec, config.rollout
    if spec.mode == "off" or not config.drafter.train:
        return ()
    unfiltered = rollout.temperature > 0 and rollout.top_p >= 1 and rollout.top_k < 0
    if spec.verifier == "rejection" and (config.drafter.loss == "ce" or not unfiltered):
        return ()
    steps = spec.candidate_steps if spec.mode == "adaptive" else (spec.num_steps,)
    return tuple(sorted({k for k in steps if k > 0}))


def _of_all_ranks(hidden: Tensor, batch: PackedBatch) -> Tensor:
    """`[T, H]` of this rank to that of all context-parallel ranks, in the order of the packed batch."""
    group = ps.get_context_parallel_group()
    if group.size() == 1:
        return hidden
    everyone = [torch.empty_like(hidden) for _ in range(group.size())]
    dist.all_gather(everyone, hidden.contiguous(), group=group)
    return join_from_cp(everyone, batch.cu_seqlens_padded, dim=0)


def _policy_adam(config: Config) -> AdamW:
    options = config.optimizer
    return AdamW(
        lr=options.lr,
        weight_decay=options.weight_decay,
        beta1=options.beta1,
        beta2=options.beta2,
        eps=options.eps,
        clip_grad=options.clip_grad,
        warmup_steps=options.warmup_steps,
        decay_steps=options.decay_steps,
        distributed=options.distributed,
    )


def _drafter_adam(config: Config) -> AdamW:
    """The drafter's own rate, decay and clip; the moments' constants are the policy's."""
    own = config.drafter
    return replace(
        _policy_adam(config), lr=own.lr, weight_decay=own.weight_decay, clip_grad=own.clip_grad, warmup_steps=0
    )

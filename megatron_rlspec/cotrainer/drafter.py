"""Train a drafter beside a policy that another trainer trains: with its own `GPTModel`, DDP, optimizer and schedule.

`DrafterTraining` is the base class, also of slime's drafter (`integrations/slime/drafter.py`), which trains the MTP
layer in the policy's model. `DrafterBeside` adds a drafter with weights of its own, for `CoTrainer` and for EAGLE-3
inside slime.

No autograd graph connects drafter and policy. So the drafter's forward and backward run at the end of the policy's
forward, on the detached hidden states of the same micro-batch:

    begin_step(counts)         zero the drafter's gradients
    add(sequences)             for each micro-batch, in the order of the passes: what the drafter learns from there
    on_hidden(hidden, fields)  within each pass: loss and gradients; called by `_postprocess`
    end_step()                 sum gradients over ranks, clip, update

The drafter has gradient buffers and an AdamW of its own (`train.optimizer.Learner`), so the policy does not change by a
bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megatron_rlspec.config import ConfigError, DrafterConfig, OptimizerConfig
from megatron_rlspec.conversion.drafter_files import words
from megatron_rlspec.cotrainer.fields import DrafterFields, Sequences, drafter_fields
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.train import shards
from megatron_rlspec.train.attention import packed_sequences
from megatron_rlspec.train.drafter import Drafter, build_drafter
from megatron_rlspec.train.drafter_step import (
    DrafterObjective,
    DrafterStep,
    follow_rounds,
    pop_prediction,
)
from megatron_rlspec.train.model import (
    Taps,
    eagle3_identity,
    embedding_for_drafter,
    head_weight,
    taps_of,
)
from megatron_rlspec.train.objectives import OutputLayer, Sums, means, sum_over_replicas
from megatron_rlspec.train.optimizer import Learner


class DrafterTraining:
    """The drafter of one rank of the last pipeline stage. Subclasses provide the drafter's module (`build`).

    Construct it before the model is wrapped into DDP: the model's `_postprocess` is replaced. Then call `make_ready`,
    after the policy's weights are loaded if the drafter's are among them. From then on, forward passes in training mode
    train the drafter, one of `fields` each.

    Shapes: t positions of this context-parallel rank, tp tensor-parallel ranks, H the policy's hidden size.

    settings      section [drafter]
    ready         whether `make_ready` was called; before, forward passes leave the drafter alone
    denominators  `[depth]`: Σ weight of the predictions that the step trains at each depth, over all ranks
    fields        what the drafter learns from in the next forward passes, in their order; each pass takes the first
    predicted     acceptance predicted by the last step, over the samples of all ranks; None before the first step, and
                  if the step's loss or gradient was not finite
    embedding     the embedding that the drafter reads, `[V / tp, H]`; None: the model's, which is on this stage
    block         the module that is trained, after `make_ready`
    drafter_step  student, loss and update of `block` (`train/drafter_step.py`), after `make_ready`
    learner       gradient buffers and optimizer of `block`; None for a drafter that is not trained
    """

    block: Drafter

    def __init__(
        self,
        model: GPTModel,
        settings: DrafterConfig,
        objective: DrafterObjective,
        *,
        temperature: float,
        clip_grad: float,
    ) -> None:
        """Replace the model's `_postprocess`.

        temperature  of the rollouts; 0: greedy
        clip_grad    largest norm of the drafter's gradient; 0: no limit
        """
        self.model = model
        self.settings = settings
        self.objective = objective
        self.ready = False
        self.embedding: Tensor | None = None
        self.learner: Learner | None = None
        self.denominators: list[float] = []
        self.fields: deque[DrafterFields] = deque()
        self.predicted: Prediction | None = None
        self._sums: list[Sums] = []  # of the step's micro-batches
        self._clip_grad = clip_grad
        self._temperature = temperature or 1.0  # greedy rollouts train at temperature 1
        model._postprocess = partial(self._postprocess, model._postprocess)

    def make_ready(self) -> None:
        """Build the drafter, and its gradient buffers and optimizer if it is trained.

        All ranks of the stage call it, once.
        """
        self.block = self.build()
        optimizer = OptimizerConfig(clip_grad=self._clip_grad)
        # DDP and the optimizer take the parameters that have `requires_grad` when they are built.
        with self.trainable() if self.settings.train else nullcontext():
            self.drafter_step = DrafterStep(self.block, self.settings, optimizer, self.objective)
        self.learner = self.drafter_step.learner
        self.ready = True

    @property
    def learners(self) -> dict[str, Learner]:
        """Return what a checkpoint holds of this drafter; {} for one that is not trained."""
        return {} if self.learner is None else {"drafter": self.learner}

    def layout(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with the saved one, besides the layout of the ranks."""
        return {}

    def build(self) -> Drafter:
        """Return the module that is trained, with its weights."""
        raise NotImplementedError

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return what the drafter reads of the policy, `[t, n]`, detached: n = H, or more for EAGLE-3.

        hidden  the policy's hidden states, `[t / tp, 1, H]` with sequence parallelism, else `[t, 1, H]`; detached
        """
        return self.gather(hidden)[:, 0]

    @contextmanager
    def trainable(self) -> Iterator[None]:
        """Let the drafter's parameters have gradients inside the `with` block.

        This class does nothing: its drafter always has them. Slime's drafter overrides it, because an MTP layer in the
        policy's model is frozen outside the block, so that the policy's optimizer does not take it.
        """
        yield

    # ---- a step -----------------------------------------------------------------------------------------------------

    def begin_step(self, counts: Sequence[float]) -> None:
        """Start a step. Collective over the data-parallel ranks. Drops what an earlier step has left.

        All losses of the step are divided by the denominators, which are known before the first backward. So the split
        into micro-batches changes rounding only.

        counts  `[depth]`: Σ weight of the predictions in this data-parallel rank's whole sequences, equal on all its
                context-parallel ranks
        """
        device = next(self.model.parameters()).device
        # float64: float32 has not every whole number above 2**24
        total = torch.tensor(counts, dtype=torch.float64, device=device)
        # Without the context-parallel ranks: each of them has the counts of whole sequences.
        dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=False))
        # 1 at a depth that trains nothing: its losses add up to 0, but a division by 0 would be an error
        self.denominators = [n or 1.0 for n in total.tolist()]
        self.fields.clear()
        self._sums = []
        self.predicted = None
        self.drafter_step.begin()

    def add(self, sequences: Sequences) -> None:
        """Take the sequences of the step's next forward pass. Call it in the order of the passes.

        Call it after `begin_step`, which clears `fields` and sets the denominators that the new fields hold.
        """
        fields = drafter_fields(
            sequences,
            self.settings.depth,
            self.denominators,
            cp_rank=ps.get_context_parallel_rank(),
            cp_size=ps.get_context_parallel_world_size(),
        )
        self.fields.append(fields)

    def on_hidden(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any] | None = None
    ) -> None:
        """Run the drafter's forward and backward on one micro-batch.

        hidden  the policy's hidden states after its final norm, in the shape of `inputs`
        given   further arguments of Megatron's layers, for drafters that run them unchanged
        """
        # No gradient of the drafter may reach the policy, neither here nor through the head or the embedding.
        hidden = hidden.detach()
        step = self.drafter_step
        head = OutputLayer(head_weight(self.model).detach(), self._temperature)
        trains = self.learner is not None
        with self.trainable() if trains else nullcontext(), torch.set_grad_enabled(trains):
            outputs = self.unroll(hidden, fields, given or {})
            predicts = bool(self.objective.predicted_steps)
            student = step.make_student(outputs, fields, head, predict=predicts)
            # With cross-entropy there is no teacher. Else its logits are computed from the policy's hidden states.
            teacher = None if self.settings.loss == "ce" else self.gather(hidden)[:, 0]
            self._sums.append(step.learn(student, fields, teacher))

    def end_step(self) -> dict[str, float]:
        """Reduce gradients, clip and update; return means over the step's trained predictions, per depth.

        Collective over the stage's ranks: either all of them had micro-batches in the step, or none. Call it once a
        step, after the last forward pass. Metrics have the names of `train/objectives.means` with `_` in place of `/`.
        """
        metrics: dict[str, float] = {}
        updated = True
        if self.learner is not None:
            with self.trainable():
                norm, updated = self.drafter_step.update()
            self.learner.zero_grad()
            metrics["drafter_grad_norm"] = norm
            metrics["drafter_skipped"] = float(not updated)
        if not self._sums:
            return metrics
        steps = self.objective.predicted_steps
        # Before the sum over ranks, because it turns rows of positions, which differ between ranks, into sums.
        follow_rounds(self._sums, steps)
        totals = sum_over_replicas(self._sums)
        predicted = pop_prediction(totals, steps)
        if updated and predicted is not None:
            self.predicted = predicted
            for k in predicted.steps:
                metrics[f"drafter_tokens_k{k}"] = predicted.tokens_per_round(k)
        for name, value in means(totals).items():
            # Left out are two that are no means: the loss over all depths, and the numbers of trained tokens.
            if name != "drafter/objective" and not name.startswith("drafter/tokens_"):
                metrics[name.replace("/", "_")] = value
        return metrics

    def unroll(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return the input of the output layer at depths 1..D, `[t, H]` each; arguments as of `on_hidden`."""
        groups = self.block.config.num_query_groups // ps.get_tensor_model_parallel_world_size()
        packed = packed_sequences(
            fields.cu_seqlens_padded.cpu(),
            groups,
            ps.get_context_parallel_world_size(),
            ps.get_context_parallel_rank(),
            hidden.device,
        )
        embedding = self.embedding
        if embedding is None:
            embedding = self.model.embedding.word_embeddings.weight.detach()
        return self.block(
            self.inputs(hidden), fields.tokens, embedding, fields.position_ids, packed
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all tensor-parallel ranks, `[t, ...]`, if sequence parallelism splits them. Collective."""
        if not self.model.config.sequence_parallel:
            return x
        # Every rank computes the same from the gathered rows. So a backward must split the gradient, not sum it over
        # ranks.
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)

    def _postprocess(self, original: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replace `GPTModel._postprocess`: train the drafter, then return the policy's logits as if without MTP.

        original  the model's own `_postprocess`, to which all other arguments are passed on

        Passes in evaluation mode or without gradients, such as those for old log-probs, take no fields.
        """
        if self.ready and self.fields and self.model.training and torch.is_grad_enabled():
            self.on_hidden(hidden_states, self.fields.popleft(), kwargs)
        kwargs["mtp_in_postprocess"] = False
        return original(hidden_states, *args, **kwargs)


class DrafterBeside(DrafterTraining):
    """A drafter that is no part of the policy's model: an MTP layer, or an EAGLE-3 drafter.

    Every pipeline stage has such an object, and all ranks call its methods. Only that of the last stage has parameters,
    and trains them. The others send it what the drafter reads: the first stage the embedding, and each stage the inputs
    of its layers that an EAGLE-3 drafter reads.

    hf_config   config.json of the policy, with that of the EAGLE-3 drafter under the key `DRAFTER`
    table       names of the tensors of both, in Megatron and in the checkpoint
    vocabulary  token ids that an EAGLE-3 drafter drafts from, ascending, `[S]` int64; None for an MTP layer
    """

    def __init__(
        self,
        model: GPTModel,
        settings: DrafterConfig,
        objective: DrafterObjective,
        hf_config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        temperature: float,
        clip_grad: float,
    ) -> None:
        """Build on every stage.

        tensors  full tensors by Hugging Face names: at least the drafter's own, with which it begins

        Raises ConfigError for pipeline stages on which no drafter can be trained.
        """
        _check_stages(model, DRAFTER in hf_config)
        self.hf_config = hf_config
        self.table = shards.job_name_table(hf_config)
        self.vocabulary: Tensor | None = None
        self._initial_tensors = tensors
        self._layer_inputs: Taps | None = None
        if DRAFTER in hf_config:
            self.vocabulary = words(tensors, hf_config)
            self._layer_inputs = Taps(model, taps_of(hf_config))
        super().__init__(model, settings, objective, temperature=temperature, clip_grad=clip_grad)

    def make_ready(self) -> None:
        if not self.model.post_process:
            # a module without parameters, for `CoTrainer._export`
            self.block = nn.Module()  # type: ignore[assignment]
            self.ready = True
            return
        super().make_ready()
        self.load(self._initial_tensors)
        self.drafter_step.draft_ids = self.vocabulary

    def layout(self) -> dict[str, Any]:
        if self.vocabulary is None:
            return {"drafter": "mtp"}
        return {"drafter": eagle3_identity(self.hf_config, self.vocabulary)}

    def begin_step(self, counts: Sequence[float]) -> None:
        # Collective over the first and the last stage, so called on every stage; and in every step, because the policy
        # has changed its embedding.
        self.embedding = embedding_for_drafter(self.model, self.embedding)
        if self.model.post_process:
            super().begin_step(counts)

    def add(self, sequences: Sequences) -> None:
        if self.model.post_process:
            super().add(sequences)

    def end_step(self) -> dict[str, float]:
        return super().end_step() if self.model.post_process else {}

    def build(self) -> Drafter:
        # With `calculate_per_token_loss`, Megatron's DDP sums gradients over ranks. Their mean would be wrong, since
        # losses are divided by denominators of all ranks.
        config = replace(self.model.config, calculate_per_token_loss=True)
        block = build_drafter(config, self.hf_config, seed=1)  # any seed: `load` follows
        if self.vocabulary is None:
            # The MTP layer rotates the policy's share of channels. Of configurations, only our own `DecoderConfig` has
            # this field, which `at_positions` in `train/model.py` reads. `build_drafter` sets that of EAGLE-3.
            block.config.rotary_percent = self.model.rotary_percent
        return block.to(next(self.model.parameters()).device)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the drafter's weights from full tensors under Hugging Face names. Raises CheckpointError.

        On the last pipeline stage only, after the drafter is built; `make_ready` calls it.
        """
        shards.load(self.table, [self.block], self.model.config, tensors)
        if self.learner is not None:
            # The optimizer's float32 copies still hold the old weights, which the next update would restore.
            self.learner.optimizer.reload_model_params()

    def on_hidden(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any] | None = None
    ) -> None:
        """As `DrafterTraining.on_hidden`; `hidden` may also be `[s, b, H]`, b sequences padded to length s.

        Raises ConfigError if its positions are not those of the micro-batch that `begin_step` got.
        """
        length, batch, width = hidden.shape
        if batch > 1:
            if self._layer_inputs is not None or self.model.config.sequence_parallel:
                raise ConfigError(
                    f"hidden states of {batch} padded rows: an EAGLE-3 drafter and sequence parallelism expect one "
                    "packed row"
                )
            # one sequence after the other, as `Sequences.starts` counts positions
            hidden = hidden.transpose(0, 1).reshape(length * batch, 1, width)
        positions = length * batch
        # With sequence parallelism each tensor-parallel rank has 1 / tp of the positions.
        if self.model.config.sequence_parallel:
            positions *= ps.get_tensor_model_parallel_world_size()
        expected = len(fields.position_ids)
        if positions != expected:
            raise ConfigError(
                f"hidden states of {positions} positions, but begin_step got {expected} for this micro-batch"
            )
        super().on_hidden(hidden, fields, given)

    def inputs(self, hidden: Tensor) -> Tensor:
        if self._layer_inputs is None:
            return super().inputs(hidden)
        return self._layer_inputs()


def _check_stages(model: GPTModel, eagle3: bool) -> None:
    """Raise ConfigError for pipeline stages on which no drafter can be trained."""
    config = model.config
    if config.virtual_pipeline_model_parallel_size:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size}: expected None"
        )
    stages = config.pipeline_model_parallel_size
    if stages > 1 and eagle3 and not config.variable_seq_lengths:
        raise ConfigError(
            f"pipeline_model_parallel_size={stages}: stages send what an EAGLE-3 drafter reads beside the hidden "
            "states, so they must tell each other shapes; expected variable_seq_lengths=True"
        )

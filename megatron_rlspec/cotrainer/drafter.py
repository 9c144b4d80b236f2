"""The drafter of a policy that somebody else trains: Megatron's `GPTModel`, its DDP, its optimizer, its schedule.

No graph connects drafter and policy. So the drafter's forward and backward run at the end of the policy's forward, on
the detached hidden states of the same micro-batch:

    begin_step(counts)         zero the drafter's gradients
    add(sequences)             what it learns from in the next forward pass
    on_hidden(hidden, fields)  within that pass: loss and gradients
    end_step()                 sum gradients over ranks, clip, update

It has gradient buffers and an AdamW of its own (`train.optimizer.Learner`), so the policy's bits stay.
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
    prediction_of,
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
    """The drafter of one rank of the last pipeline stage. Subclasses have the drafter's own layers.

    Construction comes before the model is wrapped into DDP. `thaw` follows once the policy's weights are loaded.

    settings      section [drafter]
    ready         after `thaw`
    denominators  weights that the step trains at each depth, over all ranks: `[depth]`
    fields        what the drafter learns from in the next forward passes, in their order
    predicted     acceptance by the last step, over the samples of all ranks
    embedding     that it reads, `[V / tensor, H]`; None: the model's, on this stage
    block         the module that is trained, after `thaw`
    learner       its gradient buffers and optimizer; None for a drafter that is not trained
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
        """`temperature` of the rollouts, 0: greedy; `clip_grad`: largest norm of the drafter's gradient, 0: any."""
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
        self._temperature = temperature or 1.0
        model._postprocess = partial(self._postprocess, model._postprocess)

    def thaw(self) -> None:
        """Build the drafter, and gradient buffers and optimizer of one that is trained."""
        self.block = self.build()
        optimizer = OptimizerConfig(clip_grad=self._clip_grad)
        with self.trainable() if self.settings.train else nullcontext():
            self.drafter_step = DrafterStep(self.block, self.settings, optimizer, self.objective)
        self.learner = self.drafter_step.learner
        self.ready = True

    @property
    def learners(self) -> dict[str, Learner]:
        """Return what a checkpoint holds of this drafter; {} for one that is not trained."""
        return {} if self.learner is None else {"drafter": self.learner}

    def layout(self) -> dict[str, Any]:
        """Return in what a resumed run must equal the saved one, besides the layout of the ranks."""
        return {}

    def build(self) -> Drafter:
        """Return the module that is trained, with its weights."""
        raise NotImplementedError

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return what the drafter reads, `[t, n]`, detached; `hidden [t / tp, 1, H]`, the policy's, detached."""
        return self.gather(hidden)[:, 0]

    @contextmanager
    def trainable(self) -> Iterator[None]:
        """Let the drafter's parameters be trained inside the `with` block."""
        yield

    # ---- a step -----------------------------------------------------------------------------------------------------

    def begin_step(self, counts: Sequence[float]) -> None:
        """Start a step; `counts [depth]`: weights that this data-parallel rank trains, over its CP ranks. Collective.

        Denominators are known before the first backward, so the split into micro-batches changes rounding only.
        """
        device = next(self.model.parameters()).device
        total = torch.tensor(counts, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=False))
        self.denominators = [n or 1.0 for n in total.tolist()]
        self.fields.clear()
        self._sums = []
        self.predicted = None
        self.drafter_step.begin()

    def add(self, sequences: Sequences) -> None:
        """Take the sequences of a forward pass, after those of all passes before it in the step."""
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

        hidden  the policy's hidden states after its final norm, `[t / tp, 1, H]`
        given   further arguments of Megatron's layers, for drafters that run them unchanged
        """
        hidden = hidden.detach()
        step = self.drafter_step
        head = OutputLayer(head_weight(self.model).detach(), self._temperature)
        trains = self.learner is not None
        with self.trainable() if trains else nullcontext(), torch.set_grad_enabled(trains):
            outputs = self.unroll(hidden, fields, given or {})
            predicts = bool(self.objective.predicted_steps)
            student = step.student(outputs, fields, head, predict=predicts)
            teacher = None if self.settings.loss == "ce" else self.gather(hidden)[:, 0]
            self._sums.append(step.learn(student, fields, teacher))

    def end_step(self) -> dict[str, float]:
        """Reduce, clip and update; return means over the step's trained predictions, per depth."""
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
        follow_rounds(self._sums, steps)
        totals = sum_over_replicas(self._sums)
        predicted = prediction_of(totals, steps)
        if updated and predicted is not None:
            self.predicted = predicted
            for k in predicted.steps:
                metrics[f"drafter_tokens_k{k}"] = predicted.tokens_per_round(k)
        for name, value in means(totals).items():
            if name != "drafter/objective" and not name.startswith("drafter/tokens_"):
                metrics[name.replace("/", "_")] = value
        return metrics

    def unroll(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return the input of the output layer at depths 1..D, `[t, H]` each; arguments as `on_hidden`."""
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
        """Return the rows of all tensor-parallel ranks, if sequence parallelism splits them."""
        if not self.model.config.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)

    def _postprocess(self, original: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replace `GPTModel._postprocess`: train the drafter, then return the policy's logits as if without MTP."""
        if self.ready and self.fields and self.model.training and torch.is_grad_enabled():
            self.on_hidden(hidden_states, self.fields.popleft(), kwargs)
        kwargs["mtp_in_postprocess"] = False
        return original(hidden_states, *args, **kwargs)


class DrafterBeside(DrafterTraining):
    """A drafter that is no part of the policy's model: an MTP layer, or an EAGLE-3 drafter.

    Every pipeline stage has one. Only that of the last stage has parameters, and trains them. The others send it what
    it reads: the first one the embedding, and each the inputs of its layers that an EAGLE-3 drafter reads.

    hf_config   of the policy, with the EAGLE-3 drafter's under `DRAFTER`
    table       names of the tensors of both
    vocabulary  token ids that an EAGLE-3 drafter drafts from, `[S]`; None for an MTP layer
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
        """`tensors` hold at least those that the drafter begins with. Raises ConfigError for such stages."""
        _check_stages(model, DRAFTER in hf_config)
        self.hf_config = hf_config
        self.table = shards.family(hf_config)
        self.vocabulary: Tensor | None = None
        self._begins_with = tensors
        self._layer_inputs: Taps | None = None
        if DRAFTER in hf_config:
            self.vocabulary = words(tensors, hf_config)
            self._layer_inputs = Taps(model, taps_of(hf_config))
        super().__init__(model, settings, objective, temperature=temperature, clip_grad=clip_grad)

    def thaw(self) -> None:
        if not self.model.post_process:
            self.block = nn.Module()  # type: ignore[assignment]
            self.ready = True
            return
        super().thaw()
        self.load(self._begins_with)
        self.drafter_step.words = self.vocabulary

    def layout(self) -> dict[str, Any]:
        if self.vocabulary is None:
            return {"drafter": "mtp"}
        return {"drafter": eagle3_identity(self.hf_config, self.vocabulary)}

    def begin_step(self, counts: Sequence[float]) -> None:
        self.embedding = embedding_for_drafter(self.model, self.embedding)
        if self.model.post_process:
            super().begin_step(counts)

    def add(self, sequences: Sequences) -> None:
        if self.model.post_process:
            super().add(sequences)

    def end_step(self) -> dict[str, float]:
        return super().end_step() if self.model.post_process else {}

    def build(self) -> Drafter:
        config = replace(self.model.config, calculate_per_token_loss=True)
        block = build_drafter(config, self.hf_config, seed=1)  # `load` follows
        if self.vocabulary is None:  # as train.model.DecoderConfig has it
            block.config.rotary_percent = self.model.rotary_percent
        return block.to(next(self.model.parameters()).device)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the drafter's weights from full tensors under Hugging Face names. Raises CheckpointError."""
        shards.load(self.table, [self.block], self.model.config, tensors)
        if self.learner is not None:
            self.learner.optimizer.reload_model_params()

    def on_hidden(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any] | None = None
    ) -> None:
        """As `DrafterTraining.on_hidden`; `hidden` may also be `[s, b, H]`, b rows with padding."""
        rows, batch, width = hidden.shape
        if batch > 1:
            if self._layer_inputs is not None or self.model.config.sequence_parallel:
                raise ConfigError(
                    f"hidden states of {batch} padded rows: an EAGLE-3 drafter and sequence parallelism expect one "
                    "packed row"
                )
            hidden = hidden.transpose(0, 1).reshape(rows * batch, 1, width)
        positions = rows * batch
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

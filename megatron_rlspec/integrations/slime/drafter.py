"""The drafter inside slime: `SlimeMTP` trains the MTP layers of slime's model, and `eagle3.SlimeEagle3` another model.

slime builds, loads, saves and pushes the MTP layers. It wraps the whole model into one DDP and one optimizer. The MTP
layers are frozen while it does. Afterwards they get gradient buffers and an AdamW of their own
(`train.optimizer.Learner`). They are trainable only while they learn: Megatron's gradient finalisation runs over every
trainable parameter of the model and would include them.

No graph connects drafter and policy, so the drafter's forward and backward run within the policy's forward. slime's own
MTP loss never runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rlspec.config import OptimizerConfig
from megatron_rlspec.integrations.slime import routing
from megatron_rlspec.integrations.slime.batch import DrafterFields
from megatron_rlspec.integrations.slime.options import Options
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.train.attention import PackedAttention, packed_sequences
from megatron_rlspec.train.drafter import Drafter, MTPDrafter
from megatron_rlspec.train.drafter_step import (
    DrafterObjective,
    DrafterStep,
    drafter_loss_named,
    prediction_of,
    training_temperature,
    unfiltered,
)
from megatron_rlspec.train.drafter_updates import EverySteps
from megatron_rlspec.train.objectives import OutputLayer, Sums, means, sum_over_replicas
from megatron_rlspec.train.optimizer import Learner


def slime_objective(options: Options, args: Any) -> DrafterObjective:
    """Return what the drafter of a slime run learns and predicts; `args` are slime's."""
    temperature = args.rollout_temperature
    drafter = options.drafter
    # Engines draft with the verifier's noise, but not at temperature 0.
    coupled = options.verifier == "position_keyed" and temperature > 0
    return DrafterObjective(
        depth=drafter.depth,
        loss=drafter_loss_named(drafter.loss),
        depth_decay=drafter.depth_decay,
        predicted_steps=tuple(sorted({k for k in options.candidate_steps if k > 0})),
        verifier=options.verifier,
        sampled=unfiltered(temperature, args.rollout_top_p, args.rollout_top_k),
        coupled=coupled,
    )


class Adopted(MTPDrafter):
    """A drafter around an MTP layer that exists already: chain-exact, with grouped-query attention."""

    def __init__(self, model: GPTModel, depth: int, zero_first_embedding: bool, rope: Rope) -> None:
        config = replace(model.config, calculate_per_token_loss=True)
        config.rotary_percent = model.rotary_percent  # as train.model.DecoderConfig has it
        MegatronModule.__init__(self, config=config)
        self.mtp = model.mtp
        self.depth = depth
        self.zero_first_embedding = zero_first_embedding
        self.rope = rope
        self.recompute = config.recompute_granularity == "full"


def _rope(model: GPTModel) -> Rope:
    """Return the model's rotary embedding. Megatron keeps no factor of a scaling; the slowest frequency shows it."""
    plain = Rope(float(model.rotary_base))
    if not getattr(model, "rotary_scaling", False):
        return plain
    scaled = model.rotary_pos_emb.inv_freq
    unscaled = plain.frequencies(2 * len(scaled))
    return Rope.llama3(plain.base, round(float(unscaled[-1] / scaled[-1]), 3))


class SlimeDrafter:
    """The drafter of one rank of the last pipeline stage. Subclasses have the drafter's own layers.

    Construction comes before slime wraps the model into DDP. `thaw` follows once the checkpoint is loaded. Then each
    step calls `begin`, runs the policy's forwards, and calls `step`.

    settings      section [drafter]
    ready         after `thaw`
    due           whether the present step trains the drafter
    denominators  weights that the step trains at each depth, over all ranks: `[depth]`
    fields        what the drafter learns from in the next forward pass
    predicted     acceptance by the last step, over the samples of all ranks
    learner       gradient buffers and optimizer; None for a drafter that is not trained
    """

    def __init__(self, model: GPTModel, options: Options, args: Any) -> None:
        self.model = model
        self.settings = options.drafter
        self.objective = slime_objective(options, args)
        self.ready = False
        self.learner: Learner | None = None
        self.due = True
        self.denominators: list[float] = []
        self.fields: DrafterFields | None = None
        self.predicted: Prediction | None = None
        self._schedule = EverySteps(options.drafter.update_every)
        self._sums: list[Sums] = []  # of the step's micro-batches
        self._clip_grad = args.clip_grad  # which clips the policy's norm by itself
        self._temperature = training_temperature(args.rollout_temperature)
        model._postprocess = partial(self._postprocess, model._postprocess)

    def thaw(self) -> None:
        """Build gradient buffers and optimizer of a drafter that is trained. Call it after the checkpoint is loaded."""
        self.block = self.build()
        if self.settings.train:
            adam = OptimizerConfig(
                lr=self.settings.lr,
                clip_grad=self._clip_grad,
                warmup_steps=self.settings.warmup_steps,
            )
            with self.trainable():
                self.learner = Learner(self.block, adam, pipelined=False)
        self.drafter_step = DrafterStep(self.learner, self.objective)
        self.ready = True

    def build(self) -> Drafter:
        """Return the module that is trained, with its weights."""
        raise NotImplementedError

    def copy_weights(self) -> None:
        """Take note of weights that were changed from outside."""

    def layout(self) -> dict[str, Any]:
        """Return in what a resumed run must equal the saved one, besides the layout of the ranks."""
        return {}

    def learns_from(self, mtp: Any) -> bool:
        """Return whether the drafter learns from this forward pass; `mtp`: slime's arguments for its own MTP loss."""
        return bool(mtp)

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return what the drafter reads in place of the policy's hidden states `[t / tp, 1, H]`: `[t, n]`, detached."""
        raise NotImplementedError

    @contextmanager
    def trainable(self) -> Iterator[None]:
        """Let the drafter's parameters be trained inside the `with` block."""
        yield

    def begin(self, counts: list[float]) -> None:
        """Start a step; `counts [depth]`: weights that this data-parallel rank trains, over its CP ranks."""
        self.due = self._schedule.due
        device = next(self.model.parameters()).device
        total = torch.tensor(counts, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=False))
        self.denominators = [n or 1.0 for n in total.tolist()]
        self._sums = []
        self.predicted = None
        self.drafter_step.begin()

    def step(self) -> dict[str, float]:
        """Reduce, clip and update; return means over the step's trained predictions, per depth. {} if it is not due."""
        self._schedule.observe(self.due)
        if not self.due:
            return {}
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
        totals = sum_over_replicas(self._sums)
        predicted = prediction_of(totals, self.objective.predicted_steps)
        if updated and predicted is not None:
            self.predicted = predicted
            for k in predicted.steps:
                metrics[f"drafter_tokens_k{k}"] = predicted.tokens_per_round(k)
        for name, value in means(totals).items():
            if name != "drafter/objective" and not name.startswith("drafter/tokens_"):
                metrics[name.replace("/", "_")] = value
        return metrics

    def _postprocess(self, original: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replace `GPTModel._postprocess`: train the drafter, then return the policy's logits as if without MTP."""
        mtp = kwargs.pop("mtp_kwargs", None)
        training = self.model.training and torch.is_grad_enabled()
        if self.ready and self.due and training and self.learns_from(mtp):
            self._learn(hidden_states.detach(), kwargs)
        kwargs["mtp_in_postprocess"] = False
        return original(hidden_states, *args, **kwargs)

    def _learn(self, hidden: Tensor, given: Mapping[str, Any]) -> None:
        """Run the drafter's forward and backward on this micro-batch; `hidden [t / tp, 1, H]`, the policy's."""
        if self.fields is None:
            raise RuntimeError(
                "the micro-batch carries no drafter fields: slime's get_batch was not wrapped"
            )
        step = self.drafter_step
        head = OutputLayer(self._head_weight(), self._temperature)
        trains = self.learner is not None
        with (
            self.trainable() if trains else nullcontext(),
            torch.set_grad_enabled(trains),
            routing.unreplayed(),
        ):
            outputs = self._unroll(hidden, self.fields, given)
            predicts = bool(self.objective.predicted_steps)
            student = step.student(outputs, self.fields, head, predict=predicts)
            teacher = None if self.settings.loss == "ce" else self.gather(hidden)[:, 0]
            loss, sums = step.learn(student, self.fields, teacher)
            if trains:
                loss.backward()
        self._sums.append(sums)
        self.fields = None

    def _unroll(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return the input of the output layer at depths 1..D, `[t, H]` each; `hidden [t / tp, 1, H]`, the policy's."""
        groups = self.block.config.num_query_groups // ps.get_tensor_model_parallel_world_size()
        packed = packed_sequences(
            fields.cu_seqlens_padded.cpu(),
            groups,
            ps.get_context_parallel_world_size(),
            ps.get_context_parallel_rank(),
            hidden.device,
        )
        embedding = self.model.embedding.word_embeddings.weight.detach()
        return self.block(
            self.inputs(hidden), fields.tokens, embedding, fields.position_ids, packed
        )

    def _head_weight(self) -> Tensor:
        if self.model.share_embeddings_and_output_weights:
            return self.model.shared_embedding_or_output_weight().detach()
        return self.model.output_layer.weight.detach()

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all tensor-parallel ranks, if sequence parallelism splits them."""
        if not self.model.config.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)


class SlimeMTP(SlimeDrafter):
    """The MTP layers of slime's model: frozen while slime wraps it into DDP."""

    def __init__(
        self, model: GPTModel, options: Options, args: Any, zero_first_embedding: bool
    ) -> None:
        attention = transformer_layer(model.mtp.layers[0]).self_attention
        if type(attention) is not SelfAttention and options.drafter.depth > 1:
            raise ValueError(
                f"--drafter.depth {options.drafter.depth}, but {type(attention).__name__} is not unrolled "
                "chain-exactly; set 1"
            )
        super().__init__(model, options, args)
        self._zero_first_embedding = zero_first_embedding
        for parameter in model.mtp.parameters():
            parameter.requires_grad_(False)
        routing.leave_out(model.mtp)

    def build(self) -> Drafter:
        depth = self.settings.depth
        if depth > 1:
            attention = transformer_layer(self.model.mtp.layers[0]).self_attention
            attention.core_attention = PackedAttention(
                attention.config, attention.layer_number, attention.attn_mask_type, "self"
            )
        return Adopted(self.model, depth, self._zero_first_embedding, _rope(self.model))

    def inputs(self, hidden: Tensor) -> Tensor:
        return self.gather(hidden)[:, 0]

    def _unroll(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any]
    ) -> list[Tensor]:
        if self.settings.depth > 1:
            return super()._unroll(hidden, fields, given)
        model = self.model
        with torch.no_grad():
            embedded = model.embedding(input_ids=fields.tokens[0][None], position_ids=None)
            if self._zero_first_embedding:
                if model.config.sequence_parallel:
                    raise ValueError(
                        "--drafter.depth 1 with sequence parallelism and MiMo's rule for position 0; set 2"
                    )
                first = fields.position_ids == 0
                embedded = embedded.masked_fill(first[:, None, None], 0)
        out = model.mtp.layers[0]._proj_and_transformer_layer(
            hidden_states=hidden,
            decoder_input=embedded,
            rotary_pos_emb=given.get("rotary_pos_emb"),
            rotary_pos_cos=given.get("rotary_pos_cos"),
            rotary_pos_sin=given.get("rotary_pos_sin"),
            packed_seq_params=given.get("packed_seq_params"),
        )
        return [self.gather(out)[:, 0]]

    @contextmanager
    def trainable(self) -> Iterator[None]:
        for parameter in self.model.mtp.parameters():
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in self.model.mtp.parameters():
                parameter.requires_grad_(False)


def transformer_layer(layer: Any) -> Any:
    """Return the block inside an MTP layer: `mtp_model_layer` in newer versions of megatron-core."""
    return layer.mtp_model_layer if hasattr(layer, "mtp_model_layer") else layer.transformer_layer

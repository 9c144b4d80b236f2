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
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

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
from megatron_rlspec.train.drafter_updates import EverySteps, RewardWeight
from megatron_rlspec.train.objectives import OutputLayer, Sums, means, sum_over_replicas
from megatron_rlspec.train.optimizer import Learner
from megatron_rlspec.types import Verifier


@dataclass(frozen=True)
class Options:
    """`args.rlspec_*` of a slime run, from `--custom-config-path`; names and defaults as in our section `[drafter]`."""

    kind: Literal["mtp", "eagle3"] = "mtp"
    path: str = ""  # of an EAGLE-3 drafter
    train: bool = True  # False: the drafter stays as it is, and the training forward measures it
    depth: int = 3
    loss: str = "forward_kl"
    depth_decay: float = 0.8
    lr: float = 1e-3
    warmup_steps: int = 20
    reward_weight: RewardWeight = "none"
    update_every: int = 1
    zero_first_embedding: bool = False
    # step counts the engines may run; acceptance is predicted for all above 0
    candidate_steps: tuple[int, ...] = ()
    clip_grad: float = 1.0  # slime's, which clips the policy's norm by itself
    temperature: float = 1.0  # of slime's rollouts
    sampled: bool = True  # rollouts draw from the unfiltered softmax
    verifier: Verifier = "target_only"

    @classmethod
    def from_args(cls, args: Any) -> Options:
        """Read `args.rlspec_*` and slime's own rollout flags."""
        given = {
            f.name: getattr(args, f"rlspec_{f.name}")
            for f in fields(cls)
            if hasattr(args, f"rlspec_{f.name}")
        }
        given["candidate_steps"] = tuple(given.get("candidate_steps", ()))
        temperature = getattr(args, "rollout_temperature", 1.0)
        top_p = getattr(args, "rollout_top_p", 1.0)
        top_k = getattr(args, "rollout_top_k", -1)
        given["temperature"] = temperature
        given["clip_grad"] = getattr(args, "clip_grad", 1.0)
        given["sampled"] = unfiltered(temperature, top_p, top_k)
        return cls(**given)

    @property
    def objective(self) -> DrafterObjective:
        """Return the objective for `DrafterStep`."""
        return DrafterObjective(
            depth=self.depth,
            loss=drafter_loss_named(self.loss),
            depth_decay=self.depth_decay,
            predicted_steps=tuple(sorted({k for k in self.candidate_steps if k > 0})),
            verifier=self.verifier,
            sampled=self.sampled,
            coupled=self.coupled,
        )

    @property
    def coupled(self) -> bool:
        """Return whether engines draft with the verifier's noise: not at temperature 0, nor with an older SGLang."""
        from megatron_rlspec.rollout.sglang.scheduler import versions  # reads SGLang's sources

        return (
            self.verifier == "position_keyed"
            and self.temperature > 0
            and versions.installed().couples
        )


class Adopted(MTPDrafter):
    """A drafter around an MTP layer that exists already: chain-exact, with grouped-query attention."""

    def __init__(self, model: GPTModel, depth: int, zero_first_embedding: bool, rope: Rope) -> None:
        own = replace(model.config, calculate_per_token_loss=True)
        own.rotary_percent = model.rotary_percent  # as train.model.DecoderConfig has it
        MegatronModule.__init__(self, config=own)
        self.mtp = model.mtp
        self.depth = depth
        self.zero_first_embedding = zero_first_embedding
        self.rope = rope
        self.recompute = own.recompute_granularity == "full"


def _rope(model: GPTModel) -> Rope:
    """Return the model's rotary embedding. Megatron keeps no factor of a scaling; the slowest frequency shows it."""
    plain = Rope(float(model.rotary_base))
    if not getattr(model, "rotary_scaling", False):
        return plain
    held = model.rotary_pos_emb.inv_freq
    factor = round(float(plain.frequencies(2 * len(held))[-1] / held[-1]), 3)
    return Rope.llama3(plain.base, factor)


class SlimeDrafter:
    """The drafter of one rank of the last pipeline stage.

    Construction comes before slime wraps the model into DDP. `thaw` follows once the checkpoint is loaded. Then each
    step calls `begin`, runs the policy's forwards, and calls `step`. Subclasses have the drafter's own layers.
    """

    def __init__(self, model: GPTModel, options: Options) -> None:
        self.model = model
        self.options = options
        self.coupled = options.coupled
        self.ready = False  # after `thaw`
        self.learner: Learner | None = None  # of a drafter that is trained
        self.rule = EverySteps(options.update_every)
        self.due = True  # whether the present step trains the drafter
        self.denominators: list[float] = []
        self.sums: list[Sums] = []  # of the step's micro-batches
        self.fields: DrafterFields | None = None
        self.predicted: Prediction | None = None  # by the last step, over the samples of all ranks
        model._postprocess = partial(self._postprocess, model._postprocess)

    def thaw(self) -> None:
        """Build gradient buffers and optimizer of a drafter that is trained. Call it after the checkpoint is loaded."""
        self.block = self.build()
        if self.options.train:
            own = self.options
            adam = OptimizerConfig(
                lr=own.lr, clip_grad=own.clip_grad, warmup_steps=own.warmup_steps
            )
            with self.trainable():
                self.learner = Learner(self.block, adam, pipelined=False)
        self.drafter_step = DrafterStep(self.learner, self.options.objective)
        self.ready = True

    def build(self) -> Drafter:
        """Return the module that is trained, with its weights."""
        raise NotImplementedError

    def keep(self) -> None:
        """Take note of weights that were changed from outside."""

    def layout(self) -> dict[str, Any]:
        """Return in what a resumed run must equal the saved one, besides the layout of the ranks."""
        return {}

    def wants(self, mtp: Any) -> bool:
        """Return whether the drafter learns from this forward pass; `mtp`: slime's arguments for its own MTP loss."""
        return bool(mtp)

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return what the drafter reads in place of the policy's hidden states `[t / tp, 1, H]`: `[t, n]`, detached."""
        raise NotImplementedError

    @contextmanager
    def trainable(self) -> Iterator[None]:
        """Let the drafter's parameters be trained inside the `with` block."""
        yield

    def begin(self, own_counts: list[float]) -> None:
        """Start a step; `own_counts [depth]`: weights that this data-parallel rank trains, over its CP ranks."""
        assert self.ready, "thaw() comes first"
        self.due = self.rule.due
        counts = torch.tensor(
            own_counts, dtype=torch.float64, device=next(self.model.parameters()).device
        )
        dist.all_reduce(counts, group=ps.get_data_parallel_group(with_context_parallel=False))
        self.denominators = [n or 1.0 for n in counts.tolist()]
        self.sums = []
        self.predicted = None
        self.drafter_step.begin()

    def step(self) -> dict[str, float]:
        """Reduce, clip and update; return means over the step's trained predictions, per depth. {} if it is not due."""
        assert self.ready, "thaw() comes first"
        self.rule.observe(self.due)
        if not self.due:
            return {}
        metrics: dict[str, float] = {}
        updated = True
        if self.learner is not None:
            with self.trainable():
                norm, updated = self.drafter_step.update()
            self.learner.zero_grad()
            metrics = {"drafter_grad_norm": norm, "drafter_skipped": float(not updated)}
        if not self.sums:
            return metrics
        totals = sum_over_replicas(self.sums)
        predicted = prediction_of(totals, self.drafter_step.objective.predicted_steps)
        if updated and predicted is not None:
            self.predicted = predicted
            metrics |= {
                f"drafter_tokens_k{k}": predicted.tokens_per_round(k) for k in predicted.steps
            }
        for name, value in means(totals).items():
            if name != "drafter/objective" and not name.startswith("drafter/tokens_"):
                metrics[name.replace("/", "_")] = value
        return metrics

    def _postprocess(self, original: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replace `GPTModel._postprocess`: train the drafter, then return the policy's logits as if without MTP."""
        mtp = kwargs.pop("mtp_kwargs", None)
        if (
            self.ready
            and self.wants(mtp)
            and self.due
            and self.model.training
            and torch.is_grad_enabled()
        ):
            self._learn(hidden_states.detach(), kwargs)
        kwargs["mtp_in_postprocess"] = False
        return original(hidden_states, *args, **kwargs)

    def _learn(self, hidden: Tensor, given: Mapping[str, Any]) -> None:
        if self.fields is None:
            raise RuntimeError(
                "the micro-batch carries no drafter fields: slime's get_batch was not wrapped"
            )
        here = self.fields
        step = self.drafter_step
        layer = OutputLayer(self._head_weight(), training_temperature(self.options.temperature))
        learns = self.learner is not None
        with (
            self.trainable() if learns else nullcontext(),
            torch.set_grad_enabled(learns),
            routing.unreplayed(),
        ):
            outputs = self._unroll(hidden, here, given)
            student = step.student(
                outputs, here, layer, predict=bool(step.objective.predicted_steps)
            )
            teacher = None if self.options.loss == "ce" else self.gather(hidden)[:, 0]
            loss, sums = step.learn(student, here, teacher)
            if learns:
                loss.backward()
        self.sums.append(sums)
        self.fields = None

    def _unroll(
        self, hidden: Tensor, here: DrafterFields, given: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return the input of the output layer at depths 1..D, `[t, H]` each; `hidden [t / tp, 1, H]`, the policy's."""
        cp = ps.get_context_parallel_world_size()
        if here.layout != "zigzag":
            raise ValueError(
                f"rlspec_depth={self.options.depth} under {here.layout} context parallelism; set 1"
            )
        groups = self.block.config.num_query_groups // ps.get_tensor_model_parallel_world_size()
        cu = here.cu_seqlens_padded.cpu()
        packed = packed_sequences(cu, groups, cp, ps.get_context_parallel_rank(), hidden.device)
        embedding = self.model.embedding.word_embeddings.weight.detach()
        return self.block(self.inputs(hidden), here.tokens, embedding, here.position_ids, packed)

    def _head_weight(self) -> Tensor:
        tied = self.model.share_embeddings_and_output_weights
        return (
            self.model.shared_embedding_or_output_weight()
            if tied
            else self.model.output_layer.weight
        ).detach()

    def gather(self, x: Tensor) -> Tensor:
        if not self.model.config.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)


class SlimeMTP(SlimeDrafter):
    """The MTP layers of slime's model: frozen while slime wraps it into DDP."""

    def __init__(self, model: GPTModel, options: Options) -> None:
        layers = model.mtp.layers
        if len(layers) != 1:
            raise ValueError(
                f"the model has {len(layers)} MTP layers; set --mtp-num-layers 1: one layer is repeated"
            )
        attention = transformer_layer(layers[0]).self_attention
        if type(attention) is not SelfAttention and options.depth > 1:
            raise ValueError(
                f"rlspec_depth={options.depth}, but {type(attention).__name__} is not unrolled chain-exactly; set 1"
            )
        super().__init__(model, options)
        for parameter in model.mtp.parameters():
            parameter.requires_grad_(False)
        routing.leave_out(model.mtp)

    def build(self) -> Drafter:
        if self.options.depth > 1:
            attention = transformer_layer(self.model.mtp.layers[0]).self_attention
            attention.core_attention = PackedAttention(
                attention.config, attention.layer_number, attention.attn_mask_type, "self"
            )
        return Adopted(
            self.model, self.options.depth, self.options.zero_first_embedding, _rope(self.model)
        )

    def inputs(self, hidden: Tensor) -> Tensor:
        return self.gather(hidden)[:, 0]

    def _unroll(
        self, hidden: Tensor, here: DrafterFields, given: Mapping[str, Any]
    ) -> list[Tensor]:
        if self.options.depth > 1:
            return super()._unroll(hidden, here, given)
        model = self.model
        with torch.no_grad():
            embedded = model.embedding(input_ids=here.tokens[0][None], position_ids=None)
            if self.options.zero_first_embedding:
                if model.config.sequence_parallel:
                    raise ValueError(
                        "rlspec_depth=1 with sequence parallelism and MiMo's rule for position 0; set 2"
                    )
                embedded = embedded.masked_fill((here.position_ids == 0)[:, None, None], 0)
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

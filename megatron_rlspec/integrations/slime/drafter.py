"""The drafter inside slime: the MTP layers stay where slime builds, loads, saves and pushes them, but learn alone.

slime wraps the whole model into one DDP and one optimizer. So the MTP layers are frozen while it does, and afterwards
get gradient buffers and an AdamW of their own (`train.optimizer.Learner`). They are thawed only while they learn:
Megatron's gradient finalisation walks over every trainable parameter of the model, and would join both sides again.

Nothing connects the graphs, so the drafter's forward and backward run within the policy's forward. slime's own MTP loss
never runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
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

from megatron_rlspec.integrations.slime.batch import DrafterFields
from megatron_rlspec.mtp.loss import Student
from megatron_rlspec.mtp.predict import Prediction, deepen, of_rows, walk
from megatron_rlspec.packing.context_parallel import cp_index, join_from_cp
from megatron_rlspec.train.attention import PackedAttention, packed_sequences
from megatron_rlspec.train.drafter import Drafter
from megatron_rlspec.train.optimizer import AdamW, Learner


@dataclass(frozen=True)
class Options:
    """`args.rlspec_*` of a slime run, from `--custom-config-path`; names and defaults as in `[drafter]` of our TOML."""

    depth: int = 3
    loss: str = "ce"
    depth_decay: float = 0.8
    lr: float = 1e-4
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    zero_first_embedding: bool = False
    candidate_steps: tuple[int, ...] = ()  # of the engines, whose acceptance is predicted for each but 0
    sampled: bool = True  # rollouts draw from the unfiltered softmax

    @classmethod
    def from_args(cls, args: Any) -> Options:
        given = {f.name: getattr(args, f"rlspec_{f.name}") for f in fields(cls) if hasattr(args, f"rlspec_{f.name}")}
        given["candidate_steps"] = tuple(given.get("candidate_steps", ()))
        given["sampled"] = getattr(args, "rollout_top_p", 1.0) >= 1 and getattr(args, "rollout_top_k", -1) < 0
        return cls(**given)

    @property
    def predicted_steps(self) -> tuple[int, ...]:
        return tuple(sorted({k for k in self.candidate_steps if k > 0}))


class Adopted(Drafter):
    """`Drafter` around an MTP layer that exists already: chain-exact, grouped-query attention."""

    def __init__(self, model: GPTModel, depth: int, zero_first_embedding: bool, rotary_base: float) -> None:
        own = replace(model.config, calculate_per_token_loss=True)
        own.rotary_percent = model.rotary_percent  # as train.model.ModelConfig has it
        MegatronModule.__init__(self, config=own)
        self.mtp = model.mtp
        self.depth, self.repeated_layer = depth, True
        self.zero_first_embedding, self.rotary_base = zero_first_embedding, rotary_base
        self.recompute = own.recompute_granularity == "full"


class SlimeDrafter:
    """The drafter of one rank of the last pipeline stage.

    `take_over` at construction, before DDP; `thaw` after the checkpoint is loaded; then per step `begin`, the policy's
    forwards, and `step`.
    """

    def __init__(self, model: GPTModel, options: Options) -> None:
        layers = model.mtp.layers
        if len(layers) != 1:
            raise ValueError(f"the model has {len(layers)} MTP layers; set --mtp-num-layers 1: one layer is repeated")
        attention = transformer_layer(layers[0]).self_attention
        if type(attention) is not SelfAttention and options.depth > 1:
            raise ValueError(
                f"rlspec_depth={options.depth}, but {type(attention).__name__} is not unrolled chain-exactly; set 1"
            )
        self.model, self.options = model, options
        self.learner: Learner | None = None
        self.denominators: list[float] = []
        self.sums: dict[str, Tensor] = {}
        self.fields: DrafterFields | None = None
        self.predicted: Prediction | None = None  # this step's rounds, of all ranks once `step` is over
        for parameter in model.mtp.parameters():
            parameter.requires_grad_(False)
        model._postprocess = partial(self._postprocess, model._postprocess)

    def thaw(self) -> None:
        """Build gradient buffers and optimizer from the weights as loaded."""
        options, model = self.options, self.model
        if options.depth > 1:
            attention = transformer_layer(model.mtp.layers[0]).self_attention
            attention.core_attention = PackedAttention(
                attention.config, attention.layer_number, attention.attn_mask_type, "self"
            )
        self.block = Adopted(model, options.depth, options.zero_first_embedding, float(model.rotary_base))
        adam = AdamW(lr=options.lr, weight_decay=options.weight_decay, clip_grad=options.clip_grad)
        with self._trainable():
            self.learner = Learner(self.block, adam, pipelined=False)

    def begin(self, own_counts: list[float]) -> None:
        """Start a step: `own_counts [depth]` predictions are trained by this data-parallel rank, CP ranks together."""
        assert self.learner is not None, "thaw() comes first"
        counts = torch.tensor(own_counts, dtype=torch.float64, device=next(self.model.parameters()).device)
        dist.all_reduce(counts, group=ps.get_data_parallel_group(with_context_parallel=False))
        self.denominators, self.sums, self.predicted = [max(1.0, n) for n in counts.tolist()], {}, None
        self.learner.zero_grad()

    def step(self) -> dict[str, float]:
        """Reduce, clip and update; means over the step's trained predictions, per depth."""
        assert self.learner is not None
        with self._trainable():
            self.learner.finalize()
        norm, updated = self.learner.step()
        self.learner.zero_grad()
        metrics = {"drafter_grad_norm": norm, "drafter_skipped": float(not updated)}
        if not self.sums:
            return metrics
        if not updated:
            self.predicted = None  # a forward that was not finite foresees nothing
        if self.predicted is not None:
            metrics |= self._share_prediction()
        flat = torch.stack([self.sums[name].double() for name in sorted(self.sums)])
        dist.all_reduce(flat, group=ps.get_data_parallel_group(with_context_parallel=True))
        for name, row in zip(sorted(self.sums), flat.tolist(), strict=True):
            for depth, (value, count) in enumerate(zip(row, self.denominators, strict=True), 1):
                if name != "tokens":
                    metrics[f"drafter_{name}_{depth}"] = value / count
        return metrics

    def _postprocess(self, original: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of `GPTModel._postprocess`: the drafter learns, then the policy's logits as if there were no MTP."""
        wanted = kwargs.pop("mtp_kwargs", None)
        if wanted and self.model.training and torch.is_grad_enabled():
            self._learn(hidden_states.detach(), kwargs)
        kwargs["mtp_in_postprocess"] = False
        return original(hidden_states, *args, **kwargs)

    def _learn(self, hidden: Tensor, given: Mapping[str, Any]) -> None:
        if self.fields is None:
            raise RuntimeError("the micro-batch carries no drafter fields: slime's get_batch was not wrapped")
        here, options = self.fields, self.options
        with self._trainable(), torch.enable_grad():
            outputs = self._unroll(hidden, here, given)
            scale = [options.depth_decay**d / n for d, n in enumerate(self.denominators)]
            weight = torch.cat([mask * s for mask, s in zip(here.mask, scale, strict=True)])
            teacher, index = (None, None) if options.loss == "ce" else self._teacher(hidden, here)
            tensor = ps.get_tensor_model_parallel_world_size() > 1
            student = Student(
                torch.cat(outputs),
                self._head(),
                torch.cat(here.labels),
                weight,
                options.loss,
                teacher_index=index,
                groups=torch.arange(options.depth, device=weight.device).repeat_interleave(len(here.mask[0])),
                num_groups=options.depth,
                tp_group=ps.get_tensor_model_parallel_group() if tensor else None,
                keep_rows=bool(options.predicted_steps),
            )
            if teacher is None:
                student.learn_labels()
            else:
                student.learn_from(teacher)
            loss, sums = student.finish()
            loss.backward()
        if student.rows is not None:
            found = self._predict(student.rows, here)
            self.predicted = found if self.predicted is None else self.predicted + found
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach()
        self.fields = None

    def _unroll(self, hidden: Tensor, here: DrafterFields, given: Mapping[str, Any]) -> list[Tensor]:
        """What the head reads at depths 1..D, `[t, H]` each; `hidden [t / tp, 1, H]` as the policy left it."""
        model, cp = self.model, ps.get_context_parallel_world_size()
        assert self.learner is not None
        if self.options.depth > 1:
            if here.layout != "zigzag":
                raise ValueError(f"rlspec_depth={self.options.depth} under {here.layout} context parallelism; set 1")
            groups = model.config.num_query_groups // ps.get_tensor_model_parallel_world_size()
            cu, device = here.cu_seqlens_padded.cpu(), hidden.device
            packed = packed_sequences(cu, groups, cp, ps.get_context_parallel_rank(), device)
            embedding = self.model.embedding.word_embeddings.weight.detach()
            return self.block(self._gather(hidden)[:, 0], here.tokens, embedding, here.position_ids, packed)
        with torch.no_grad():
            embedded = model.embedding(input_ids=here.tokens[0][None], position_ids=None)
            if self.options.zero_first_embedding:
                if model.config.sequence_parallel:
                    raise ValueError("rlspec_depth=1 with sequence parallelism and MiMo's rule for position 0; set 2")
                embedded = embedded.masked_fill((here.position_ids == 0)[:, None, None], 0)
        out = model.mtp.layers[0]._proj_and_transformer_layer(
            hidden_states=hidden,
            decoder_input=embedded,
            rotary_pos_emb=given.get("rotary_pos_emb"),
            rotary_pos_cos=given.get("rotary_pos_cos"),
            rotary_pos_sin=given.get("rotary_pos_sin"),
            packed_seq_params=given.get("packed_seq_params"),
        )
        return [self._gather(out)[:, 0]]

    def _predict(self, rows: Mapping[str, Tensor], here: DrafterFields) -> Prediction:
        """Of this micro-batch's rounds (`mtp/predict.py`); ranks of a context-parallel group count them once."""
        depth, steps = self.options.depth, self.options.predicted_steps
        if not rows:  # nothing is trained in this share of the micro-batch, but the other ranks want its zeros
            nothing = torch.zeros(depth * len(here.mask[0]), device=here.mask[0].device)
            rows = dict.fromkeys(("match", "argmax_prob"), nothing)
        accept, reach = of_rows(rows, depth, "target_only", sampled=self.options.sampled)
        table = torch.cat([accept, reach, torch.stack(here.mask, 1).to(accept)], 1)
        if ps.get_context_parallel_world_size() > 1:
            everyone = [torch.empty_like(table) for _ in range(ps.get_context_parallel_world_size())]
            dist.all_gather(everyone, table.contiguous(), group=ps.get_context_parallel_group())
            table = join_from_cp(everyone, here.cu_seqlens_padded.cpu(), here.layout, dim=0)
        if ps.get_context_parallel_rank():
            table = table[:0]
        return walk(*(deepen(part, max(steps)) for part in table.split(depth, 1)), steps)

    def _share_prediction(self) -> dict[str, float]:
        """Summed over data- and context-parallel ranks; tokens per round that training saw coming, by step count."""
        assert self.predicted is not None
        sums = torch.stack([torch.from_numpy(x) for x in (self.predicted.reached, self.predicted.accepted)])
        sums = sums.to(next(self.model.parameters()).device)
        dist.all_reduce(sums, group=ps.get_data_parallel_group(with_context_parallel=True))
        self.predicted = Prediction(self.predicted.steps, *sums.cpu().numpy())
        return {f"drafter_tokens_k{k}": self.predicted.tokens_per_round(k) for k in self.predicted.steps}

    def _teacher(self, hidden: Tensor, here: DrafterFields) -> tuple[Tensor, Tensor]:
        """All ranks' hidden states in the order of the batch, and the row t + d that teaches depth d at t."""
        size, rank = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
        cu, rows = here.cu_seqlens_padded.cpu(), self._gather(hidden)[:, 0].detach()
        position = cp_index(cu, rank, size, here.layout).to(hidden.device)
        if size > 1:
            everyone = [torch.empty_like(rows) for _ in range(size)]
            dist.all_gather(everyone, rows.contiguous(), group=ps.get_context_parallel_group())
            rows = join_from_cp(everyone, cu, here.layout, dim=0)
        depths = range(1, self.options.depth + 1)
        return rows, torch.cat([(position + d).clamp(max=len(rows) - 1) for d in depths])

    def _head(self) -> Tensor:
        tied = self.model.share_embeddings_and_output_weights
        return (self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight).detach()

    def _gather(self, x: Tensor) -> Tensor:
        if not self.model.config.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)

    @contextmanager
    def _trainable(self) -> Iterator[None]:
        for parameter in self.model.mtp.parameters():
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in self.model.mtp.parameters():
                parameter.requires_grad_(False)


def transformer_layer(layer: Any) -> Any:
    """The block inside an MTP layer: `mtp_model_layer` in newer versions of megatron-core."""
    return layer.mtp_model_layer if hasattr(layer, "mtp_model_layer") else layer.transformer_layer

"""Core attention over packed sequences in plain torch, with context parallelism and the drafter's chain.

In a layer spec (`layer_specs.py`) `PackedAttention` replaces Megatron's DotProductAttention, which supports neither
packing nor context parallelism, or Transformer Engine's. It also applies the rotary embedding, from each token's
position, except in latent attention (`latent.py`). It takes any float type.

A query row attends to two kinds of keys:
sequence  the rows of its own sequence up to itself; in the drafter these keys are depth 1's. One call of a fused kernel
          computes this part (`batched.py` on a CPU without context parallelism, `varlen.py` elsewhere)
links     only at a drafter's depth d above 1: one key of each of the depths 2 to d, at the query's own row

The outputs of the parts are joined by their log-sum-exps, as in ring attention. The backward of a part needs only the
joined output and log-sum-exp (FlashAttention-2, arXiv 2307.08691, section 3.1). `Chain` holds the keys of both kinds.

Shapes: t tokens of this rank, T = t · context-parallel size, n query heads and g key/value heads of this
tensor-parallel rank, d channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rlspec.models.rope import Rope
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.train.attention_plan import plan_attention
from megatron_rlspec.train.batched import Batched
from megatron_rlspec.train.varlen import Varlen


@dataclass
class Chain:
    """The (key, value) pairs of one drafter layer at all its depths; the keys are rotated.

    base     those of depth 1, `[T, g, d]`, in the order of context-parallel ranks; None while depth 1 itself runs
    links    those of depths 2 up to the one before the depth that runs, `[t, g, d]` each
    current  those of the depth that runs, or has run last: set by `PackedAttention.forward`, read by `next`

    All of the policy's layers share one empty chain, as at depth 1. Each layer overwrites `current`; it is not read.
    Gradients flow through all pairs.
    """

    base: tuple[Tensor, Tensor] | None = None
    links: tuple[tuple[Tensor, Tensor], ...] = ()
    current: tuple[Tensor, Tensor] | None = None

    def next(self) -> Chain:
        """Return the chain for the next depth. Call it after the layer has run at this depth."""
        assert self.current is not None, "the layer of this depth has not run"
        if self.base is None:
            return Chain(self.current)
        return Chain(self.base, (*self.links, self.current))


@dataclass
class PackedSequences(PackedSeqParams):
    """`PackedSeqParams` with the additional inputs of `PackedAttention`. Transformer Engine reads the inherited fields.

    plan      which keys each query attends to
    cos, sin  of the rotary angles, `[t, 1, r / 2]`, set by `model.at_positions`; r of a head's channels are rotated
    chain     of the layer that runs; `drafter._chained` sets it for each layer of a drafter
    """

    plan: Batched | Varlen | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    chain: Chain = field(default_factory=Chain)


def packed_sequences(
    cu_seqlens_padded: Tensor, groups: int, cp_size: int, cp_rank: int, device: torch.device
) -> PackedSequences:
    """Describe one micro-batch, still without rotary angles (`model.at_positions`).

    cu_seqlens_padded  `[n + 1]`, cumulative lengths of the whole batch, before the context-parallel split; on the CPU,
                       so that the host does not wait for the device
    groups             g, of the model that attends
    """
    lengths = cu_seqlens_padded[1:] - cu_seqlens_padded[:-1]
    longest = int(lengths.max()) if len(lengths) else 0
    cu = to_device(cu_seqlens_padded.to(torch.int32), device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=plan_attention(cu_seqlens_padded, groups, cp_size, cp_rank, device),
    )


def rotary_factors(
    positions: Tensor, dims: int, rope: Rope, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[t, 1, dims / 2]` of the rotary angles of `positions [t]`, in `dtype`.

    The first `dims` channels of a head are rotated.
    """
    frequencies = rope.frequencies(dims, positions.device)
    # In float32, as Transformers and SGLang compute them, also for a model in float64: the angles must be equal.
    angles = positions.float()[:, None] * frequencies
    cos = angles.cos() * rope.magnitude
    sin = angles.sin() * rope.magnitude
    cos = cos.to(dtype)
    sin = sin.to(dtype)
    return cos[:, None], sin[:, None]


def rotated(x: Tensor, packed: PackedSequences) -> Tensor:
    """Rotate the first r channels of `x [t, heads, d]` by the angles of `packed`: channel i with channel i + r / 2."""
    return _Rotate.apply(x, packed.cos, packed.sin)


class PackedAttention(MegatronModule):
    """Causal softmax attention, `query [t, n, d]`, `key` and `value` `[t, g, d]` -> `[t, n · d]`.

    `packed_seq_params` must be a `PackedSequences`, whose chain gets this layer's keys and values. No dropout, window,
    sink or additive bias. Values may have fewer channels than keys. Other arguments are those by which Megatron builds
    and calls its core attention.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        plain = config.softmax_type == "vanilla" and config.window_size is None
        if config.attention_dropout or not plain:
            raise ValueError(
                "PackedAttention computes plain causal softmax: no dropout, window or softmax offset"
            )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        # Latent attention has rotated a part of the channels already (`latent.py`).
        self.rotates = not config.multi_latent_attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        packed = packed_seq_params
        assert isinstance(packed, PackedSequences) and packed.plan is not None
        if self.rotates:
            query = rotated(query, packed)
            key = rotated(key, packed)
        width = value.shape[-1]
        key_width = key.shape[-1]
        # Only latent attention has narrower values. The kernels take one width, so zeros fill further channels. They do
        # not change the other channels, and are cut off the output below.
        if width < key_width:
            value = F.pad(value, (0, key_width - width))
        chain = packed.chain
        links: list[Tensor] = []
        if chain.base is None:
            # Depth 1, or the policy: gather the keys and values of all context-parallel ranks. The backward sums the
            # gradients over these ranks.
            if self.cp_group.size() > 1:
                both = torch.cat([key, value], -1)
                both = gather_from_sequence_parallel_region(both, group=self.cp_group)
                key, value = both.split(key_width, -1)
            chain.current = (key, value)
        else:
            # A row attends to links of its own row only, so they are not gathered.
            chain.current = (key, value)
            for pair in (*chain.links, chain.current):
                links += pair
            key, value = chain.base
        out = _Attend.apply(query, key, value, packed.plan, self.scale, *links)
        out = out[..., :width]
        return out.flatten(1)


class _Rotate(torch.autograd.Function):
    """Rotary embedding of the first r channels, half-split: x `[t, heads, d]`, cos and sin `[t, 1, r / 2]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return a rotated copy: (first · cos - second · sin, second · cos + first · sin, rest)."""
    half = cos.shape[-1]
    sizes = [half, half, x.shape[-1] - 2 * half]
    first, second, rest = x.split(sizes, -1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second, out_rest = out.split(sizes, -1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    out_rest.copy_(rest)
    return out


class _Attend(torch.autograd.Function):
    """Softmax attention of `q [t, n, d]` to the rows of `k`, `v` `[T, g, d]` that the plan names, and to the links.

    `links`: key, value, key, value, ..., `[t, g, d]` each. Row i of q attends to row i of each link's key. All keys of
    a query row share one softmax. `backward` returns gradients in the order of `forward`'s arguments.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Batched | Varlen,
        scale: float,
        *links: Tensor,
    ) -> Tensor:
        ctx.plan = plan
        ctx.scale = scale
        out, lse = plan.attend(q, k, v, scale)
        if links:  # joined in the exact type of `lse`, rounded once at the end
            out = out.to(lse.dtype)
        for key, value in _pairs(links):
            score = _row_dot(q, key, lse.dtype) * scale
            # In place: `plan.attend` made `out` and `lse` for this call.
            _join(out, lse, value, score)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *links)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *links = ctx.saved_tensors
        scale = ctx.scale
        grad = grad.contiguous()
        # `out` and `lse` are those of all keys, links included. So the plan needs no link for its gradients, and a link
        # needs no other key.
        dq, dk, dv = ctx.plan.attend_backward(grad, q, k, v, out, lse, scale)
        gradients: list[Tensor] = []  # of the links, in their order
        if links:
            exact = lse.dtype
            # Σ over all keys of p · dp, which the softmax's gradient subtracts; it equals grad · out.
            delta = (grad.to(exact) * out).sum(-1)
        for key, value in _pairs(links):
            heads, groups = q.shape[1], key.shape[1]
            score = _row_dot(q, key, exact) * scale
            p = torch.exp(score - lse)
            dp = _row_dot(grad, value, exact) - delta
            ds = p * dp * scale
            ds = ds[..., None]
            p = p[..., None]
            dq_link = ds * _per_query_head(key, heads)
            dq += dq_link.to(dq.dtype)
            gradients.append(_per_group(ds * q, groups).to(key.dtype))
            gradients.append(_per_group(p * grad, groups).to(value.dtype))
        return dq, dk, dv, None, None, *gradients


def _pairs(links: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (key, value) of each link."""
    return zip(links[::2], links[1::2], strict=True)


def _join(out: Tensor, lse: Tensor, value: Tensor, score: Tensor) -> None:
    """Add one further key of each row to the softmax: `out [t, n, d]` and `lse [t, n]`, in place.

    value  `[t, g, d]`, the key's
    score  `[t, n]`, of the query with the key, scaled
    """
    both = torch.logaddexp(lse, score)
    share = torch.exp(lse - both)
    other_share = torch.exp(score - both)
    out.mul_(share[..., None])
    out.addcmul_(_per_query_head(value, out.shape[1]), other_share[..., None])
    lse.copy_(both)


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for its query heads: `[t, g, d] -> [t, n, d]`."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _per_group(x: Tensor, groups: int) -> Tensor:
    """Sum over the query heads of each key/value head: `[t, n, d] -> [t, g, d]`."""
    return x.unflatten(1, (groups, -1)).sum(2)


def _row_dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot product of each query head with its key/value head, row by row, in `dtype`.

    a `[t, n, d]`, b `[t, g, d]` -> `[t, n]`
    """
    a = a.to(dtype).unflatten(1, (b.shape[1], -1))
    b = b.to(dtype)
    products = a * b[:, :, None]
    return products.sum(-1).flatten(1)

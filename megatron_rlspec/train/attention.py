"""Core attention over packed sequences in plain torch, with context parallelism and the drafter's chain.

In a layer spec it replaces Megatron's DotProductAttention, which supports neither packing nor context parallelism, or
Transformer Engine's. It also applies the rotary embedding, from each token's position. It takes any float type.

The keys that a query row attends to fall into parts:

causal  the row's own sequence up to the row; under context parallelism, the row's own chunk of that sequence
spans   the chunks before that one, under context parallelism
chain   for the drafter's depths above 1, the keys of its earlier depths

The log-sum-exps of the parts join them, as in ring attention. The backward of a part needs only the joined output and
log-sum-exp (FlashAttention-2, arXiv 2307.08691, section 3.1). Each part is one call of a fused CPU kernel; elsewhere
the first two parts are one call of `varlen.py`. Neither stores a mask or a score matrix.

Shapes: t tokens of this rank, T = t · context-parallel size, n query heads and g key/value heads of this
tensor-parallel rank, d channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rlspec.models.rope import Rope
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.train import varlen
from megatron_rlspec.train.attention_plan import AttentionPlan, Batched, plan_attention

_aten = torch.ops.aten


@dataclass
class Chain:
    """The (key, value) pairs of the drafter's depths, all rotated.

    base   those of depth 1, `[T, g, d]`; None while depth 1 itself runs
    links  those of depths 2..d - 1, `[t, g, d]` each
    made   those of the current depth, set when its layer has run
    """

    base: tuple[Tensor, Tensor] | None = None
    links: tuple[tuple[Tensor, Tensor], ...] = ()
    made: tuple[Tensor, Tensor] | None = None

    def next(self) -> Chain:
        """Return the chain for the next depth."""
        assert self.made is not None, "the layer of this depth has not run"
        if self.base is None:
            return Chain(self.made)
        return Chain(self.base, (*self.links, self.made))


@dataclass
class PackedSequences(PackedSeqParams):
    """`PackedSeqParams` with the additional inputs of `PackedAttention`: plan, rotary factors, the drafter's chain."""

    plan: AttentionPlan | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    chain: Chain = field(default_factory=Chain)


def packed_sequences(
    cu_seqlens_padded: Tensor, groups: int, cp_size: int, cp_rank: int, device: torch.device
) -> PackedSequences:
    """Describe one micro-batch. `cu_seqlens_padded [n + 1]` is that of the whole batch, before the context split."""
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
    """Return cos and sin `[t, 1, dims / 2]` of the rotary angles, in float32 as Transformers and SGLang compute them.

    The first `dims` channels of a head are rotated.
    """
    frequencies = rope.frequencies(dims, positions.device)
    angles = positions.float()[:, None] * frequencies
    cos = angles.cos() * rope.magnitude
    sin = angles.sin() * rope.magnitude
    cos = cos.to(dtype)
    sin = sin.to(dtype)
    return cos[:, None], sin[:, None]


def rotated(x: Tensor, packed: PackedSequences) -> Tensor:
    """Rotate the first r channels of `x [t, heads, d]`, half-split, by the angles of `packed`."""
    return _Rotate.apply(x, packed.cos, packed.sin)


class PackedAttention(MegatronModule):
    """Causal softmax attention, `query [t, n, d]`, `key` and `value` `[t, g, d]` -> `[t, n · d]`.

    `packed_seq_params` must be a `PackedSequences`. No dropout, window, sink or additive bias. Values may be narrower.
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
        # whose own class rotates a part of the channels
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
        if width < key_width:  # of latent attention; the kernels take one width
            value = F.pad(value, (0, key_width - width))
        chain = packed.chain
        links: list[Tensor] = []
        if chain.base is None:
            if packed.plan.order is not None:
                both = torch.cat([key, value], -1)
                both = _AllGather.apply(both, self.cp_group)
                both = both.index_select(0, packed.plan.order)
                key, value = both.split(key_width, -1)
            chain.made = (key, value)
        else:
            chain.made = (key, value)
            for pair in (*chain.links, chain.made):
                links += pair
            key, value = chain.base
        out = _Attend.apply(query, key, value, packed.plan, self.scale, *links)
        out = out[..., :width]
        return out.flatten(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: Any = None,
    ) -> dict:
        return {}


class _AllGather(torch.autograd.Function):
    """Concatenate the rows of all ranks. The backward sums the ranks' gradients of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows, *shape = x.shape
        out = x.new_empty(group.size() * rows, *shape)
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, *shape = grad.shape
        out = grad.new_empty(rows // ctx.group.size(), *shape)
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


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

    `links` are pairs of `[t, g, d]`: row i of q attends to row i of each. All keys of a row share one softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: AttentionPlan,
        scale: float,
        *links: Tensor,
    ) -> Tensor:
        ctx.plan = plan
        ctx.scale = scale
        ctx.heads = k.shape[:2]
        saved: list[Tensor] = [q, k, v]
        if isinstance(plan.keys, Batched):
            slots = _gather(q, plan.keys.query_rows, k, v, plan.keys.key_rows)
            out, lse = _joined_spans(q, k, v, slots, plan.keys, scale)
            if links or plan.keys.spans:
                saved = [*slots, *saved]
            else:
                saved = [*slots]
        else:
            out, lse = varlen.attend(q, k, v, plan.keys, scale)
        if links:
            out = _join_links(out.to(lse.dtype), lse, q, links, scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(out, lse, *saved, *links)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *saved = ctx.saved_tensors
        keys = ctx.plan.keys
        scale = ctx.scale
        grad = grad.contiguous()
        if isinstance(keys, Batched):
            q_slots, k_slots, v_slots, *saved = saved
            dq, dk, dv = _causal_backward(
                grad,
                q_slots,
                k_slots,
                v_slots,
                out,
                lse,
                keys,
                ctx.heads,
                scale,
            )
            if not saved:
                return dq, dk, dv, None, None
            q, k, v, *links = saved
            for span in keys.spans:
                rows, seen = span.slices
                dq_span, dk_span, dv_span = _span_backward(
                    grad[rows],
                    q[rows],
                    k[seen],
                    v[seen],
                    out[rows],
                    lse[rows],
                    scale,
                )
                dq[rows].add_(dq_span)
                dk[seen].add_(dk_span)
                dv[seen].add_(dv_span)
        else:
            q, k, v, *links = saved
            dq, dk, dv = varlen.attend_backward(grad, q, k, v, out, lse, keys, scale)
        dlinks = _links_backward(grad, q, out, lse, links, scale, dq)
        return dq, dk, dv, None, None, *dlinks


def _join_links(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    links: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Add attention of row i of `q [t, n, d]` to row i of each link to `out` and `lse`, in place."""
    keys = links[::2]
    values = links[1::2]
    for key, value in zip(keys, values, strict=True):
        score = _row_dot(q, key, lse.dtype) * scale
        value_of_heads = _per_query_head(value, q.shape[1])
        _join(out, lse, value_of_heads, score)
    return out


def _links_backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    links: Sequence[Tensor],
    scale: float,
    dq: Tensor,
) -> list[Tensor]:
    """Add the links' part to `dq [t, n, d]`, in place; return dk and dv, `[t, g, d]`, of each link."""
    gradients: list[Tensor] = []
    if not links:
        return gradients
    heads = q.shape[1]
    exact = lse.dtype
    delta = (grad.to(exact) * out).sum(-1)
    keys = links[::2]
    values = links[1::2]
    for key, value in zip(keys, values, strict=True):
        groups = key.shape[1]
        score = _row_dot(q, key, exact) * scale
        p = torch.exp(score - lse)
        dp = _row_dot(grad, value, exact) - delta
        ds = p * dp * scale
        ds = ds[..., None]
        p = p[..., None]
        dq_link = ds * _per_query_head(key, heads)
        dq += dq_link.to(dq.dtype)
        dk = _per_group(ds * q, groups)
        dv = _per_group(p * grad, groups)
        gradients.append(dk.to(key.dtype))
        gradients.append(dv.to(value.dtype))
    return gradients


def _joined_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: tuple[Tensor, Tensor, Tensor],
    plan: Batched,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return output `[t, n, d]` and log-sum-exp `[t, n]` of the causal part and the spans."""
    out, lse = _causal(*slots, plan, scale)
    out = out.view(q.shape)
    lse = lse.view(q.shape[:2])
    if plan.spans:
        out = out.to(lse.dtype)
    for span in plan.spans:
        rows, seen = span.slices
        grouped = _grouped(q[rows], k[seen], v[seen])
        part, part_lse = _attend(*grouped, False, scale)
        part = part.permute(2, 0, 1, 3).flatten(1, 2)
        part_lse = part_lse.permute(2, 0, 1).flatten(1)
        _join(out[rows], lse[rows], part, part_lse)
    return out, lse


def _gather(
    q: Tensor,
    q_rows: Tensor,
    k: Tensor,
    v: Tensor,
    k_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather rows into the plan's slots: q `[slots, n / g, d]`, k and v `[slots, d]`."""
    groups, d = k.shape[1:]
    q = q.reshape(len(q) * groups, -1, d)
    k = k.reshape(-1, d)
    v = v.reshape(-1, d)
    q = q.index_select(0, q_rows)
    k = k.index_select(0, k_rows)
    v = v.index_select(0, k_rows)
    return q, k, v


def _batches(plan: Batched, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split slots into the plan's batches, `[batch, heads, length, ...]` each; keys are repeated without a copy."""
    sizes = [batch * length for batch, length in plan.shapes]
    heads = max(x.shape[1] for x in tensors if x.dim() == 3)
    columns = []
    for x in tensors:
        if x.dim() == 2:
            x = x[:, None].expand(-1, heads, -1)
        parts = []
        for part, shape in zip(x.split(sizes), plan.shapes, strict=True):
            part = part.unflatten(0, shape)
            parts.append(part.transpose(1, 2))
        columns.append(parts)
    return list(zip(*columns, strict=True))


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Batched,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return output `[t · g, n / g, d]` and log-sum-exp `[t · g, n / g]` of the causal part."""
    exact = torch.promote_types(q.dtype, torch.float32)
    outs = [q[:0]]
    lses = [q.new_zeros(0, q.shape[1], dtype=exact)]
    for q_b, k_b, v_b in _batches(plan, q, k, v):
        out, lse = _attend(q_b, k_b, v_b, True, scale)
        out = out.transpose(1, 2)
        lse = lse.transpose(1, 2)
        outs.append(out.flatten(0, 1))
        lses.append(lse.flatten(0, 1))
    out = torch.cat(outs)
    lse = torch.cat(lses)
    return out.index_select(0, plan.slot_of), lse.index_select(0, plan.slot_of)


def _causal_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Batched,
    heads: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the causal part's dq `[t, n, d]`, dk and dv `[T, g, d]`; q, k, v are in slots, the rest in rows."""
    d = k.shape[-1]
    rows = heads[1] * len(grad)
    grad_rows = grad.view(rows, -1, d)
    out_rows = out.view(rows, -1, d)
    lse_rows = lse.view(rows, -1)
    grad_slots = grad_rows.index_select(0, plan.query_rows)
    grad_slots.index_fill_(0, plan.padding, 0)
    out_slots = out_rows.index_select(0, plan.query_rows)
    lse_slots = lse_rows.index_select(0, plan.query_rows)
    dq = [q[:0]]
    dk = [k[:0]]
    dv = [v[:0]]
    batches = _batches(plan, grad_slots, q, k, v, out_slots, lse_slots[..., None])
    for grad_b, q_b, k_b, v_b, out_b, lse_b in batches:
        dq_b, dk_b, dv_b = _attend_backward(
            grad_b,
            q_b,
            k_b,
            v_b,
            out_b,
            lse_b[..., 0],
            True,
            scale,
        )
        dq_b = dq_b.transpose(1, 2)
        dk_b = dk_b.sum(1)
        dv_b = dv_b.sum(1)
        dq.append(dq_b.flatten(0, 1))
        dk.append(dk_b.flatten(0, 1))
        dv.append(dv_b.flatten(0, 1))

    def by_row(slots: list[Tensor]) -> Tensor:
        # Padding slots read row 0 and add 0 to its gradient.
        total = k.new_zeros(heads[0] * heads[1], d)
        total.index_add_(0, plan.key_rows, torch.cat(slots))
        return total.view(*heads, d)

    dq_rows = torch.cat(dq).index_select(0, plan.slot_of)
    return dq_rows.view(grad.shape), by_row(dk), by_row(dv)


def _span_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = (k.shape[1], -1)
    grad = grad.unflatten(1, heads).permute(1, 2, 0, 3)
    out = out.unflatten(1, heads).permute(1, 2, 0, 3)
    lse = lse.unflatten(1, heads).permute(1, 2, 0)
    grouped = _grouped(q, k, v)
    dq, dk, dv = _attend_backward(grad, *grouped, out, lse, False, scale)
    dq = dq.permute(2, 0, 1, 3).flatten(1, 2)
    dk = dk.sum(1)
    dv = dv.sum(1)
    return dq, dk.transpose(0, 1), dv.transpose(0, 1)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape the tensors of one span to `[g, n / g, rows, d]` without a copy."""
    groups = k.shape[1]
    per_group = q.shape[1] // groups
    q = q.unflatten(1, (groups, per_group))
    q = q.permute(1, 2, 0, 3)
    k = k.transpose(0, 1)[:, None]
    v = v.transpose(0, 1)[:, None]
    k = k.expand(groups, per_group, -1, -1)
    v = v.expand(groups, per_group, -1, -1)
    return q, k, v


def _join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add attention to further keys to `out [t, n, d]` and `lse [t, n]`, in place."""
    both = torch.logaddexp(lse, other_lse)
    share = torch.exp(lse - both)
    other_share = torch.exp(other_lse - both)
    out.mul_(share[..., None])
    out.addcmul_(other, other_share[..., None])
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
    """Multiply row by row: `[t, n, d] · [t, g, d] -> [t, n]`."""
    a = a.to(dtype).unflatten(1, (b.shape[1], -1))
    b = b.to(dtype)
    products = a * b[:, :, None]
    return products.sum(-1).flatten(1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries `[batch, heads, rows, d]` to keys `[batch, heads, keys, d]`."""
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of one part; `out` and `lse` are those of all parts joined.

    torch's kernel takes several times as long for bfloat16 as for float32 where rows are few.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    inputs = [x.to(exact) for x in (grad, q, k, v, out)]
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs,
        lse,
        0.0,
        causal,
        scale=scale,
    )
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

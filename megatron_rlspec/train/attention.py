"""Core attention over packed sequences in plain torch: context parallel, any float type, chain-exact for the drafter.

It stands in a layer spec where Megatron's DotProductAttention (neither packed nor context parallel) or Transformer
Engine's would. Rotary embedding is applied here too, from each token's position, once per micro-batch.

Causal attention is computed in *pieces* (a run of query rows against a run of key rows, causal or full), one fused
kernel call each, joined by their log-sum-exps as in ring attention. The backward of a piece needs only the joined
output and log-sum-exp (FlashAttention-2, section 3.1), so no mask and no score matrix exists at any time.

Shapes: t tokens of this rank, T = t · context-parallel size, n query heads and g key/value heads of this
tensor-parallel rank, d channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rlspec.rl.context_parallel import cp_index

_aten = torch.ops.aten


class Piece(NamedTuple):
    """Query rows [q, q + rows) of this rank against key rows [k, k + keys) of all ranks; `first` for these rows?"""

    q: int
    rows: int
    k: int
    keys: int
    causal: bool
    first: bool


def pieces(cu_seqlens: list[int], cp_size: int = 1, cp_rank: int = 0) -> list[Piece]:
    """The pieces of packed causal attention for one rank under the zigzag layout."""
    out: list[Piece] = []
    q = 0
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        if start == end:
            continue
        if cp_size == 1:
            out.append(Piece(start, end - start, start, end - start, True, True))
            continue
        rows = (end - start) // (2 * cp_size)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            out.append(Piece(q, rows, start + chunk * rows, rows, True, True))
            if chunk:
                out.append(Piece(q, rows, start, chunk * rows, False, False))
            q += rows
    return out


@dataclass
class Chain:
    """What the drafter's depth d > 1 attends to besides itself, and what it leaves for the next depth.

    `base` is the (key, value) `[T, g, d]` of depth 1 and `links` the `[t, g, d]` of depths 2..d - 1, all rotated.
    Depth 1 runs with `base = None`. After the layer ran, `made` holds its own pair, in the shape of its depth.
    """

    base: tuple[Tensor, Tensor] | None = None
    links: tuple[tuple[Tensor, Tensor], ...] = ()
    made: tuple[Tensor, Tensor] | None = None

    def next(self) -> Chain:
        assert self.made is not None, "the layer of this depth has not run"
        if self.base is None:
            return Chain(self.made)
        return Chain(self.base, (*self.links, self.made))


@dataclass
class PackedSequences(PackedSeqParams):
    """`PackedSeqParams` with the index tables and rotary factors that `PackedAttention` needs."""

    pieces: list[Piece] = field(default_factory=list)
    gathered_order: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    chain: Chain | None = None


def packed_sequences(cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int, device: torch.device) -> PackedSequences:
    """Describe one micro-batch; `cu_seqlens_padded [n + 1]` as laid out before the context-parallel split."""
    bounds = cu_seqlens_padded.tolist()
    longest = max((b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)), default=0)
    order = None
    if cp_size > 1:
        ranks = [cp_index(cu_seqlens_padded, rank, cp_size) for rank in range(cp_size)]
        order = torch.cat(ranks).argsort().to(device)
    cu = cu_seqlens_padded.to(device=device, dtype=torch.int32)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pieces=pieces(bounds, cp_size, cp_rank),
        gathered_order=order,
    )


def rotary_factors(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[t, 1, head_dim / 2]` of the rotary angles, computed in float32 as Transformers and SGLang do."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[:, None] * (1.0 / base**exponent)
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


class PackedAttention(MegatronModule):
    """Causal softmax attention, `query [t, n, d]`, `key` and `value` `[t, g, d]` -> `[t, n · d]`.

    `packed_seq_params` must be a `PackedSequences`. No dropout, window, sink or additive bias.
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
        if config.attention_dropout or config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError("PackedAttention computes plain causal softmax: no dropout, window or softmax offset")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        if not isinstance(packed, PackedSequences):
            raise TypeError("PackedAttention needs packed_seq_params from attention.packed_sequences()")
        query = _Rotate.apply(query, packed.cos, packed.sin)
        key = _Rotate.apply(key, packed.cos, packed.sin)
        chain = packed.chain
        if chain is None or chain.base is None:
            if packed.gathered_order is not None:
                both = _AllGather.apply(torch.cat([key, value], -1), self.cp_group)
                key, value = both.index_select(0, packed.gathered_order).split(key.shape[-1], -1)
            if chain is not None:
                chain.made = (key, value)
            out = _Attend.apply(query, key, value, packed.pieces, self.scale)
        else:
            chain.made = (key, value)
            links = [tensor for pair in (*chain.links, chain.made) for tensor in pair]
            out = _Attend.apply(query, *chain.base, packed.pieces, self.scale, *links)
        return out.reshape(out.shape[0], -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        return {}


class _AllGather(torch.autograd.Function):
    """Concatenate all ranks' rows; the backward sums what each rank contributes to a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class _Rotate(torch.autograd.Function):
    """Rotary embedding in the half-split convention: x `[t, heads, d]`, cos and sin `[t, 1, d / 2]`."""

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
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class _Attend(torch.autograd.Function):
    """Softmax attention of `q [t, n, d]` to the pieces of `k`, `v` `[T, g, d]` and, row by row, to the links.

    `links` are pairs of `[t, g, d]`: row i of q sees row i of each. All keys share one softmax.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: list[Piece], scale: float, *links: Tensor) -> Tensor:
        exact = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        out = q.new_zeros(q.shape, dtype=exact)
        lse = q.new_full(q.shape[:2], -math.inf, dtype=exact)
        for part in parts:
            rows, keys = slice(part.q, part.q + part.rows), slice(part.k, part.k + part.keys)
            o, o_lse = _attend_piece(q[rows], k[keys], v[keys], part.causal, scale)
            if part.first:
                out[rows], lse[rows] = o, o_lse
            else:
                _join(out[rows], lse[rows], o, o_lse)
        for key, value in zip(links[::2], links[1::2], strict=True):
            score = _row_dot(q, key, exact) * scale
            _join(out, lse, _per_query_head(value, q.shape[1]), score)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *links)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *links = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part in ctx.parts:
            rows, keys = slice(part.q, part.q + part.rows), slice(part.k, part.k + part.keys)
            piece = _attend_piece_backward(
                grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], part.causal, ctx.scale
            )
            for total, share in zip((dq[rows], dk[keys], dv[keys]), piece, strict=True):
                total += share
        dlinks: list[Tensor] = []
        if links:
            groups = k.shape[1]
            delta = (grad.to(lse.dtype) * out).sum(-1)
            for key, value in zip(links[::2], links[1::2], strict=True):
                p = torch.exp(_row_dot(q, key, lse.dtype) * ctx.scale - lse)
                ds = (p * (_row_dot(grad, value, lse.dtype) - delta) * ctx.scale)[..., None]
                dq += (ds * _per_query_head(key, q.shape[1])).to(dq.dtype)
                dlinks += [
                    _per_group(ds * q, groups).to(key.dtype),
                    _per_group(p[..., None] * grad, groups).to(v.dtype),
                ]
        return dq, dk, dv, None, None, *dlinks


def _join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Fold attention to further keys into `out [t, n, d]`, `lse [t, n]`, in place."""
    both = torch.logaddexp(lse, other_lse)
    out.mul_(torch.exp(lse - both)[..., None]).addcmul_(other, torch.exp(other_lse - both)[..., None])
    lse.copy_(both)


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """`[t, g, d] -> [t, n, d]`, each key/value head repeated for its query heads."""
    return x.repeat_interleave(heads // x.shape[1], dim=1) if x.shape[1] != heads else x


def _per_group(x: Tensor, groups: int) -> Tensor:
    """`[t, n, d] -> [t, g, d]`, the adjoint of `_per_query_head`."""
    return x.unflatten(1, (groups, -1)).sum(2)


def _row_dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`[t, n, d] · [t, g, d] -> [t, n]`, row by row."""
    return (a.to(dtype).unflatten(1, (b.shape[1], -1)) * b.to(dtype)[:, :, None]).sum(-1).flatten(1)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """To the kernels' [batch, heads, rows, d], with key/value heads as the batch, so that nothing is copied."""
    groups, per_group = k.shape[1], q.shape[1] // k.shape[1]
    q = q.unflatten(1, (groups, per_group)).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1)[:, None].expand(groups, per_group, -1, -1) for x in (k, v))
    return q, k, v


def _has_cpu_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _attend_piece(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output `[rows, n, d]` and log-sum-exp `[rows, n]` of one piece."""
    q, k, v = _grouped(q, k, v)
    if _has_cpu_kernel(q):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        scores = _scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        out = torch.exp(scores - lse[..., None]).to(v.dtype) @ v
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)


def _attend_piece_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The piece's part of dq `[rows, n, d]`, dk and dv `[keys, g, d]`; `out` and `lse` are of all pieces joined."""
    groups = k.shape[1]
    q, k, v = _grouped(q, k, v)
    grad, out = (x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3) for x in (grad, out))
    lse = lse.unflatten(1, (groups, -1)).permute(1, 2, 0)
    if _has_cpu_kernel(q):
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        p = torch.exp(_scores(q, k, causal, scale) - lse[..., None])
        dv = p.to(grad.dtype).transpose(-1, -2) @ grad
        ds = p * ((grad @ v.transpose(-1, -2)).to(p.dtype) - (grad.to(p.dtype) * out).sum(-1, keepdim=True)) * scale
        ds = ds.to(q.dtype)
        dq, dk = ds @ k, ds.transpose(-1, -2) @ q
    return dq.permute(2, 0, 1, 3).flatten(1, 2), dk.sum(1).transpose(0, 1), dv.sum(1).transpose(0, 1)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(torch.float64 if q.dtype == torch.float64 else torch.float32) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores

"""Causal attention over packed sequences of any lengths, in memory linear in the tokens: flash attention, or blocks.

On a GPU in 16 bits the kernels are torch's own build of FlashAttention-2. For other types and head sizes the same two
functions run in plain torch, one block of query rows at a time.

Shapes: t query rows, T key rows, n query heads, g key/value heads, d channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megatron_rlspec.packing.transfer import to_device

_aten = torch.ops.aten
_BLOCK = 1 << 24  # elements of one block of scores


@dataclass(frozen=True)
class Varlen:
    """Pieces of query rows, one after the other, each with the keys that its last row attends to.

    Row i of a piece attends to all of its keys but the last q - 1 - i of them.

    q, k       rows and keys of each piece
    cu_q, cu_k `[pieces + 1]` int32, their cumulative sums on the device
    key_rows   the key row of each key; None if they are all key rows in order
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor
    key_rows: Tensor | None

    @classmethod
    def of(
        cls,
        pieces: list[tuple[int, int, int]],
        device: torch.device,
    ) -> Varlen:
        """Make it from pieces (query rows, first key row, keys)."""
        q = []
        k = []
        key_rows = []
        in_order = True
        end = 0
        for rows, first, keys in pieces:
            in_order = in_order and first == end
            end += keys
            q.append(rows)
            k.append(keys)
            key_rows.append(torch.arange(first, first + keys))
        return cls(
            q=tuple(q),
            k=tuple(k),
            cu_q=_cumulative(q, device),
            cu_k=_cumulative(k, device),
            key_rows=None if in_order else to_device(torch.cat(key_rows), device),
        )

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Return the largest number of rows and of keys of a piece."""
        return max(self.q), max(self.k)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Varlen,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return output `[t, n, d]` and log-sum-exp `[t, n]` of queries `[t, n, d]` to keys `[T, g, d]`."""
    k, v = _gathered(pieces, k, v)
    if not _has_flash(q):
        return _blocked(q, k, v, pieces, scale)
    out, lse, *_ = _aten._flash_attention_forward(
        q,
        k,
        v,
        pieces.cu_q,
        pieces.cu_k,
        *pieces.longest,
        0.0,
        True,
        False,
        scale=scale,
    )
    return out, lse.t().contiguous()


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Varlen,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv. `out` and `lse` may be those of a softmax that includes further keys."""
    keys = len(k)
    k, v = _gathered(pieces, k, v)
    if _has_flash(q):
        # the generator's state, for dropout
        unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
        dq, dk, dv = _aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.t().contiguous(),
            pieces.cu_q,
            pieces.cu_k,
            *pieces.longest,
            0.0,
            True,
            *unused,
            scale=scale,
        )
    else:
        dq, dk, dv = _blocked_backward(grad, q, k, v, out, lse, pieces, scale)
    if pieces.key_rows is not None:
        # A key row belongs to two pieces at most, so the order of a GPU's additions does not matter.
        shape = (keys, *dk.shape[1:])
        dk = dk.new_zeros(shape).index_add_(0, pieces.key_rows, dk)
        dv = dv.new_zeros(shape).index_add_(0, pieces.key_rows, dv)
    return dq, dk, dv


def _has_flash(q: Tensor) -> bool:
    """Return whether torch's flash attention takes these queries. Tensors without values stand for a GPU's."""
    if q.device.type not in ("cuda", "meta") or not len(q):
        return False
    d = q.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return d % 8 == 0 and d <= 256


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    sums = [0, *accumulate(lengths)]
    return to_device(torch.tensor(sums, dtype=torch.int32), device)


def _gathered(pieces: Varlen, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if pieces.key_rows is None:
        return k, v
    k = k.index_select(0, pieces.key_rows)
    v = v.index_select(0, pieces.key_rows)
    return k, v


def _blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Varlen,
    scale: float,
) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=exact)
    for rows, keys in _blocks(pieces, q.shape[1]):
        scores = _scores(q[rows], k[keys], scale)
        lse_b = scores.logsumexp(-1, keepdim=True)
        p = scores.sub_(lse_b).exp_()
        out_b = p.to(v.dtype) @ _by_group(v[keys])
        out[rows] = _by_row(out_b)
        lse_rows = _by_row(lse_b)
        lse[rows] = lse_rows[..., 0]
    return out, lse


def _blocked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Varlen,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k, dtype=lse.dtype)
    dv = torch.zeros_like(dk)
    delta = (grad.to(lse.dtype) * out).sum(-1)
    for rows, keys in _blocks(pieces, q.shape[1]):
        grad_b = _by_group(grad[rows], groups)
        lse_b = _by_group(lse[rows, :, None], groups)
        delta_b = _by_group(delta[rows, :, None], groups)
        scores = _scores(q[rows], k[keys], scale)
        p = scores.sub_(lse_b).exp_()
        dv[keys] += _keys_of(p.to(grad.dtype), grad_b)
        values = _by_group(v[keys])
        dp = grad_b @ values.transpose(-1, -2)
        ds = dp.to(p.dtype).sub_(delta_b)
        ds.mul_(p).mul_(scale)
        ds = ds.to(q.dtype)
        dq_b = ds @ _by_group(k[keys])
        dq[rows] = _by_row(dq_b)
        dk[keys] += _keys_of(ds, _by_group(q[rows], groups))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(pieces: Varlen, heads: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of query rows, with the keys that the last row of the block attends to."""
    q_end = k_end = 0
    for rows, keys in zip(pieces.q, pieces.k, strict=True):
        q_start = q_end
        k_start = k_end
        q_end += rows
        k_end += keys
        step = max(1, _BLOCK // (heads * keys))
        for first in range(q_start, q_end, step):
            last = min(first + step, q_end)
            yield slice(first, last), slice(k_start, k_end - (q_end - last))


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scores `[g, n / g, rows, keys]`, in float32 or float64; the last row sees all keys."""
    rows = len(q)
    keys = len(k)
    exact = torch.promote_types(q.dtype, torch.float32)
    q = _by_group(q, k.shape[1])
    k = _by_group(k)
    scores = q @ k.transpose(-1, -2)
    scores = scores.to(exact).mul_(scale)
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    hidden.triu_(1 + keys - rows)
    return scores.masked_fill_(hidden, -math.inf)


def _by_group(x: Tensor, groups: int | None = None) -> Tensor:
    """View `[rows, heads, d]` as `[groups, heads / groups, rows, d]`; as many groups as heads if omitted."""
    heads = (groups or x.shape[1], -1)
    return x.unflatten(1, heads).permute(1, 2, 0, 3)


def _by_row(x: Tensor) -> Tensor:
    """Reverse `_by_group`."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _keys_of(weights: Tensor, x: Tensor) -> Tensor:
    """Sum x `[g, n / g, rows, d]` with weights `[g, n / g, rows, keys]` over query heads and rows: `[keys, g, d]`."""
    of_heads = weights.transpose(-1, -2) @ x
    return of_heads.sum(1).transpose(0, 1)

"""Causal attention over packed sequences of any lengths, in memory linear in the tokens: flash attention, or blocks.

On a GPU in 16 bits the kernels are torch's own build of FlashAttention-2. For other types and head sizes, and on a CPU,
plain torch computes one block of query rows at a time, in float32 or float64. `attention_plan.py` makes a `Varlen` for
each micro-batch. `attention.py` calls its `attend` and `attend_backward`; `Batched` (`batched.py`) has the same two.

Shapes: t query rows, T key rows, n query heads, g key/value heads, d channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.packing.transfer import to_device

_aten = torch.ops.aten
_BLOCK = 1 << 24  # the most elements of one block of scores, over all heads: 64 MiB in float32


@dataclass(frozen=True)
class Varlen:
    """Pieces of query rows, one after the other. A piece has the keys that its last row attends to, which are the most.

    Of a piece with q rows, row i attends to all keys of the piece but the last q - 1 - i of them. Two pieces can have
    keys in common: under context parallelism a rank has two chunks of each sequence, and both attend to its beginning.

    row_counts  the number of query rows of each piece, above 0
    key_counts  the number of keys of each piece
    cu_q, cu_k  `[pieces + 1]` int32, cumulative sums of both, on the device
    key_rows    int64 `[sum of key_counts]`, on the device: for each key of each piece its row in `k` and `v`; None: key
                i is row i
    """

    row_counts: tuple[int, ...]
    key_counts: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor
    key_rows: Tensor | None

    @classmethod
    def of(
        cls,
        pieces: list[tuple[int, int, int]],
        order: Tensor | None,
        device: torch.device,
    ) -> Varlen:
        """Make a `Varlen` of pieces (number of query rows, first key, number of keys). Keys are positions of the batch.

        pieces  at least one, in the order of this rank's query rows
        order   `[T]` int64, on the CPU: the row of each position's key in `k` and `v`; None: the position itself
        """
        row_counts = [rows for rows, _, _ in pieces]
        key_counts = [keys for _, _, keys in pieces]
        key_rows = torch.cat([torch.arange(first, first + keys) for _, first, keys in pieces])
        if order is not None:
            key_rows = order[key_rows]
        in_order = torch.equal(key_rows, torch.arange(len(key_rows)))
        return cls(
            row_counts=tuple(row_counts),
            key_counts=tuple(key_counts),
            cu_q=_cumulative(row_counts, device),
            cu_k=_cumulative(key_counts, device),
            key_rows=None if in_order else to_device(key_rows, device),
        )

    @cached_property
    def _kernel_arguments(self) -> tuple[Any, ...]:
        """Return the flash kernels' arguments about the pieces, in their order: boundaries, most rows, most keys."""
        return self.cu_q, self.cu_k, max(self.row_counts), max(self.key_counts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return output `[t, n, d]` and log-sum-exp `[t, n]` of queries `[t, n, d]` to keys `[T, g, d]`."""
        k = self._gathered(k)
        v = self._gathered(v)
        if not _has_flash(q):
            return _blocked(q, k, v, self, scale)
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *self._kernel_arguments, 0.0, True, False, scale=scale
        )  # no dropout, causal, no debug mask
        return out, lse.t().contiguous()  # the kernel's is `[n, t]`

    def attend_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv, shaped and typed as q, k, v. `grad` is that of `out`; the other shapes are `attend`'s.

        out, lse  of the whole softmax. At a drafter's depths above 1 it includes further keys, the links, which
                  `attention.py` has joined; their gradients are computed there
        """
        keys = len(k)
        inputs = (grad, q, self._gathered(k), self._gathered(v), out)
        if _has_flash(q):
            # The state of a random generator, for dropout, of which there is none.
            unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
            lse = lse.t().contiguous()
            dq, dk, dv = _aten._flash_attention_backward(
                *inputs, lse, *self._kernel_arguments, 0.0, True, *unused, scale=scale
            )
        else:
            dq, dk, dv = _blocked_backward(*inputs, lse, self, scale)
        if self.key_rows is not None:
            # `index_add_` on a GPU adds in any order. A key row belongs to two pieces at most, so each sum has at most
            # two terms, and their order changes no bit.
            shape = (keys, *dk.shape[1:])
            dk = dk.new_zeros(shape).index_add_(0, self.key_rows, dk)
            dv = dv.new_zeros(shape).index_add_(0, self.key_rows, dv)
        return dq, dk, dv

    def _gathered(self, x: Tensor) -> Tensor:
        """Return the keys or values of all pieces, one after the other."""
        return x if self.key_rows is None else x.index_select(0, self.key_rows)


def _has_flash(q: Tensor) -> bool:
    """Return whether torch's flash attention takes these queries: 16-bit floats, and 8, 16, ... or 256 channels.

    Tensors on torch's meta device, which have no values, count as a GPU's.
    """
    if q.device.type not in ("cuda", "meta") or not len(q):
        return False
    d = q.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return d % 8 == 0 and d <= 256


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    """Return `[n + 1]` cumulative sums from 0, int32, as the flash kernels take them."""
    sums = [0, *accumulate(lengths)]
    return to_device(torch.tensor(sums, dtype=torch.int32), device)


def _blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Varlen,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute `Varlen.attend` in plain torch; `k` and `v` are gathered.

    In the einsums: g is a key/value head, r one of its query heads, i a query row, j a key, d a channel.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    heads = q.shape[1]
    q = _by_group(q, k)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=exact)
    for rows, keys in _blocks(pieces, heads):
        scores = _scores(q[rows].to(exact), k[keys].to(exact), scale)
        lse_b = scores.logsumexp(-1)
        p = scores.sub_(lse_b[..., None]).exp_()  # in place: the scores are the largest tensor
        out[rows] = torch.einsum("grij,jgd->igrd", p, v[keys].to(exact))
        lse[rows] = lse_b.permute(2, 0, 1)
    return out.flatten(1, 2), lse.flatten(1, 2)


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
    """Compute `Varlen.attend_backward` in plain torch; gradients of `k` and `v` are of the gathered keys."""
    exact = lse.dtype
    heads = q.shape[1]
    grad, q, out, lse = (_by_group(x, k) for x in (grad, q, out, lse))
    dq = torch.empty_like(q)
    # Gradients of keys are added up over many blocks, whose keys overlap. So the sums are in float32 or float64.
    dk = torch.zeros_like(k, dtype=exact)
    dv = torch.zeros_like(v, dtype=exact)
    for rows, keys in _blocks(pieces, heads):
        grad_b, q_b, out_b = (x[rows].to(exact) for x in (grad, q, out))
        k_b = k[keys].to(exact)
        # Σ over all keys of p · dp, which the gradient of a softmax subtracts; it equals grad · out.
        delta = (grad_b * out_b).sum(-1)
        scores = _scores(q_b, k_b, scale)
        p = scores.sub_(lse[rows].permute(1, 2, 0)[..., None]).exp_()
        dv[keys] += torch.einsum("grij,igrd->jgd", p, grad_b)
        ds = torch.einsum("igrd,jgd->grij", grad_b, v[keys].to(exact))
        ds.sub_(delta.permute(1, 2, 0)[..., None]).mul_(p).mul_(scale)
        dq[rows] = torch.einsum("grij,jgd->igrd", ds, k_b)
        dk[keys] += torch.einsum("grij,igrd->jgd", ds, q_b)
    return dq.flatten(1, 2), dk.to(k.dtype), dv.to(v.dtype)


def _blocks(pieces: Varlen, heads: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of query rows, with the keys that the last row of the block attends to.

    A block lies in one piece. It has at most `_BLOCK` scores; if one row has more, the block is that row. `heads` is n.
    """
    q_end = k_end = 0
    for rows, keys in zip(pieces.row_counts, pieces.key_counts, strict=True):
        q_start = q_end
        k_start = k_end
        q_end += rows
        k_end += keys
        step = max(1, _BLOCK // (heads * keys))
        for first in range(q_start, q_end, step):
            last = min(first + step, q_end)
            # The last q_end - last keys of the piece are left out: only rows after this block attend to them.
            yield slice(first, last), slice(k_start, k_end - (q_end - last))


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """View `x [rows, n, ...]` as `[rows, g, n / g, ...]`, by the key/value heads of `k`."""
    return x.unflatten(1, (k.shape[1], -1))


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scores `[g, n / g, rows, keys]` of `q [rows, g, n / g, d]`, -inf where a row does not attend to a key.

    The last row attends to all keys.
    """
    rows = len(q)
    keys = len(k)
    scores = torch.einsum("igrd,jgd->grij", q, k).mul_(scale)
    is_hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    is_hidden.triu_(1 + keys - rows)  # row i sees the keys up to keys - rows + i
    return scores.masked_fill_(is_hidden, -math.inf)

"""Causal attention over packed sequences by torch's fused kernel for CPUs, in padded batches of similar lengths.

The kernel takes rectangular batches only. The padding stands behind each sequence, where causal attention hides it from
all tokens. `attention_plan.py` chooses this module on a CPU without context parallelism, else `varlen.py`.
`attention.py` calls `attend` and `attend_backward`.

Shapes: t tokens, n query heads, g key/value heads, d channels of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten
# A sequence joins a batch if padding takes at most this share of its batch row; otherwise it begins a new batch.
_MAX_PADDING = 0.2


@dataclass(frozen=True)
class Batched:
    """Whole sequences in padded batches, the longest first.

    A batch row is one sequence and one key/value head. A slot is one position of a batch row. A row of a tensor
    `[t, heads, d]` is one token and one key/value head, with the number token · g + head. Rows become slots for the
    kernel (`_batches`), and slots become rows (`_by_token`). `Varlen` has the same two public methods.

    groups   g
    shapes   (batch · g, length) of each batch
    rows     `[slots]` int64, the row of each slot, over all batches; 0 for a slot of padding
    padding  int64, the slots of padding, which `_batches` fills with 0
    slot_of  `[t · g]` int64, the slot of each row
    """

    groups: int
    shapes: tuple[tuple[int, int], ...]
    rows: Tensor
    padding: Tensor
    slot_of: Tensor

    @classmethod
    def of(cls, bounds: Sequence[int], groups: int, device: torch.device) -> Batched:
        """Make the batches of the sequences between `bounds [n + 1]`, cumulative lengths. Sequences may be empty.

        At least one has tokens: `packing/pack.py` gives padding to a micro-batch without samples.
        """
        sequences = [(start, end - start) for start, end in itertools.pairwise(bounds)]
        batches: list[list[tuple[int, int]]] = []
        for sequence in sorted(sequences, key=lambda start_and_length: -start_and_length[1]):
            length = sequence[1]
            if not length:  # all later ones are empty, too, because the lengths fall
                break
            if batches and length >= (1 - _MAX_PADDING) * batches[-1][0][1]:
                batches[-1].append(sequence)
            else:
                batches.append([sequence])
        shapes = []
        rows = []
        head = torch.arange(groups)[:, None]
        # For each batch `[batch, g, longest]`: the row of each slot, -1 at padding
        for batch in batches:
            longest = batch[0][1]
            position = torch.arange(longest)
            # `[batch, 1, 1]` each, so that they combine with `head [g, 1]` and `position [longest]`
            starts, lengths = torch.tensor(batch)[:, :, None, None].unbind(1)
            shapes.append((len(batch) * groups, longest))
            row = (starts + position) * groups + head
            rows.append(row.masked_fill(position >= lengths, -1).flatten())
        all_rows = torch.cat(rows)
        has_row = all_rows >= 0
        slot_of = torch.empty(bounds[-1] * groups, dtype=torch.int64)
        slot_of[all_rows[has_row]] = has_row.nonzero()[:, 0]
        return cls(
            groups=groups,
            shapes=tuple(shapes),
            rows=all_rows.clamp(min=0).to(device),
            padding=(~has_row).nonzero()[:, 0].to(device),
            slot_of=slot_of.to(device),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return output `[t, n, d]` and log-sum-exp `[t, n]` of queries `[t, n, d]` to keys `[t, g, d]`."""
        outs = []
        lses = []
        for q_b, k_b, v_b in self._batches(q, k, v):
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                q_b, k_b, v_b, 0.0, True, scale=scale
            )  # no dropout, causal
            outs.append(out)
            lses.append(lse[..., None])  # `_by_token` takes tensors with channels: here one
        return self._by_token(outs), self._by_token(lses)[..., 0]

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
        # In float32 at least: in bfloat16 torch's kernel takes several times as long where rows are few.
        exact = torch.promote_types(q.dtype, torch.float32)
        gradients: list[list[Tensor]] = [[], [], []]
        lse = lse[..., None]
        for *inputs, lse_b in self._batches(grad, q, k, v, out, lse):
            inputs = [x.to(exact) for x in inputs]
            dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *inputs, lse_b[..., 0], 0.0, True, scale=scale
            )
            dq = dq.to(q.dtype)
            # `_batches` repeats a key for its query heads, so the key's gradient is the sum of theirs.
            dk = dk.to(q.dtype).sum(1, keepdim=True)
            dv = dv.to(q.dtype).sum(1, keepdim=True)
            for parts, part in zip(gradients, (dq, dk, dv), strict=True):
                parts.append(part)
        dq, dk, dv = map(self._by_token, gradients)
        return dq, dk, dv

    def _batches(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield for each batch every tensor as `[batch · g, n / g, length, d]`; keys are repeated without a copy.

        tensors  `[t, n, d]` or `[t, g, d]`, at least one of them with n heads
        """
        heads = max(x.shape[1] for x in tensors) // self.groups
        sizes = [batch * length for batch, length in self.shapes]
        columns = []
        for x in tensors:
            rows = x.reshape(len(x) * self.groups, -1, x.shape[-1])
            slots = rows.index_select(0, self.rows)
            # Padding has selected row 0. In the backward its gradient must be 0, or it would add to those of the keys.
            slots.index_fill_(0, self.padding, 0)
            slots = slots.expand(-1, heads, -1)
            columns.append(slots.split(sizes))
        for shape, *parts in zip(self.shapes, *columns, strict=True):
            yield tuple(part.unflatten(0, shape).transpose(1, 2) for part in parts)

    def _by_token(self, batches: Sequence[Tensor]) -> Tensor:
        """Return `[t, heads, d]` of batches `[batch · g, heads / g, length, d]`."""
        slots = torch.cat([batch.transpose(1, 2).flatten(0, 1) for batch in batches])
        rows = slots.index_select(0, self.slot_of)
        return rows.view(-1, self.groups * rows.shape[1], rows.shape[2])

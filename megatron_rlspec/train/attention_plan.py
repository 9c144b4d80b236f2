"""Index tables of attention over a packed micro-batch: which key rows each query row attends to.

Shapes as in `attention.py`: t tokens of this rank, T of all context-parallel ranks, g key/value heads of this rank.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rlspec.packing.context_parallel import cp_index
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.train.varlen import Varlen

# Chunks whose lengths differ by less than this share run as one padded batch.
_PADDING = 0.2


class QuerySpan(NamedTuple):
    """Query rows [q, q + rows) of this rank. Each attends to all key rows [k, k + keys), counted over all ranks."""

    q: int
    rows: int
    k: int
    keys: int

    @property
    def slices(self) -> tuple[slice, slice]:
        """Return the query rows and the key rows."""
        rows = slice(self.q, self.q + self.rows)
        return rows, slice(self.k, self.k + self.keys)


@dataclass(frozen=True)
class Batched:
    """The causal part gathered into padded batches of sequences of similar length, and the spans: for a CPU's kernel.

    A batch row is one sequence and one key/value head. A slot is one position of a batch row. The row of a tensor has
    the number token · g + head.

    shapes      (batch · g, length) of each batch
    query_rows  `[slots]`, the query row of each slot
    key_rows    `[slots]`, the key row of each slot
    padding     the slots without a row; they read row 0
    slot_of     `[t · g]`, the slot of each query row
    spans       the chunks of the same sequences before the rank's own
    """

    shapes: tuple[tuple[int, int], ...]
    query_rows: Tensor
    key_rows: Tensor
    padding: Tensor
    slot_of: Tensor
    spans: tuple[QuerySpan, ...] = ()


@dataclass(frozen=True)
class AttentionPlan:
    """Which keys each query row attends to; `order` sorts rows gathered over context-parallel ranks."""

    keys: Batched | Varlen
    order: Tensor | None = None


def plan_attention(
    cu_seqlens_padded: Tensor,
    groups: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
    *,
    batched: bool | None = None,
) -> AttentionPlan:
    """Plan packed causal attention in the zigzag layout of context parallelism.

    `cu_seqlens_padded [n + 1]` is that of the whole batch, before the context split; `groups` is g. `batched`: for a
    CPU's kernel, the default on a CPU.
    """
    bounds = cu_seqlens_padded.tolist()
    chunks: list[QuerySpan] = []
    before: list[QuerySpan] = []
    q = 0
    pieces = 1
    own_chunks = [0]
    if cp_size > 1:
        pieces = 2 * cp_size
        own_chunks = [cp_rank, pieces - 1 - cp_rank]
    for start, end in itertools.pairwise(bounds):
        rows = (end - start) // pieces
        if not rows:
            continue
        for chunk in own_chunks:
            chunks.append(QuerySpan(q, rows, start + chunk * rows, rows))
            before.append(QuerySpan(q, rows, start, chunk * rows))
            q += rows
    order = None
    if cp_size > 1:
        shares = [cp_index(cu_seqlens_padded, rank, cp_size) for rank in range(cp_size)]
        order = to_device(torch.cat(shares).argsort(), device)
    if batched is None:
        batched = device.type == "cpu"
    if batched:
        spans = tuple(span for span in before if span.keys)
        return AttentionPlan(_batched(chunks, q, groups, device, spans), order)
    attended = [(span.rows, span.k, span.keys + span.rows) for span in before]
    return AttentionPlan(Varlen.of(attended, device), order)


def _batched(
    chunks: list[QuerySpan],
    tokens: int,
    groups: int,
    device: torch.device,
    spans: tuple[QuerySpan, ...],
) -> Batched:
    batches: list[list[QuerySpan]] = []
    for chunk in sorted(chunks, key=lambda c: -c.rows):
        if batches and chunk.rows >= (1 - _PADDING) * batches[-1][0].rows:
            batches[-1].append(chunk)
        else:
            batches.append([chunk])
    shapes = []
    query_rows = []
    key_rows = []
    filled = []
    head = torch.arange(groups)[None, :, None]
    for batch in batches:
        longest = batch[0].rows
        position = torch.arange(longest)[None, None]
        starts = torch.tensor(batch)[:, :, None, None]
        shapes.append((len(batch) * groups, longest))
        inside = position < starts[:, 1]
        inside = inside.expand(-1, groups, -1)
        query_row = (starts[:, 0] + position) * groups + head
        key_row = (starts[:, 2] + position) * groups + head
        query_rows.append((query_row * inside).flatten())
        key_rows.append((key_row * inside).flatten())
        filled.append(inside.flatten())
    if not batches:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return Batched((), empty, empty, empty, empty)
    rows = torch.cat(query_rows)
    has_row = torch.cat(filled)
    slot_of = torch.empty(tokens * groups, dtype=torch.int64)
    slot_of[rows[has_row]] = has_row.nonzero()[:, 0]
    return Batched(
        tuple(shapes),
        query_rows=rows.to(device),
        key_rows=torch.cat(key_rows).to(device),
        padding=(~has_row).nonzero()[:, 0].to(device),
        slot_of=slot_of.to(device),
        spans=spans,
    )

"""Which key rows each query row of a packed micro-batch attends to.

Shapes as in `attention.py`: t tokens of this rank, T of all context-parallel ranks, g key/value heads of this rank.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megatron_rlspec.packing.context_parallel import cp_index
from megatron_rlspec.train.batched import Batched
from megatron_rlspec.train.varlen import Varlen


def plan_attention(
    cu_seqlens_padded: Tensor,
    groups: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
    *,
    batched: bool | None = None,
) -> Batched | Varlen:
    """Plan packed causal attention in the zigzag layout of context parallelism.

    cu_seqlens_padded  `[n + 1]`, of the whole batch, before the context split, on the CPU. Under context parallelism
                       each length is a multiple of 2 · cp_size. At least one is not 0 (`packing/pack.py`)
    groups             g
    batched            plan for the CPU's kernel, by default on a CPU. That kernel needs whole sequences, so under
                       context parallelism `batched` has no effect

    The plan expects the key rows of all context-parallel ranks, those of rank 0 first.
    """
    bounds = cu_seqlens_padded.tolist()
    if batched is None:
        batched = device.type == "cpu"
    if batched and cp_size == 1:
        return Batched.of(bounds, groups, device)
    # Each sequence is split into `chunks`, of which this rank has `own_chunks` (`packing/context_parallel.py`).
    chunks = 1
    own_chunks = [0]
    order = None
    if cp_size > 1:
        chunks = 2 * cp_size
        own_chunks = [cp_rank, chunks - 1 - cp_rank]
        # The keys arrive rank by rank. `order` maps a position of the packed batch to its row among them.
        shares = [cp_index(cu_seqlens_padded, rank, cp_size) for rank in range(cp_size)]
        order = torch.cat(shares).argsort()
    pieces = []
    for start, end in itertools.pairwise(bounds):
        rows = (end - start) // chunks
        if rows:
            # A chunk's last row attends to all rows of the sequence up to the chunk's end.
            pieces += [(rows, start, (chunk + 1) * rows) for chunk in own_chunks]
    return Varlen.of(pieces, order, device)

"""Index tables of the tokens that each context-parallel rank holds. They need no process group and no device.

A packed batch of T tokens has padded boundaries `cu_seqlens_padded`. Every sequence is split into 2·size equal chunks.
Rank r holds chunks r and 2·size - 1 - r of each, sequence after sequence (zigzag, as in Megatron and Transformer
Engine). So causal attention costs all ranks the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rlspec.packing.transfer import to_device


def cp_index(cu_seqlens_padded: Tensor, rank: int, size: int) -> Tensor:
    """Return the global position of each token that `rank` holds: `[T / size] int64`, in the rank's own order.

    Raises ValueError if a padded length is no multiple of 2·size.
    """
    cu = cu_seqlens_padded.long()
    total = int(cu[-1])
    if size == 1:
        return torch.arange(total, device=cu.device)
    lengths = cu[1:] - cu[:-1]
    if bool((lengths % (2 * size)).any()):
        bad = lengths[lengths % (2 * size) != 0][0]
        raise ValueError(
            f"padded length {int(bad)} is not a multiple of {2 * size}, twice the context-parallel size"
        )
    chunk = lengths // (2 * size)
    # This rank's chunks in its own order: front and back chunk of sequence 0, then of sequence 1, ...
    front = cu[:-1] + rank * chunk
    back = cu[:-1] + (2 * size - 1 - rank) * chunk
    starts = torch.stack([front, back], dim=1).flatten()
    widths = chunk.repeat_interleave(2)
    local_starts = widths.cumsum(0) - widths
    # Within a chunk, global and local positions differ by a constant.
    return torch.arange(total // size, device=cu.device) + (
        starts - local_starts
    ).repeat_interleave(widths)


def slice_for_cp(x: Tensor, cu_seqlens_padded: Tensor, rank: int, size: int) -> Tensor:
    """Return the share of `rank` in `x [T, ...]`. Raises ValueError."""
    return x.index_select(0, cp_index(cu_seqlens_padded, rank, size).to(x.device))


def join_from_cp(shards: Sequence[Tensor], cu_seqlens_padded: Tensor) -> Tensor:
    """Join all ranks' shares, given in rank order, to the whole batch. Inverse of `slice_for_cp`."""
    size = len(shards)
    order = torch.cat([cp_index(cu_seqlens_padded, rank, size) for rank in range(size)])
    rows = to_device(order.argsort(), shards[0].device)  # the inverse of the permutation `order`
    return torch.cat(list(shards)).index_select(0, rows)

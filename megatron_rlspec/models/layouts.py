"""Fuse Hugging Face tensors into one Megatron tensor, and split it over tensor-parallel ranks; and the inverses.

A `Layout` is a pair of inverse functions between Hugging Face's full tensors and one full Megatron tensor. A `Cut` is a
pair of inverse functions between that tensor and its tensor-parallel shards. Both only move elements and are exact.
Results may be views of their arguments, so do not write into them.

The rows in `rows.py` and `families.py` name one layout and one cut for every tensor; `names.py`, `lazy.py` and
`train/shards.py` apply them. Megatron's layers fix the order of elements: with another order here, weights would land
in wrong places, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlspec.models.tensor_file import CheckpointError


@dataclass(frozen=True)
class Layout:
    """How Hugging Face tensors form one Megatron tensor.

    fuse   Hugging Face tensors, in the order of `Row.hf`, to the full Megatron tensor
    split  the inverse
    """

    fuse: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


COPY = Layout(lambda parts: parts[0], lambda full: (full,))

# SwiGLU: Megatron's linear_fc1 [2F, H] is gate, then up, on dim 0. Its cut must be COLUMN_GATE_UP: with COLUMN a rank
# would hold rows of gate alone, or of up alone.
GATE_UP = Layout(lambda parts: torch.cat(list(parts)), lambda full: full.chunk(2))


def _swap(full: Tensor) -> Tensor:
    """Exchange the two halves of the columns."""
    first, second = full.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


# The drafter's input projection [H, 2H]: the checkpoint concatenates (hidden, embedding), Megatron (embedding, hidden).
# The swap is its own inverse.
SWAP_HALVES = Layout(lambda parts: _swap(parts[0]), lambda full: (_swap(full),))


def grouped_qkv(groups: int, heads_per_group: int, head_dim: int) -> Layout:
    """Return the layout of Megatron's linear_qkv: for each key/value group its query heads, then its key, its value.

    It serves the weights `[rows, H]` and the biases `[rows]`. In this order a shard on dim 0 (`COLUMN`) holds whole
    groups, if the tensor-parallel size divides `groups`: `train/model.py` checks that, `Cut` does not. `fuse` raises
    CheckpointError if q, k or v has another number of rows than config.json says.
    """
    sizes = (heads_per_group * head_dim, head_dim, head_dim)

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        rest = parts[0].shape[1:]  # (H,) of weights, () of biases
        for name, part, size in zip("qkv", parts, sizes, strict=True):
            if len(part) != groups * size:
                raise CheckpointError(
                    f"{name} has {len(part)} rows, but config.json promises {groups * size}"
                )
        blocks = [
            part.reshape(groups, size, *rest) for part, size in zip(parts, sizes, strict=True)
        ]
        return torch.cat(blocks, dim=1).reshape(-1, *rest)

    def split(full: Tensor) -> Sequence[Tensor]:
        rest = full.shape[1:]
        blocks = full.reshape(groups, sum(sizes), *rest).split(sizes, dim=1)
        return [block.reshape(-1, *rest) for block in blocks]

    return Layout(fuse, split)


def zero_biased_qkv(groups: int, heads_per_group: int, head_dim: int) -> Layout:
    """Return the layout of Megatron's linear_qkv weight if the checkpoint also holds biases, all 0.

    Megatron's layer has no bias. The checkpoint has them for engines whose class of the model always adds one. `fuse`
    takes the weights of q, k and v, then their biases, and raises CheckpointError for a bias that is not 0.
    """
    weights = grouped_qkv(groups, heads_per_group, head_dim)

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        if any(bias.count_nonzero() for bias in parts[3:]):
            raise CheckpointError(
                "biases of q, k and v that are not 0, but config.json says attention_bias=false; expected true"
            )
        return weights.fuse(parts[:3])

    def split(full: Tensor) -> Sequence[Tensor]:
        parts = weights.split(full)
        return *parts, *(part.new_zeros(len(part)) for part in parts)

    return Layout(fuse, split)


@dataclass(frozen=True)
class Cut:
    """How tensor-parallel ranks split a full Megatron tensor.

    dim     the dimension that is split; None: every rank holds the whole tensor
    blocks  number of equal blocks on dim 0. Each block is split by itself, and a rank holds its part of each. The
            layout must put as many equal parts one after the other: `GATE_UP` needs `COLUMN_GATE_UP`
    """

    dim: int | None
    blocks: int = 1

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return the part of `rank` (from 0) of `size` ranks. Raises ValueError if the parts would not be equal."""
        if self.dim is None or size == 1:
            return full
        blocks = full.chunk(self.blocks)
        for block in blocks:
            if block.shape[self.dim] % size:
                parts = len(blocks) * size
                raise ValueError(
                    f"dimension {self.dim} of shape {list(full.shape)} does not divide into {parts} parts"
                )
        return torch.cat([block.chunk(size, dim=self.dim)[rank] for block in blocks])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor of all ranks' parts, given in rank order, at least one.

        Of a tensor that every rank holds whole, the first part is returned; the parts are not compared.
        """
        if self.dim is None or len(shards) == 1:
            return shards[0]
        # Each block is joined over the ranks by itself: the inverse of `shard`.
        by_rank = [shard.chunk(self.blocks) for shard in shards]
        return torch.cat([torch.cat(parts, dim=self.dim) for parts in zip(*by_rank, strict=True)])


# Named as Megatron's layers: ColumnParallelLinear splits the outputs (dim 0), RowParallelLinear the inputs (dim 1).
REPLICATED = Cut(None)
COLUMN = Cut(0)
ROW = Cut(1)
COLUMN_GATE_UP = Cut(0, blocks=2)  # a rank holds its part of gate, then its part of up

"""Fuse Hugging Face tensors into one Megatron tensor, and split it over tensor-parallel ranks; and the inverses.

A `Layout` is a pair of inverse functions between full tensors. A `Cut` is a pair of inverse functions between the full
Megatron tensor and its shards. Both only move elements and are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlspec.models.tensor_file import CheckpointError


@dataclass(frozen=True)
class Layout:
    """`fuse`: Hugging Face tensors to the Megatron tensor; `split`: the inverse."""

    fuse: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


COPY = Layout(lambda parts: parts[0], lambda full: (full,))

# SwiGLU: Megatron's linear_fc1 is [gate; up] on dim 0.
GATE_UP = Layout(lambda parts: torch.cat(list(parts)), lambda full: full.chunk(2))


def _swap(full: Tensor) -> Tensor:
    first, second = full.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


# The drafter's input projection [H, 2H]: the checkpoint concatenates (hidden, embedding), Megatron (embedding, hidden).
# The swap is its own inverse.
SWAP_HALVES = Layout(lambda parts: _swap(parts[0]), lambda full: (_swap(full),))


def grouped_qkv(groups: int, heads_per_group: int, head_dim: int) -> Layout:
    """Make Megatron's linear_qkv, weight or bias: for each key/value group the query heads, then key, then value."""
    sizes = (heads_per_group * head_dim, head_dim, head_dim)

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        rest = parts[0].shape[1:]
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
    """Make Megatron's linear_qkv weight from the weights of q, k and v and from their biases, which must be 0.

    Megatron's layer has no bias. The checkpoint has them for engines whose class of the model always adds one.
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
    """A tensor-parallel split along `dim`; None: every rank holds the whole tensor.

    `blocks` is the number of equal blocks on dim 0. Each block is split, and a rank holds a part of each.
    """

    dim: int | None
    blocks: int = 1

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
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
        if self.dim is None or len(shards) == 1:
            return shards[0]
        by_rank = [shard.chunk(self.blocks) for shard in shards]
        return torch.cat([torch.cat(parts, dim=self.dim) for parts in zip(*by_rank, strict=True)])


REPLICATED = Cut(None)
COLUMN = Cut(0)
ROW = Cut(1)
COLUMN_GATE_UP = Cut(0, blocks=2)

"""How one Megatron tensor is made of Hugging Face tensors, and how tensor-parallel ranks cut it.

A `Layout` is a pair of inverse functions on full tensors; a `Cut` is a pair of inverse functions between the full
Megatron tensor and its shards. Both are exact: they only move elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    fuse: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


COPY = Layout(lambda parts: parts[0], lambda full: (full,))

# SwiGLU: Megatron's linear_fc1 is [gate; up] on dim 0.
GATE_UP = Layout(torch.cat, lambda full: full.chunk(2))


def _swap(full: Tensor) -> Tensor:
    first, second = full.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


# The drafter's input projection [H, 2H], where the checkpoint concatenates (hidden, embedding) and Megatron
# (embedding, hidden): its own inverse.
SWAP_HALVES = Layout(lambda parts: _swap(parts[0]), lambda full: (_swap(full),))


def grouped_qkv(groups: int, heads_per_group: int, head_dim: int) -> Layout:
    """Megatron's linear_qkv, weight or bias: for each key/value group its query heads, then its key, then its value."""
    sizes = (heads_per_group * head_dim, head_dim, head_dim)

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        rest = parts[0].shape[1:]
        blocks = [part.reshape(groups, size, *rest) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(blocks, dim=1).reshape(-1, *rest)

    def split(full: Tensor) -> Sequence[Tensor]:
        rest = full.shape[1:]
        blocks = full.reshape(groups, sum(sizes), *rest).split(sizes, dim=1)
        return [block.reshape(-1, *rest) for block in blocks]

    return Layout(fuse, split)


@dataclass(frozen=True)
class Cut:
    """Tensor-parallel cut along `dim` (None: every rank holds all of it), in each of `blocks` equal blocks of dim 0."""

    dim: int | None
    blocks: int = 1

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        if self.dim is None or size == 1:
            return full
        if full.shape[self.dim] % (self.blocks * size):
            raise ValueError(
                f"dimension {self.dim} of shape {list(full.shape)} does not divide into {self.blocks * size} parts"
            )
        blocks = full.chunk(self.blocks)
        return torch.cat([block.chunk(size, dim=self.dim)[rank] for block in blocks])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        if self.dim is None or len(shards) == 1:
            return shards[0]
        by_rank = [shard.chunk(self.blocks) for shard in shards]
        return torch.cat([torch.cat([blocks[b] for blocks in by_rank], dim=self.dim) for b in range(self.blocks)])


REPLICATED = Cut(None)
COLUMN = Cut(0)
ROW = Cut(1)
COLUMN_GATE_UP = Cut(0, blocks=2)

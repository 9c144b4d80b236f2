"""Tensor parallelism for the model: a rank, a size, a sum and a concatenation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Solo:
    """One rank without tensor parallelism: the interface of `TensorParallel`, without communication."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def mean(self, value: float, device: str) -> float:
        return value

    def concat(self, x: Tensor, dim: int) -> Tensor:
        return x


class TensorParallel:
    """The ranks of one `torch.distributed` group. Every method is a collective, which all ranks must call in one order.

    It returns the same bits on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks. It replaces the content of x."""
        dist.all_reduce(x, group=self.group)
        return x

    def mean(self, value: float, device: str) -> float:
        """Return the mean of a number over the ranks. They choose drafts by it, so all must get the same number."""
        total = torch.tensor(value, dtype=torch.float64, device=device)
        return float(self.sum(total)) / self.size

    def concat(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' tensors of one shape, joined along `dim` in the order of ranks."""
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

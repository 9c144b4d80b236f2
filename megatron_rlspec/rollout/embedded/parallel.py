"""Tensor parallelism for the model: a rank, a size, a sum and a concatenation; and groups that are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

Piece = tuple[int, torch.Tensor]  # a rank of the group, and what it is sent or sends


class Solo:
    """One rank without tensor parallelism."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def mean(self, value: float, device: str) -> float:
        return value

    def concat(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def trade(self, leaving: Sequence[Piece], arriving: Sequence[Piece]) -> list[dist.Work]:
        return []


class TensorParallel:
    """The ranks of one `torch.distributed` group. A call returns the same bits on every rank."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def mean(self, value: float, device: str) -> float:
        """Return the mean of a number over the ranks, in float64, so that they choose the same by it."""
        return float(self.sum(torch.tensor(value, dtype=torch.float64, device=device))) / self.size

    def concat(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def trade(self, leaving: Sequence[Piece], arriving: Sequence[Piece]) -> list[dist.Work]:
        """Begin to send contiguous tensors to ranks, and to receive others in place. Returns what to wait for.

        Between two ranks tensors arrive in the order in which they leave.
        """
        ops = [
            dist.P2POp(dist.isend, part, group=self.group, group_peer=rank)
            for rank, part in leaving
        ]
        ops += [
            dist.P2POp(dist.irecv, part, group=self.group, group_peer=rank)
            for rank, part in arriving
        ]
        return dist.batch_isend_irecv(ops) if ops else []


class Groups:
    """The tensor-parallel groups of a job, by size. A group is made when its size is first used, and kept (PAT, 4.3).

    Groups are blocks of neighbouring ranks: at size t, ranks [i t, (i + 1) t) are group i.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._made: dict[int, Solo | TensorParallel] = {1: Solo()}

    def of(self, size: int) -> Solo | TensorParallel:
        """Return this rank's group of `size` ranks. All ranks of the job must ask for new sizes in one order.

        Raises ValueError if `size` does not divide the job.
        """
        if size not in self._made:
            if self.world % size:
                raise ValueError(
                    f"tensor parallel size {size} does not divide a job of {self.world} ranks"
                )
            blocks = [list(range(first, first + size)) for first in range(0, self.world, size)]
            own, _ = dist.new_subgroups_by_enumeration(blocks)
            # `trade` leaves out ranks, and NCCL's first message in a group waits for all of them
            dist.barrier(own)
            self._made[size] = TensorParallel(own)
        return self._made[size]

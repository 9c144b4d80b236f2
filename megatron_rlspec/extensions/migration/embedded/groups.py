"""The tensor-parallel groups of a job, by size, and messages inside one."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.rollout.embedded.parallel import Solo, TensorParallel

Piece = tuple[int, Tensor]  # a rank of the group, and what it is sent or sends


def trade(
    comm: Solo | TensorParallel, leaving: Sequence[Piece], arriving: Sequence[Piece]
) -> list[dist.Work]:
    """Begin to send contiguous tensors to ranks, and to receive others in place. Returns what to wait for.

    Between two ranks tensors arrive in the order in which they leave.
    """
    if isinstance(comm, Solo):
        return []
    group = comm.group
    ops = []
    for rank, part in leaving:
        ops.append(dist.P2POp(dist.isend, part, group=group, group_peer=rank))
    for rank, part in arriving:
        ops.append(dist.P2POp(dist.irecv, part, group=group, group_peer=rank))
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

"""The tensor-parallel groups of a job, by size."""

from __future__ import annotations

import torch.distributed as dist

from megatron_rlspec.rollout.embedded.parallel import Solo, TensorParallel


class Groups:
    """The tensor-parallel groups of a job, by size. A group is made when its size is first used, and kept (PAT, 4.3).

    Groups are blocks of neighbouring ranks: at size t, ranks [i t, (i + 1) t) are group i.
    """

    def __init__(self) -> None:
        self._made: dict[int, Solo | TensorParallel] = {1: Solo()}

    def of(self, size: int) -> Solo | TensorParallel:
        """Return this rank's group of `size` ranks. `size` must divide the number of ranks of the job.

        The first call for a size is collective: all ranks of the job must ask for new sizes in one order.
        """
        if size not in self._made:
            world = dist.get_world_size()
            blocks = [list(range(first, first + size)) for first in range(0, world, size)]
            own, _ = dist.new_subgroups_by_enumeration(blocks)
            self._made[size] = TensorParallel(own)
        return self._made[size]

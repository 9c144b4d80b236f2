"""An engine whose second rank has a mount namespace of its own says so. Real processes; `unshare` needs root."""

import ctypes
import os

import pytest
import torch.distributed as dist
from train_ranks import on_ranks

from megatron_rlspec.rollout.sglang.scheduler import mounts

CLONE_NEWNS = 0x00020000


def says(own_mounts: bool) -> str:
    dist.init_process_group("gloo")
    if own_mounts and dist.get_rank() == 1:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    said = mounts.apart(dist.group.WORLD)
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("own_mounts", [False, True])
def test_ranks_with_mounts_of_their_own_are_found(own_mounts):
    said, other = on_ranks(2, says, own_mounts)
    assert said == other
    if own_mounts:
        assert said.startswith("rank 1 of this engine is on another machine or has mounts of its own")
        assert "\n" not in said
    else:
        assert said == ""

"""Whether an engine's ranks see the same files and processes: shared memory reaches only those that do."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BOOT = Path("/proc/sys/kernel/random/boot_id")
_SPACES = (Path("/proc/self/ns/mnt"), Path("/proc/self/ns/pid"))


def identity() -> int:
    """Return a number that processes of one machine, one mount and one process namespace share."""
    boot = BOOT.read_text() if BOOT.exists() else os.uname().nodename
    spaces = [os.readlink(space) if space.is_symlink() else "" for space in _SPACES]
    return int.from_bytes(hashlib.sha256(" ".join([boot, *spaces]).encode()).digest()[:7], "little")


def apart(group: Any) -> str:
    """Say in one line why shared memory cannot reach every rank; "" if it can. Collective."""
    mine = torch.tensor([identity()])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    others = [str(rank) for rank, one in enumerate(found) if int(one) != int(found[0])]
    if not others:
        return ""
    return (
        f"rank {', '.join(others)} of this engine is on another machine or has mounts of its own, so shared memory of "
        "rank 0 does not reach it; push with push.transport=group"
    )

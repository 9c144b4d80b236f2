"""Whether an engine's ranks see the same files: weights in files and in shared memory reach only those that do."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/ns/mnt")


def identity() -> int:
    """Return a number that processes of one machine and one mount namespace share."""
    boot = BOOT.read_text() if BOOT.exists() else os.uname().nodename
    mounts = os.readlink(_MOUNTS) if _MOUNTS.is_symlink() else ""
    return int.from_bytes(hashlib.sha256(f"{boot} {mounts}".encode()).digest()[:7], "little")


def apart(group: Any) -> str:
    """Say in one line why files and shared memory cannot reach every rank; "" if they can. Collective."""
    mine = torch.tensor([identity()])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    others = [str(rank) for rank, one in enumerate(found) if int(one) != int(found[0])]
    if not others:
        return ""
    return (
        f"rank {', '.join(others)} of this engine is on another machine or has mounts of its own, so shared memory and "
        "files of rank 0 do not reach it; push with push.transport=group"
    )

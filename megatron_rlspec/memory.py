"""How this process gets memory from a Linux system."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD = -1  # of malloc.h
_MMAP_MAX = -4
_MOST = 2**31 - 1  # that the function takes


def keep_freed() -> None:
    """Let glibc keep the memory of freed tensors for the next ones; elsewhere do nothing.

    By default glibc maps every tensor above 32 MiB anew and unmaps it when it is freed, and the system fills each page
    with zeros at its first use. With logits over 49,152 words this took most of the time of a loss on a CPU. Up to 2 GiB
    of free memory at the end of the heap stay with the process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _MOST)

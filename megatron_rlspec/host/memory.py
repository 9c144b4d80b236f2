"""How this process gets memory from a Linux system."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD = -1  # of malloc.h
_MMAP_THRESHOLD = -3
LARGEST = 32 * 2**20  # that glibc takes for it
_KEPT = 2**30


def keep_freed() -> None:
    """Let glibc keep the memory of freed tensors below `LARGEST` bytes for the next ones; elsewhere do nothing.

    By default glibc soon gives such memory back, or maps it anew for every tensor, and the system fills each page with
    zeros at its first use. With logits over 49,152 words this took most of the time of a loss on a CPU. Up to 1 GiB of
    free memory at the end of the heap stays with the process. Larger tensors are mapped and unmapped as before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)

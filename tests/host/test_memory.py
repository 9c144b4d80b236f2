from __future__ import annotations

import subprocess
import sys

PAGES = """
import ctypes, resource, sys
from megatron_rlspec.host import memory
if sys.argv[1] == "kept":
    memory.keep_freed()
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    blocks = [malloc(31 * 2**20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 31 * 2**20)
    for block in blocks:
        free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", PAGES, how], check=True, capture_output=True, text=True)
    return int(run.stdout)


def test_freed_memory_is_used_again() -> None:
    assert faults("kept") < faults("as usual") / 5

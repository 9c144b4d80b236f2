"""Hold a CUDA context until standard input ends: python neighbour.py waits|spins cuda|cpu

spins: one kernel of one thread after the other, about 50 ms each, without a gap.
"""

from __future__ import annotations

import sys
import threading

import torch

CYCLES = 100_000_000


def main() -> None:
    kind, device = sys.argv[1:]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    held = torch.ones(1 << 20, device=device)
    print("ready", flush=True)
    if kind == "waits":
        ended.wait()
        return
    before = None
    while not ended.is_set():
        if device == "cpu":
            held.sum()
            continue
        torch.cuda._sleep(CYCLES)
        event = torch.cuda.Event()
        event.record()
        if before is not None:
            before.synchronize()
        before = event


if __name__ == "__main__":
    main()

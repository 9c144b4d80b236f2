"""Print the microseconds of Python that a line of a streamed sample costs, in server and client.

    python benchmarks/streaming_python.py [--tokens 8192,32768]

A line has 64 tokens, of samples that have grown to so many. SGLang's part, which copies all tokens for every line, is
not included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron_rlspec.rollout.sglang.client.engine import _longer
from megatron_rlspec.rollout.sglang.http.progress import Progress

CHUNK = 64
SAMPLES = 3


def of_sample(tokens: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each line, in the server and in the client."""
    ids = list(range(tokens))
    entries: list[tuple[float, int, None]] = [(-1.0, i, None) for i in ids]
    marks = [0, *([1, 1, 0] * (tokens // 3 + 1))][:tokens]
    sent = Progress()
    server, client = [], []
    begun: dict[str, Any] | None = None
    for n in range(CHUNK, tokens + 1, CHUNK):
        so_far = ids[:n], entries[:n], marks[:n]  # as SGLang hands them over
        began = time.perf_counter()
        line = json.dumps({"id": "a", "version": "1"} | (sent.line(*so_far, 1) or {}))
        server.append(time.perf_counter() - began)
        began = time.perf_counter()
        begun = _longer(begun, json.loads(line))
        client.append(time.perf_counter() - began)
    return server, client


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=f"{8 << 10},{32 << 10}", metavar="N,...")
    options = parser.parse_args(argv)
    print("tokens so far    server us/line    client us/line    both, ms a sample")
    for tokens in map(int, options.tokens.split(",")):
        found = [of_sample(tokens) for _ in range(SAMPLES)]
        last = [1e6 * statistics.median(t for sample in found for t in sample[side][-32:]) for side in (0, 1)]
        whole = 1e3 * statistics.median(sum(server) + sum(client) for server, client in found)
        print(f"{tokens:13,}{last[0]:18.0f}{last[1]:18.0f}{whole:21.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Print the microseconds of Python that this package adds to a decode round of SGLang's scheduler, without the model.

    python benchmarks/round_python.py [--requests 256] [--off 704,1024,8192] [--json FILE]

SGLang's own requests, and this package's hooks called as SGLang calls them; hidden states are 8 wide. Every figure is
the median over rounds. The second table is the host's part of a drafter's start after so many rounds off: which rows it
reads, and their copy. A row of a 7B model is 3,584 wide, and its copy takes so much longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from synthetic import conditions

from megatron_rlspec.extensions.migration.sglang import kv_moves
from megatron_rlspec.rollout.sglang.cpu import stand_ins
from megatron_rlspec.rollout.sglang.scheduler import aborts, control, decisions
from megatron_rlspec.rollout.sglang.scheduler.drafter_gap import DrafterGap, Pass
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig

HIDDEN = 8
PROMPT = 512
ROUNDS = 300  # that are timed
STARTS = 3  # of a drafter that are timed
STEPS = SpecConfig(3)


class Gap(DrafterGap):
    """Feeds no drafter."""

    def _samples_drafts(self) -> bool:
        return False

    def _extend(self, batch: Any, read: Pass) -> None:
        pass


class Running:
    """So many running requests of SGLang, and the batch that they are in."""

    def __init__(self, requests: int) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.reqs = [Req(f"{i:032x}", "", [1] * PROMPT, SamplingParams()) for i in range(requests)]
        self.spec_algorithm = SimpleNamespace(is_none=lambda: False)

    def round(self, tokens: int) -> None:
        for request in self.reqs:
            request.output_ids.extend([1] * tokens)

    def batch(self) -> Any:
        lengths = torch.tensor([request.seqlen for request in self.reqs])
        spec = SimpleNamespace(bonus_tokens=torch.zeros(len(self.reqs), dtype=torch.int32))
        return SimpleNamespace(reqs=self.reqs, seq_lens=lengths, seq_lens_cpu=lengths, spec_info=spec)


def microseconds(act: Callable[[], object], before: Callable[[], object] = lambda: None, times: int = ROUNDS) -> float:
    found = []
    for _ in range(times):
        before()
        began = time.perf_counter()
        act()
        found.append(1e6 * (time.perf_counter() - began))
    return statistics.median(found)


def of_every_round(requests: int) -> dict[str, float]:
    """Return microseconds of each hook in a round, by what it does."""
    running = Running(requests)
    reqs = running.reqs
    decider = decisions.decider
    decider.start([0, 1, 2, 3], 3)
    decider.replace({"roofline": Roofline(0.0, token_ms=1 / 32, context_ms=1 / 1000, drafter=0.1).to_json()})
    accepted = [i % 4 for i in range(requests)]
    result = SimpleNamespace(num_correct_drafts_per_req_cpu=accepted)

    def observe(config: SpecConfig) -> None:
        result.rlspec_round = decisions.DecodeRound(config, requests * PROMPT, None)
        control._after_decode(lambda *_: None, None, running, result)

    def mark() -> None:
        for request, count in zip(reqs, accepted, strict=True):
            control._mark_drafts(request, count)

    def end() -> None:
        for request in reqs:
            aborts.end_first(lambda *_: None, request)

    def choose() -> None:
        decider.choose(requests, sum(request.seqlen for request in reqs), lambda n: gap.missed(reqs, n))

    gap = Gap(None)
    record(gap, running, 1)
    return {
        "decision: lengths, rule, requests that leave": microseconds(lambda: (choose(), kv_moves.before_round(reqs))),
        "marks of drafts, drafting": microseconds(mark, lambda: running.round(1)),
        "ends of samples": microseconds(end),
        "observation, drafting": microseconds(lambda: observe(STEPS)),
        "observation, off": microseconds(lambda: observe(OFF)),
    }


def record(gap: Gap, running: Running, rounds: int) -> float:
    """Record so many rounds off. Returns the mean microseconds of one."""
    hidden, tokens = torch.zeros(len(running.reqs), HIDDEN), torch.zeros(len(running.reqs), dtype=torch.int64)
    began = time.perf_counter()
    for _ in range(rounds):
        gap.record(running.reqs, hidden, tokens)
    spent = time.perf_counter() - began
    running.round(rounds)
    return 1e6 * spent / rounds


def after(requests: int, rounds: int) -> dict[str, float]:
    """Return microseconds after so many rounds off: of the next record, a probe of 4 requests, a full catch-up."""
    found: dict[str, list[float]] = {"record of a round": [], "probe of 4": [], "catch-up of the rest": []}
    for _ in range(STARTS):
        running = Running(requests)
        gap = Gap(None)
        record(gap, running, max(1, rounds - 10 * gap.every))
        found["record of a round"].append(record(gap, running, 10 * gap.every))
        gap._stash._thread.submit(int).result()  # rows have arrived in host memory
        batch = running.batch()
        for name, n in (("probe of 4", 4), ("catch-up of the rest", requests)):
            found[name].append(microseconds(partial(gap.close, batch, n), times=1))
    return {name: statistics.median(values) for name, values in found.items()}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--off", default="704,1024,8192", metavar="ROUNDS,...")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    stand_ins.install()
    rounds = [int(n) for n in options.off.split(",")]
    every = of_every_round(options.requests)
    print(f"{options.requests} requests, microseconds a round")
    for name, spent in every.items():
        print(f"  {name:45} {spent:8.0f}")
    off = {n: after(options.requests, n) for n in rounds}
    print(f"rounds off before: {'':27}" + "".join(f"{n:10,}" for n in rounds))
    for name in off[rounds[0]]:
        print(f"  {name:45}" + "".join(f"{off[n][name]:10.0f}" for n in rounds))
    if options.json is not None:
        options.json.write_text(json.dumps({"conditions": conditions(), "every_round": every, "off": off}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Measure what an SGLang engine computes after a push: answers from nothing, and those of one step before redrawn.

    python benchmarks/redraw_sglang.py RUN_DIR [--old] [--groups N] [--turns N]     # a run with --train.record_gib 20

The answers are those of the run's last step, under their seeds. The engine runs on CPU operators with one thread, with
the run's drafter and 3 drafts a round. Both ways take turns, and CPU seconds of the scheduler's process count, so that
other work on the machine matters little. Texts and log-probs are compared, too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from adaptive_sglang import scheduler_of
from history_rollouts import Rerun
from torch import Tensor

from megatron_rlspec.commands.compare import estimate
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import Request, Sampling

SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "49152", "--max-running-requests", "128"]


def seconds(scheduler: psutil.Process) -> float:
    times = scheduler.cpu_times()
    return times.user + times.system


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    p.add_argument("--groups", type=int, default=16, help="of the last step; default: 16")
    p.add_argument("--turns", type=int, default=8, help="of each way; default: 8")
    p.add_argument("--old", action="store_true", help="check what spec.history does: answers of the epoch before")
    options = p.parse_args(argv)
    run = Rerun(options.run_dir, None, 0, 1)
    last = run.trajectory.steps - 1
    older = dict(run.trajectory.policy(last).items())
    newer = dict(run.trajectory.policy(last + 1).items())
    asked = []
    for group in next(run.steps())[: options.groups]:
        for sample in group.samples:
            asked.append(Request(f"r{len(asked):05d}.", group.prompt, sample.seed or 0))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "engine.log"
        arguments = [*SERVE, "--spec", "fixed", "--num-steps", "3"]
        with launch(options.run_dir / "hf", log, arguments=arguments, environment={"OMP_NUM_THREADS": "1"}) as process:
            engine = SGLangEngine.of(process.wait())
            engine.update_weights(1, older.items(), "target")
            if options.old:
                drafts = [run.draft(request.prompt.id, request.seed) for request in asked]
            else:
                drafts = [sample.response for sample in engine.generate(asked, run.sampling)]
            redrawn = [replace(request, draft=draft) for request, draft in zip(asked, drafts, strict=True)]
            show(engine, scheduler_of(process.process.pid), asked, redrawn, run.sampling, newer, options.turns)


def show(
    engine: SGLangEngine,
    scheduler: psutil.Process,
    asked: Sequence[Request],
    redrawn: Sequence[Request],
    how: Sampling,
    newer: Mapping[str, Tensor],
    turns: int,
) -> None:
    took: dict[str, list[float]] = {"from nothing": [], "redrawn": []}
    rounds = dict.fromkeys(took, 0)
    texts = {}
    for turn in range(turns + 1):
        for way, requests in (("from nothing", asked), ("redrawn", redrawn)):
            engine.update_weights(2 + turn, newer.items(), "target")  # drops the cache
            engine.stats()
            began = seconds(scheduler)
            texts[way] = engine.generate(requests, how)
            if turn:  # the first turn warms up
                took[way].append(seconds(scheduler) - began)
            rounds[way] = sum(sum(stats.accepted) for stats in engine.stats())
    same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(texts["from nothing"], texts["redrawn"], strict=True)]
    apart = max(
        float(np.abs(a.behaviour_logprobs - b.behaviour_logprobs).max())
        for a, b, equal in zip(texts["from nothing"], texts["redrawn"], same, strict=True)
        if equal
    )
    tokens = sum(len(sample.response) for sample in texts["redrawn"])
    kept = 0
    for request, sample in zip(redrawn, texts["redrawn"], strict=True):
        both = min(len(request.draft), len(sample.response))
        differ = np.flatnonzero(request.draft[:both] != sample.response[:both])
        kept += int(differ[0]) if len(differ) else both
    print(
        f"{len(asked)} answers, {tokens} tokens, {kept / sum(len(r.draft) for r in redrawn):.1%} of the old ones hold"
    )
    for way, cpu in took.items():
        middle = float(np.median(cpu))
        print(f"  {way:12}: {rounds[way]:5} rounds of samples, {middle:.2f} s of CPU, {tokens / middle:.0f} tokens/s")
    ratio = estimate(np.array([took["from nothing"], took["redrawn"]]).T)
    print(
        f"  redrawn over from nothing, CPU seconds: {ratio.value - 1:.2f} [{ratio.low - 1:.2f}, {ratio.high - 1:.2f}]"
    )
    print(f"  equal texts: {np.mean(same):.1%}; their log-probs differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()

"""Measure what an SGLang engine computes: with the drafter alone, and with what old answers share checked first.

    python benchmarks/history_sglang.py RUN_DIR [--groups N] [--turns N]     # a run with --train.record_gib 20

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
    options = p.parse_args(argv)
    run = Rerun(options.run_dir, None, 0, 1)
    newest = dict(run.trajectory.policy(run.trajectory.steps).items())
    asked = []
    for group in next(run.steps())[: options.groups]:
        for sample in group.samples:
            asked.append(Request(f"r{len(asked):05d}.", group.prompt, sample.seed or 0))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "engine.log"
        arguments = [*SERVE, "--spec", "fixed", "--num-steps", "3"]
        with launch(options.run_dir / "hf", log, arguments=arguments, environment={"OMP_NUM_THREADS": "1"}) as process:
            engine = SGLangEngine.of(process.wait())
            checked = [replace(request, draft=run.draft(request.prompt.id)) for request in asked]
            show(engine, scheduler_of(process.process.pid), asked, checked, run.sampling, newest, options.turns)


def show(
    engine: SGLangEngine,
    scheduler: psutil.Process,
    asked: Sequence[Request],
    checked: Sequence[Request],
    how: Sampling,
    newest: Mapping[str, Tensor],
    turns: int,
) -> None:
    ways = {"drafter": asked, "checked": checked}
    took: dict[str, list[float]] = {way: [] for way in ways}
    rounds = dict.fromkeys(ways, 0)
    texts = {}
    for turn in range(turns + 1):
        for way, requests in ways.items():
            engine.update_weights(1 + turn, newest.items(), "target")  # drops the cache
            engine.stats()
            began = seconds(scheduler)
            texts[way] = engine.generate(requests, how)
            if turn:  # the first turn warms up
                took[way].append(seconds(scheduler) - began)
            rounds[way] = sum(sum(stats.accepted) for stats in engine.stats())
    same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(*texts.values(), strict=True)]
    apart = max(
        float(np.abs(a.behaviour_logprobs - b.behaviour_logprobs).max())
        for a, b, equal in zip(*texts.values(), same, strict=True)
        if equal
    )
    tokens = sum(len(sample.response) for sample in texts["checked"])
    kept = 0
    for request, sample in zip(checked, texts["checked"], strict=True):
        both = min(len(request.draft), len(sample.response))
        differ = np.flatnonzero(request.draft[:both] != sample.response[:both])
        kept += int(differ[0]) if len(differ) else both
    given = sum(len(request.draft) for request in checked)
    print(f"{len(asked)} answers, {tokens} tokens, {kept / max(given, 1):.1%} of the old ones hold")
    for way, cpu in took.items():
        middle = float(np.median(cpu))
        print(f"  {way:8}: {rounds[way]:5} rounds of samples, {middle:.2f} s of CPU, {tokens / middle:.0f} tokens/s")
    ratio = estimate(np.array([took["drafter"], took["checked"]]).T)
    print(f"  checked over the drafter, CPU seconds: {ratio.value - 1:.2f} [{ratio.low - 1:.2f}, {ratio.high - 1:.2f}]")
    print(f"  equal texts: {np.mean(same):.1%}; their log-probs differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()

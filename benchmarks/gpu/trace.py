"""Trace rounds without drafts and with them: how long the GPU works in a round, on what, and for what it waits.

SGLang's profiler records them with torch's. The traces stay in the results' folder, for https://ui.perfetto.dev.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.settings import KEY
from megatron_rlspec.types import OFF, SpecConfig

MARGIN = 32  # tokens beside those of the plan
LONGEST = 6  # kernels and gaps that are named
SECONDS = 40  # within which a trace is written
NAME = 40  # characters of a kernel's name


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    engine = serving.attached(folder)["wide"]
    for name, config in (("off", OFF), (f"k{plan.drafts}", SpecConfig(plan.drafts))):
        engine.set_config(config)
        _trace(plan, figures, engine, name)


def _trace(plan: Plan, figures: Figures, engine: SGLangEngine, name: str) -> None:
    """Trace some rounds after the prefill of a rollout, and write what they took."""
    tokens = plan.tokens + MARGIN
    rounds = min(10, tokens // 16)  # a rollout has more of them, though each may bring some tokens
    traces = figures.out.parent / "traces" / name
    options = {"output_dir": str(traces), "num_steps": rounds, "profile_by_stage": True}
    options["with_stack"] = False  # recording Python's functions keeps the GPU waiting
    options["activities"] = ["CPU", "GPU"] if plan.on_gpu else ["CPU"]
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"}
    requests.post(f"{engine.url}/start_profile", json=options, headers=headers, timeout=60).raise_for_status()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(serving.rollout, engine, serving.asked(plan, plan.round_batch), tokens)
        events = _written(traces)
        running.result()
    times = Times.of(events, "kernel" if plan.on_gpu else "cpu_op", rounds)
    note = f"{plan.round_batch} requests, {rounds} rounds; the tracer makes them longer"
    figures.say(f"{name}: a round, traced", times.span, "ms", note)
    figures.say(f"{name}: the GPU works", times.busy, "ms", _longest(times.kernels))
    figures.say(f"{name}: the GPU waits", times.span - times.busy, "ms", _longest(times.gaps))


def _longest(times: Counter[str]) -> str:
    return "; ".join(f"{ms:.2f} ms {name}" for name, ms in times.most_common(LONGEST))


def _written(folder: Path) -> list[dict[str, Any]]:
    """Wait for the trace of the decoding rounds, and return its events."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for trace in folder.glob("*DECODE*.trace.json.gz"):
            try:
                with gzip.open(trace) as file:
                    return json.load(file)["traceEvents"]
            except (EOFError, ValueError):
                pass  # it is being written
        time.sleep(0.2)
    raise RuntimeError(f"SGLang wrote no trace of decoding rounds to {folder} within {SECONDS} s")


@dataclass
class Times:
    """ms of a round.

    span     from one round to the next
    busy     in which something runs on the GPU
    kernels  by name
    gaps     in which nothing runs, by what ends before and what begins after
    """

    span: float
    busy: float
    kernels: Counter[str]
    gaps: Counter[str]

    @classmethod
    def of(cls, events: list[dict[str, Any]], kind: str, rounds: int) -> Times:
        """Read the events of a category in the trace of so many rounds."""
        ran = sorted(
            (event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event.get("cat") == kind
        )
        ms = 1e-3 / rounds
        busy = 0.0
        kernels: Counter[str] = Counter()
        gaps: Counter[str] = Counter()
        start, end, last = ran[0][0], ran[0][0], ""
        for begin, until, name in ran:
            short = name[:NAME]
            kernels[short] += ms * (until - begin)
            if begin > end:
                gaps[f"{last} | {short}"] += ms * (begin - end)
            busy += ms * max(0.0, until - max(begin, end))
            if until > end:
                end, last = until, short
        return cls(ms * (end - start), busy, kernels, gaps)

"""Profile rounds of an engine that cannot draft, and of one that can: how long the GPU works in a round, and on what.

SGLang's profiler records them with torch's. The traces stay in the results' folder, for https://ui.perfetto.dev.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.settings import KEY
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

MARGIN = 32  # tokens beside those of the plan
LONGEST = 6  # kernels that are named
SECONDS = 60  # within which a trace is written


def profile(plan: Plan, figures: Figures, plain: SGLangEngine, speculating: SGLangEngine) -> None:
    """Profile rounds of an engine without speculation, and of one that can draft. Both have just run such rollouts."""
    _profile(plan, figures, plain, "plain")
    drafts = max(plan.fixed)
    for name, config in (("off", OFF), (f"k{drafts}", SpecConfig(drafts))):
        speculating.set_schedule(SpecSchedule.fixed(config))
        _profile(plan, figures, speculating, name)


def _profile(plan: Plan, figures: Figures, engine: SGLangEngine, name: str) -> None:
    """Profile some rounds after the prefill of a rollout, and write what they took."""
    tokens = plan.tokens + MARGIN
    rounds = min(10, tokens // 16)  # a rollout has more of them, though each may bring some tokens
    with figures.attempt(name):
        traces = figures.out.parent / "traces" / name
        asked = {"output_dir": str(traces), "num_steps": rounds, "profile_by_stage": True}
        asked["with_stack"] = False  # recording Python's functions keeps the GPU waiting
        asked["activities"] = ["CPU", "GPU"] if plan.on_gpu else ["CPU"]
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"}
        requests.post(f"{engine.url}/start_profile", json=asked, headers=headers, timeout=60).raise_for_status()
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(serving.rollout, plan, engine, serving.asked(plan, plan.shared_batch), tokens)
            events = _written(traces)
            busy, span, longest = _times(events, "kernel" if plan.on_gpu else "cpu_op", rounds)
            running.result()
        note = f"{plan.shared_batch} requests; " + "; ".join(f"{ms:.2f} ms {kernel[:60]}" for kernel, ms in longest)
        figures.say(f"{name}: a round, profiled", span, "ms", f"of {rounds}; the profiler makes them longer")
        figures.say(f"{name}: the GPU works in a round", busy, "ms", note)


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


def _times(events: list[dict[str, Any]], kind: str, rounds: int) -> tuple[float, float, list[tuple[str, float]]]:
    """Return ms of a round in which something of this kind ran, ms of a round, and the longest ones by name."""
    ran = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event.get("cat") == kind
    )
    busy = 0.0
    end = ran[0][0]
    times: Counter[str] = Counter()
    for begin, until, name in ran:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
        times[name] += until - begin
    ms = 1e-3 / rounds
    return ms * busy, ms * (end - ran[0][0]), [(name, ms * time) for name, time in times.most_common(LONGEST)]

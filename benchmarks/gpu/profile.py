"""Measure rounds of the engine over requests, contexts and drafts. Their costs stay beside the figures.

What was expected: round times that one H100 showed at 64 tokens of context, and the time of reading the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from round_costs import Measured, Point, measure

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan

COSTS = "round_costs.json"
LONG_SECONDS = 12
# ms of a round on an H100 with 36 layers, contexts of at most 264 tokens: requests -> off, 1, 2, 3 drafts
SHORT = {1: (6.6, 7.3, 8.0, 8.7), 64: (7.7, 9.1, 10.7, 12.5), 256: (11.5, 17.7, 24.9, 32.3)}
KV_BYTES = 147_456  # of a token, in 36 layers
BANDWIDTH = 2.7e12  # bytes per second that attention reads, an estimate for an H100


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    path = figures.out.parent / COSTS
    engine = serving.attached(folder)["wide"]
    measured = measure(engine, plan.steps, plan.batches, plan.contexts, plan.profile_seconds)
    _keep(figures, measured, measured.points, path)
    with figures.attempt("one long context"):
        requests, context = plan.long
        long = measure(engine, plan.steps, [requests], [context], LONG_SECONDS)
        measured.points += long.points
        measured.prefill += long.prefill
        _keep(figures, measured, long.points, path)


def _keep(figures: Figures, measured: Measured, points: Sequence[Point], path: Path) -> None:
    """Write all that was measured, and ms of a round at each new point beside what was expected there."""
    measured.save(path, engine="sglang", model="random weights of MiMo-7B's shape")
    for point in points:
        context = point.context // point.requests
        what = f"a round, {point.config}, {point.requests} requests of {context:,}"
        figures.say(what, point.ms, "ms", f"half the interquartile range {point.spread:.2f}", _expected(point))


def _expected(point: Point) -> Sequence[Any]:
    """Return the estimate of a point; empty where no short context was measured."""
    steps = point.config.num_steps
    if point.requests not in SHORT or steps >= len(SHORT[point.requests]):
        return ()
    ms = SHORT[point.requests][steps] + 1e3 * point.context * KV_BYTES / BANDWIDTH
    return (round(ms, 1), round(ms, 1), "an H100 at 64 tokens of context, and its KV cache at 2.7 TB/s")

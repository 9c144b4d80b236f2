"""Profile the engine over requests, contexts and drafts. The cost table stays beside the figures.

What was expected: round times that one H100 showed at 64 tokens of context, and the time of reading the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.commands import profile
from megatron_rlspec.speculation.cost_table import CostTable, RoundCost

TABLE = "cost_table.json"
LONG_SECONDS = 12
# ms of a round on an H100 with 36 layers, contexts of at most 264 tokens: requests -> off, 1, 2, 3 drafts
SHORT = {1: (6.6, 7.3, 8.0, 8.7), 64: (7.7, 9.1, 10.7, 12.5), 256: (11.5, 17.7, 24.9, 32.3)}
KV_BYTES = 147_456  # of a token, in 36 layers
BANDWIDTH = 2.7e12  # bytes per second that attention reads, an estimate for an H100


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    path = figures.out.parent / TABLE
    _measure(plan, folder, path, plan.batches, plan.contexts, plan.profile_seconds)
    _say(plan, figures, CostTable.load(path))
    with figures.attempt("one long context"):
        requests, context = plan.long
        long = folder / "long.json"
        _measure(plan, folder, long, [requests], [context], LONG_SECONDS)
        table = CostTable.load(long)
        _say(plan, figures, table)
        _add(path, table)


def _measure(
    plan: Plan, folder: Path, path: Path, batches: Sequence[int], contexts: Sequence[int], seconds: int
) -> None:
    engine = serving.attached(folder)["wide"]
    command = [str(path), "--url", engine.url, "--model", str(folder / "wide"), "--seconds", str(seconds)]
    drafts = [steps for steps in plan.steps if steps]  # rounds that do not draft are always measured
    command += ["--batches", _listed(batches), "--lengths", _listed(contexts), "--steps", _listed(drafts)]
    if profile.main(command):
        raise RuntimeError("rlspec profile failed; the log says why")


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _say(plan: Plan, figures: Figures, table: CostTable) -> None:
    """Write ms of a round at each measured point, beside what was expected there."""
    for row in table.rounds:
        context = row.context_tokens // row.batch
        what = f"a round, {row.config}, {row.batch} requests of {context:,}"
        figures.say(what, row.ms, "ms", f"half the interquartile range {row.spread_ms:.2f}", _expected(row))


def _expected(row: RoundCost) -> Sequence[Any]:
    """Return the estimate of a row; empty where no short context was measured."""
    steps = row.config.num_steps
    if row.batch not in SHORT or steps >= len(SHORT[row.batch]):
        return ()
    ms = SHORT[row.batch][steps] + 1e3 * row.context_tokens * KV_BYTES / BANDWIDTH
    return (round(ms, 1), round(ms, 1), "an H100 at 64 tokens of context, and its KV cache at 2.7 TB/s")


def _add(path: Path, long: CostTable) -> None:
    """Add the rows of another table of the same engine."""
    table = CostTable.load(path)
    rounds = (*table.rounds, *long.rounds)
    prefill = (*table.prefill, *long.prefill)
    CostTable(table.provenance, rounds, prefill, table.switch_ms, table.catch_up_ms).save(path)

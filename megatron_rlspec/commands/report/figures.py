"""Which charts a report has: from the records of a run, or of several runs, to drawings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import megatron_rlspec.commands.report.charts as charts
from megatron_rlspec.commands.report.charts import DRAWN_MOST, Drawing, Mark, Points, Series
from megatron_rlspec.commands.report.records import EventRow, Run

Records = Sequence[Mapping[str, Any]]
PARTS = ("generate", "train", "push", "record")
QUARTERS = {"1": "shortest quarter", "2": "second", "3": "third", "4": "longest quarter"}
# Title, unit, key -> label: charts of lines.
LINES: list[tuple[str, str, dict[str, str]]] = [
    ("Loss of the policy", "", {"policy/loss": "loss"}),
    ("Entropy", "nats/token", {"policy/entropy": "entropy"}),
    (
        "Distance from the start",
        "",
        {"drift/kl": "KL, nats/token", "drift/changed": "share of changed tokens"},
    ),
    (
        "Engine beside trainer",
        "nats/token",
        {"policy/train_rollout_logprob_abs_diff": "|log-prob difference|"},
    ),
    ("Age of the trained tokens", "steps", {"policy/staleness": "age of the weights"}),
    ("Gradient norms", "", {"policy/grad_norm": "policy", "drafter/grad_norm": "drafter"}),
    ("Drafter's objective", "", {"drafter/objective": "sum over depths"}),
    ("Failed rewards", "samples", {"rollout/failed_rewards": "failed"}),
    ("Restarted engines", "", {"engine/restarts": "restarts"}),
    (
        "Response length",
        "tokens",
        {f"rollout/{name}_response": name for name in ("median", "p90", "longest")},
    ),
    ("Truncated responses", "share", {"rollout/truncated": "truncated"}),
    ("Rollout speed", "tokens/s", {"rollout/tokens_per_second": "tokens/s"}),
    ("Time of a decode round", "ms", {"spec/ms_per_round": "mean"}),
    ("Samples that go on in the next step", "", {"rollout/over_drawn": "samples"}),
    ("Tokens of samples that were continued", "", {"rollout/continued_tokens": "tokens"}),
]
UNLESS_ZERO = {
    "rollout/over_drawn",
    "rollout/continued_tokens",
    "rollout/failed_rewards",
    "engine/restarts",
}
# Title, unit, key: one line a run, where several runs are compared.
COMPARED = [
    ("Reward", "", "rollout/reward"),
    ("Accept length", "tokens/round", "rollout/accept_length"),
    ("Accept length when drafting", "tokens/round", "spec/accept_length"),
    ("Drafter agreement at depth 1", "share", "drafter/match_1"),
    ("Drafter loss at depth 1", "", "drafter/loss_1"),
    ("Rollout speed", "tokens/s", "rollout/tokens_per_second"),
    ("Response length", "tokens", "rollout/response_length"),
    ("Waiting for samples", "s", "seconds_generate"),
    ("Training", "s", "seconds_train"),
    ("Entropy", "nats/token", "policy/entropy"),
    ("Distance from the start", "nats/token", "drift/kl"),
    ("Loss of the policy", "", "policy/loss"),
]


def of_run(run: Run) -> list[Drawing]:
    """Return every chart for which the run has a value, the most asked for first."""
    records = run.steps
    keys = {key for record in records for key in record}
    found = [
        _lines(
            "Reward",
            "",
            records,
            {"rollout/reward": "training"},
            marks=evaluations(records, run.events, "reward"),
        ),
        _lines(
            "Reward by length",
            "",
            records,
            {f"rollout/reward_quarter_{q}": QUARTERS[q] for q in QUARTERS},
        ),
        _lines(
            "Accept length",
            "tokens/round",
            records,
            {"rollout/accept_length": "all rounds", "spec/accept_length": "rounds that drafted"},
            marks=evaluations(records, run.events, "accept_length"),
        ),
        _accept_by_depth(records),
        _configurations(records, keys),
        _seconds(records),
        _by_depth("Drafter loss by depth", "", records, "drafter/loss_"),
        _by_depth("Drafter agreement by depth", "share", records, "drafter/match_"),
    ]
    for title, unit, wanted in LINES:
        found.append(_lines(title, unit, records, wanted))
    return [drawing for drawing in found if drawing is not None]


def of_runs(runs: Sequence[Run]) -> list[Drawing]:
    """Return charts with one line a run."""
    found = []
    for title, unit, key in COMPARED:
        series = []
        for i, run in enumerate(runs):
            if points := points_of(run.steps, key):
                series.append(Series(run.name, points, key, i))
        if series:
            found.append(charts.lines(title, series, unit=unit))
    return found


def points_of(records: Records, key: str) -> Points:
    """Return (step from 1, value) where a record has a number for the key that can be drawn."""
    found = []
    for record in records:
        value = number(record.get(key))
        if not math.isnan(value):
            found.append((record["step"] + 1.0, value))
    return found


def number(value: object) -> float:
    """Return a record's value as a number to draw; NaN for text and for values beyond `DRAWN_MOST`."""
    if not isinstance(value, int | float) or not abs(value) <= DRAWN_MOST:
        return math.nan
    return float(value)


def evaluations(records: Records, events: Sequence[EventRow], field: str) -> list[Mark]:
    """Return the evaluations on held-out prompts; a reward's 95 % interval takes its samples for independent.

    Of evaluations after as many steps, which a resumed run can repeat, the newest counts.
    """
    last = records[-1]["step"] + 1.0 if records else 1.0
    found: dict[tuple[str, float], Mark] = {}
    for event in events:
        values = event.model_extra or {}
        value = number(values.get(field))
        name = str(values.get("name", ""))
        if event.kind != "evaluation" or math.isnan(value):
            continue
        at = re.fullmatch(r"step-(\d{1,12})", name)
        x = number(values.get("step"))  # older events have it in their name only
        if math.isnan(x):
            x = float(at[1]) if at else {"first": 0.0, "last": last}.get(name, math.nan)
        if math.isnan(x):
            continue
        error = 0.0
        if (
            field == "reward"
            and number(values.get("samples")) > 0
            and number(values.get("reward_std")) >= 0
        ):
            error = 1.96 * values["reward_std"] / math.sqrt(values["samples"])
        found[str(values.get("set", "")), x] = Mark(x, value, value - error, value + error)
    return list(found.values())


def _lines(
    title: str, unit: str, records: Records, wanted: Mapping[str, str], marks: Sequence[Mark] = ()
) -> Drawing | None:
    """Draw the keys that have values; None if none has."""
    series: list[Series] = []
    for key, label in wanted.items():
        points = points_of(records, key)
        if points and (key not in UNLESS_ZERO or any(value for _, value in points)):
            series.append(Series(label, points, key, len(series)))
    note = "Diamonds: held-out prompts." if marks else ""
    return charts.lines(title, series, note=note, unit=unit, marks=marks) if series else None


def _depths(records: Records, prefix: str) -> list[str]:
    """Return the keys of a family, by depth."""
    found = {
        int(k.removeprefix(prefix)): k
        for r in records
        for k in r
        if re.fullmatch(prefix + r"\d{1,3}", k)
    }
    return [found[depth] for depth in sorted(found)]


def _by_depth(title: str, unit: str, records: Records, prefix: str) -> Drawing | None:
    return _lines(
        title,
        unit,
        records,
        {key: f"depth {key.removeprefix(prefix)}" for key in _depths(records, prefix)},
    )


def _accept_by_depth(records: Records) -> Drawing | None:
    """Draw tokens a round of chains of each depth: seen, and predicted for that step by the step before."""
    series = []
    for depth, key in enumerate(_depths(records, "spec/accept_")):
        label = f"{depth + 1} draft{'s' if depth else ''}"
        if seen := _chain(records, "spec/accept_", depth + 1):
            series.append(Series(label, seen, key, depth))
        later = {left["step"]: right["step"] for left, right in pairwise(records)}
        ahead = points_of(records, f"predict/next_tokens_k{depth + 1}")
        if expected := [(later[x - 1] + 1.0, y) for x, y in ahead if x - 1 in later]:
            series.append(
                Series(f"{label}, predicted", expected, "", depth, dashed=True, listed=False)
            )
    note = "Tokens a round of n drafts would yield, from the acceptance at each depth. Dashed: predicted a step ahead."
    return (
        charts.lines("Accept length by depth", series, note=note, unit="tokens/round")
        if series
        else None
    )


def _chain(records: Records, prefix: str, depth: int) -> Points:
    """Return 1 + a1 + a1 a2 + ... over steps, from the rates `prefix`1 to `prefix`depth."""
    found = []
    for record in records:
        rates = [number(record.get(f"{prefix}{d}")) for d in range(1, depth + 1)]
        length = reach = 1.0
        for rate in rates:
            reach *= rate
            length += reach
        if not math.isnan(length):
            found.append((record["step"] + 1.0, length))
    return found


def _configurations(records: Records, keys: set[str]) -> Drawing | None:
    shares = sorted(
        (key for key in keys if key.startswith("spec/share_")), key=lambda key: (len(key), key)
    )
    series: list[Series] = []
    for key in shares:
        name = key.removeprefix("spec/share_")
        if any(share > 0 for _, share in points_of(records, key)):
            series.append(
                Series(name, points_of(records, key), key, -1 if name == "off" else len(series))
            )
    note = "Share of a step's decode rounds under each configuration: k3 drafts three tokens, off drafts none."
    return (
        charts.bars("Which configuration ran when", series, note=note, unit="share")
        if series
        else None
    )


def _seconds(records: Records) -> Drawing | None:
    """Draw the seconds of a step's parts."""
    series = []
    for i, part in enumerate(PARTS):
        if points := points_of(records, f"seconds_{part}"):
            series.append(Series(part, points, f"seconds_{part}", i))
    return charts.bars("Where a step's time goes", series, unit="s") if series else None

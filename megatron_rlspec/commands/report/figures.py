"""Which charts a report has (`CHARTS`), and their values from the records of a run. `charts.py` draws them.

To add a chart, add it to `CHARTS`. Its keys must be those of `records/metric_names.toml`. A chart in which no series
`varies` is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rlspec.commands.report.charts import (
    GREY,
    DrawnChart,
    Mark,
    Points,
    Series,
    bars,
    lines,
)
from megatron_rlspec.commands.report.records import Run

Records = Sequence[Mapping[str, Any]]
MOST = 1e30  # larger values are not drawn


class Chart(NamedTuple):
    """A chart of a run.

    keys        key of the records -> label. `prefix_<x>` stands for every key with that prefix; `{}` in its label is x
    evaluation  field of evaluation events, whose values are drawn as diamonds; not with `stacked`
    stacked     drawn as stacked bars; otherwise as lines
    """

    title: str
    unit: str
    keys: Mapping[str, str]
    note: str = ""
    evaluation: str = ""
    stacked: bool = False


CHARTS = (
    Chart("Reward", "", {"rollout/reward": "training"}, evaluation="reward"),
    Chart(
        "Accept length",
        "tokens/round",
        {"rollout/accept_length": "accept length"},
        evaluation="accept_length",
    ),
    Chart(
        "Distance from the start",
        "",
        {"drift/kl": "KL, nats/token", "drift/changed": "share of changed tokens"},
        note="A frozen drafter is enough while few tokens change; from about 9 % on it falls behind.",
    ),
    Chart(
        "Which configuration ran when",
        "share",
        {"spec/share_<config>": "{}"},
        note="Share of a step's decode rounds under each configuration: k3 drafts three tokens, off drafts none.",
        stacked=True,
    ),
    Chart(
        "Where a step's time goes",
        "s",
        {
            "seconds_generate": "generate",
            "seconds_train": "train",
            "seconds_push": "push",
            "seconds_record": "record",
        },
        stacked=True,
    ),
    Chart("Acceptance by depth", "share", {"spec/accept_<d>": "depth {}"}),
    Chart(
        "Drafts of a request and round",
        "drafts",
        {"spec/verified_drafts": "verified", "spec/accepted_drafts": "accepted"},
    ),
    Chart(
        "Predicted tokens a round",
        "tokens/round",
        {"predict/observed_tokens": "observed", "predict/predicted_tokens": "predicted"},
    ),
    Chart("Drafter loss by depth", "", {"drafter/loss_<d>": "depth {}"}),
    Chart("Drafter agreement by depth", "share", {"drafter/match_<d>": "depth {}"}),
    Chart("Loss of the policy", "", {"policy/loss": "loss"}),
    Chart("Clipped tokens", "share", {"policy/pg_clipfrac": "ratio outside of the clip range"}),
    Chart("Entropy", "nats/token", {"policy/entropy": "entropy"}),
    Chart(
        "Engine beside trainer",
        "nats/token",
        {"policy/train_rollout_logprob_abs_diff": "|log-prob difference|"},
    ),
    Chart("Gradient norms", "", {"policy/grad_norm": "policy", "drafter/grad_norm": "drafter"}),
    Chart(
        "Groups without an advantage",
        "share",
        {"rollout/groups_without_advantage": "the policy learns nothing from them"},
    ),
    Chart(
        "Response length",
        "tokens",
        {
            "rollout/median_response": "median",
            "rollout/p90_response": "p90",
            "rollout/longest_response": "longest",
        },
    ),
    Chart("Truncated responses", "share", {"rollout/truncated": "truncated"}),
    Chart("Rollout speed", "tokens/s", {"rollout/tokens_per_second": "tokens/s"}),
)


def of_run(run: Run) -> list[DrawnChart]:
    """Return every chart of the run in which a series `varies`, drawn, in the order of `CHARTS`."""
    drawings = []
    for chart in CHARTS:
        series = _series(run.steps, chart.keys)
        if not varies(series):
            continue
        marks = evaluations(run.events, chart.evaluation) if chart.evaluation else []
        svg = bars(series) if chart.stacked else lines(series, marks)
        note = "Diamonds: held-out prompts." if marks else chart.note
        drawings.append(DrawnChart(chart.title, note, chart.unit, series, svg))
    return drawings


def varies(series: Sequence[Series]) -> bool:
    """Return whether the values of a series differ, or a series has one point only; False without any series."""
    for line in series:
        values = {value for _, value in line.points}
        if len(values) > 1 or len(line.points) == 1:
            return True
    return False


def points_of(records: Records, key: str) -> Points:
    """Return (step from 1, value) where a record has a number for the key that can be drawn."""
    points = []
    for record in records:
        value = number(record.get(key))
        if not math.isnan(value):
            points.append((record["step"] + 1.0, value))
    return points


def number(value: object) -> float:
    """Return a record's value as a number to draw; NaN for text, null, and values beyond `MOST`."""
    if isinstance(value, int | float) and abs(value) <= MOST:
        return float(value)
    return math.nan


def evaluations(events: Records, field: str) -> list[Mark]:
    """Return the evaluations of all sets of held-out prompts that have the field, in the order of the events.

    A reward has a 95 % interval, which takes its samples for independent; other values have none. A resumed run can
    repeat the evaluation of a set at a step: the newest one counts.
    """
    marks: dict[tuple[str, float], Mark] = {}
    for event in events:
        if event["kind"] != "evaluation" or field not in event:
            continue
        value = event[field]
        error = 0.0
        if field == "reward":
            error = 1.96 * event["reward_std"] / math.sqrt(event["samples"])
        # An event's step is the number of steps done, as is the step of `points_of`, which adds 1 to a record's.
        mark = Mark(event["step"], value, value - error, value + error)
        marks[event.get("set", ""), mark.x] = mark
    return list(marks.values())


def _series(records: Records, keys: Mapping[str, str]) -> list[Series]:
    """Return a series for each of the keys that has values. Colours repeat after ten; "off" is grey."""
    series: list[Series] = []
    for pattern, label in keys.items():
        for key, name in _expand(records, pattern, label):
            points = points_of(records, key)
            if points:
                colour = GREY if name == "off" else f"C{len(series)}"
                series.append(Series(name, points, key, colour))
    return series


def _expand(records: Records, pattern: str, label: str) -> list[tuple[str, str]]:
    """Return (key, label) of the keys in the records that a pattern `prefix_<x>` stands for, short ones first."""
    prefix, family, _ = pattern.partition("<")
    if not family:
        return [(pattern, label)]
    names = set()
    for record in records:
        for key in record:
            match = re.fullmatch(re.escape(prefix) + r"(\w+)", key)
            if match:
                names.add(match[1])
    ordered = sorted(names, key=lambda name: (len(name), name))
    return [(prefix + name, label.format(name)) for name in ordered]

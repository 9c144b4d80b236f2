"""`rlspec report RUN_DIR [RUN_DIR ...]`: one self-contained HTML page of a run, or of several runs side by side."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rlspec import arguments, files
from megatron_rlspec.commands.report import charts, figures
from megatron_rlspec.commands.report.charts import short
from megatron_rlspec.commands.report.records import (
    ComparisonTable,
    Run,
    SampleRow,
    options_of,
    read_run,
)
from megatron_rlspec.records import metric_names
from megatron_rlspec.speculation.acceptance import accept_length

HERE = Path(__file__).parent
SAMPLES_SHOWN = 40
MOVES_SHOWN = 40
SUMMED = (
    "rollout/reward",
    "rollout/accept_length",
    "rollout/tokens_per_second",
    "rollout/response_length",
)
LAST_SHARE, LAST_LEAST = 0.1, 5  # of the steps, over which the summary takes its means


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec report",
        description=__doc__.partition(": ")[2],
        example="rlspec report runs/mine",
    )
    p.add_argument(
        "run_dir", type=Path, nargs="+", metavar="RUN_DIR", help="train.run_dir of a run"
    )
    p.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: report.html in RUN_DIR; of several: runs.html",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Write the page and print its path. Raises RecordError and FileError."""
    own = parser()
    options = own.parse_args(argv)
    out = options.out or options.run_dir[0] / (
        "report.html" if len(options.run_dir) == 1 else "runs.html"
    )
    runs = [read_run(directory) for directory in options.run_dir]
    for directory, run in zip(options.run_dir, runs, strict=True):
        if not run.steps:
            own.error(
                f"{directory}: no metrics.jsonl with at least one step; expected a run directory of `rlspec train`"
            )
    reads = {f"the run {directory}": directory for directory in options.run_dir}
    # an older page is replaced
    files.check_outputs({"--out": out}, {} if out.resolve().suffix == ".html" else reads)
    page = render(distinct(runs, options.run_dir))
    # half a surrogate pair in a text becomes "?"
    files.write_output(out, page.encode("utf-8", "replace"))
    print(out)
    return 0


def distinct(runs: Sequence[Run], directories: Sequence[Path]) -> list[Run]:
    """Name each run by the last two parts of its path, or by its path where those are equal."""
    short_names = ["/".join(directory.resolve().parts[-2:]) for directory in directories]
    names = (
        short_names
        if len(set(short_names)) == len(runs)
        else [str(directory) for directory in directories]
    )
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def render(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of several side by side."""
    import jinja2

    script = (HERE / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = short
    template = environment.from_string((HERE / "page.html.j2").read_text())
    one = runs[0] if len(runs) == 1 else None
    drawings = figures.of_run(one) if one else figures.of_runs(runs)
    return template.render(
        title=" and ".join(run.name for run in runs),
        style=(HERE / "page.css").read_text(),
        script=script,
        digest=digest,
        runs=[_about(run) for run in runs],
        one=one,
        drawings=drawings,
        moves=[(row.step + 1, move) for row in one.rollouts for move in row.moves][-MOVES_SHOWN:]
        if one
        else [],
        sizes=[(row.step + 1, change) for row in one.rollouts for change in row.sizes][
            -MOVES_SHOWN:
        ]
        if one
        else [],
        unusual=_unusual(one) if one else [],
        unlike=[] if one else _unlike_engines(runs),
        compared=_compared_drafters(one.comparison) if one and one.comparison else [],
        samples=_samples(one.samples) if one else [],
        options=one.changed_options() if one else _differing_options(runs),
        config=json.dumps(one.config, indent=1) if one and one.config else "",
        glossary=_glossary(drawings),
        hint=_hint,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def _about(run: Run) -> dict[str, Any]:
    """Return what the head of the page says about a run."""
    facts: dict[str, str] = {}
    times = [
        float(record["time"]) for record in run.steps if isinstance(record.get("time"), int | float)
    ]
    if run.starts:
        newest = run.starts[-1]
        facts["command"] = newest.command
        facts["versions"] = ", ".join(
            f"{name} {version}" for name, version in newest.versions.items()
        )
        facts["ranks"] = str(newest.ranks)
        times.insert(0, run.starts[0].time)
        if len(run.starts) > 1:
            facts["resumed"] = "at step " + ", ".join(
                str(start.step + 1) for start in run.starts[1:]
            )
    if len(times) > 1 and all(0 <= moment < 1e11 for moment in (times[0], times[-1])):
        begin, end = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
            for moment in (times[0], times[-1])
        )
        facts["date"] = f"{begin} to {end} ({duration(times[-1] - times[0])})"
    options = options_of(run.config)
    wanted = options.get("train.steps", "")
    trains = any(key.startswith("rollout/") for key in run.steps[-1])
    facts["steps"] = f"{len(run.steps)} of {wanted}" if trains and wanted else f"{len(run.steps)}"
    if "model.path" in options:
        facts["model"] = options["model.path"]
    tiles = [(key, *_mean_of_last(run, key)) for key in SUMMED]
    held_out = [mark.value for mark in figures.evaluations(run.steps, run.events, "reward")]
    return {
        "name": run.name,
        "facts": facts,
        "tiles": [tile for tile in tiles if not math.isnan(tile[1])],
        "held_out": (held_out[0], held_out[-1]) if len(held_out) > 1 else None,
    }


def duration(seconds: float) -> str:
    """Return seconds as text, in the two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )


def _mean_of_last(run: Run, key: str) -> tuple[float, float, int]:
    """Return the mean over the last steps that have the key, half its 95 % interval, and how many steps those are."""
    points = figures.points_of(run.steps, key)
    last = [y for _, y in points[-max(LAST_LEAST, round(LAST_SHARE * len(points))) :]]
    return (*charts.interval(last), len(last)) if last else (math.nan, math.nan, 0)


def _unusual(run: Run) -> list[tuple[str, float, metric_names.Metric]]:
    """Return (key, mean of the last steps, entry) of every metric that is outside its normal values."""
    keys = sorted({key for record in run.steps for key in record})
    found = []
    for key in keys:
        metric = metric_names.find(key)
        mean, _, _ = _mean_of_last(run, key)
        if metric and not math.isnan(mean) and metric.is_normal(mean) is False:
            found.append((key, mean, metric))
    return found


def _unlike_engines(runs: Sequence[Run]) -> list[str]:
    """Return the options that make tokens/s and accept lengths of these runs incomparable, where they differ."""
    decisive = ("rollout.engine", "rollout.engines", "spec.mode", "spec.num_steps", "model.path")
    return [name for name, *_ in _differing_options(runs) if name in decisive]


def _samples(rows: Sequence[SampleRow]) -> list[dict[str, Any]]:
    """Return the template's values of the newest samples. `accepted[i]` counts the rounds that accepted i drafts."""
    found = []
    for row in reversed(rows[-SAMPLES_SHOWN:]):
        values = row.model_dump()
        values["pieces"] = [(row.response, False)] if row.pieces is None else row.pieces
        values["reward"] = math.nan if row.reward is None else row.reward
        values["accept_length"] = (
            f"{accept_length(row.accepted):.2f}" if any(row.accepted) else "plain"
        )
        found.append(values)
    return found


def _compared_drafters(table: ComparisonTable) -> list[list[str]]:
    """Return rows of a table that `rlspec compare --out` wrote: drafts, what, value and interval, what it shows.

    Of the differences only those to the first drafter, by which a reader judges the others.
    """
    first = table.accept_lengths[0].drafter if table.accept_lengths else ""
    rows = []
    for row in (*table.accept_lengths, *(row for row in table.differences if row.drafter == first)):
        what = f"{row.drafter} - {row.minus}" if row.minus else row.drafter
        rows.append(
            [str(row.steps), what, f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}]", row.shown]
        )
    return rows


def _differing_options(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return (option, its value in each run) of every option that is not the same in all."""
    known = [options_of(run.config) for run in runs]
    names = sorted(set().union(*known))
    return [
        (name, *(k.get(name, "") for k in known))
        for name in names
        if len({k.get(name) for k in known}) > 1
    ]


def _glossary(drawings: Sequence[charts.Drawing]) -> Mapping[str, metric_names.Metric]:
    """Return the entries of all keys that are drawn, by the keys of their families."""
    found: dict[str, metric_names.Metric] = {}
    for one in (one for drawing in drawings for one in drawing.series):
        if metric := metric_names.find(one.key):
            found.setdefault(metric.key, metric)
    return found


def _hint(key: str) -> str:
    """Return what a pointer shows beside a key."""
    metric = metric_names.find(key)
    if metric is None:
        return ""
    unit = f" [{metric.unit}]" if metric.unit else ""
    return f"{key}{unit}: {metric.meaning}. Normal: {metric.normal}."

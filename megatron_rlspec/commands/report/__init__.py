"""`rlspec report RUN_DIR`: one self-contained HTML page of a run."""

# What follows ": " in the docstring is also the description in `--help` (`parser`), so it stays one line.
# `records.py` reads the run directory, `figures.py` chooses the charts, `charts.py` draws them, and this file computes
# the page's other values. `page.html.j2` shows them: it escapes all texts but the SVG, the style and the script.

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_rlspec import arguments, files
from megatron_rlspec.commands.report import charts, figures
from megatron_rlspec.commands.report.charts import DrawnChart
from megatron_rlspec.commands.report.records import Record, Run, options_of, read_run
from megatron_rlspec.records import metric_names
from megatron_rlspec.records.live import duration, saving
from megatron_rlspec.records.metric_names import Metric
from megatron_rlspec.speculation.acceptance import accept_length

HERE = Path(__file__).parent
SAMPLES_SHOWN = 40  # the newest ones
# key of the records -> label, in the order of the page
TILES = {
    "rollout/reward": "reward",
    "rollout/accept_length": "accept length",
    "rollout/tokens_per_second": "tokens/s",
    "rollout/response_length": "response length",
}
LAST_SHARE = 0.1  # of the steps, over which the tiles take their means
LAST_LEAST = 5  # least number of these steps


class Tile(NamedTuple):
    """The mean of a metric over the last `steps` steps that have it. `label` is "" where the page shows the key."""

    key: str
    label: str
    mean: float
    steps: int


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec report",
        description=__doc__.partition(": ")[2],
        example="rlspec report runs/mine",
    )
    add = p.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="train.run_dir of a run")
    add("--out", type=Path, metavar="FILE", help="default: report.html in RUN_DIR")
    return p


def main(argv: list[str] | None = None) -> int:
    """Write the page and print its path. Raises FileError."""
    command = parser()
    options = command.parse_args(argv)
    directory = options.run_dir
    out = options.out or directory / "report.html"
    run = read_run(directory)
    if not run.steps:
        command.error(
            f"{directory}: no metrics.jsonl with at least one step; "
            "expected a run directory of `rlspec train`"
        )
    # An older page in the run directory is replaced; a file of another kind there, such as config.json, is not.
    inputs = {} if out.suffix == ".html" else {f"the run {directory}": directory}
    files.check_output(out, inputs)
    page = render(run)
    # A text may hold half a surrogate pair, which becomes "?".
    files.write_output(out, page.encode("utf-8", "replace"))
    print(out)
    return 0


def render(run: Run) -> str:
    """Return the page of a run that has at least one step. The names of the values are those in page.html.j2."""
    import jinja2

    script = (HERE / "page.js").read_text()
    # The page's policy allows the browser to run this script only.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = charts.short
    template = environment.from_string((HERE / "page.html.j2").read_text())
    drawings = figures.of_run(run)
    held_out = [mark.value for mark in figures.evaluations(run.events, "reward")]
    tiles = [_tile(run, key, label) for key, label in TILES.items()]
    return template.render(
        run=run,
        facts=_facts(run),
        tiles=filter(None, tiles),
        saving=saving(run.steps),
        held_out=(held_out[0], held_out[-1]) if len(held_out) > 1 else None,
        style=(HERE / "page.css").read_text(),
        script=script,
        digest=digest,
        drawings=drawings,
        glossary=_glossary(drawings),
        made=time.strftime("%Y-%m-%d %H:%M"),
        unusual=_unusual(run),
        samples=_samples(run.samples),
        options=run.changed_options(),
        config=json.dumps(run.config, indent=1) if run.config else "",
    )


def _facts(run: Run) -> dict[str, str]:
    """Return how a run was made: command, versions, ranks, date, steps and model; without those that are not recorded.

    Of a resumed run, command, versions and ranks are those of the newest start, and the date begins with the first.
    """
    facts = {}
    times = [record["time"] for record in run.steps if "time" in record]
    if run.starts:
        first = run.starts[0]
        newest = run.starts[-1]
        times.insert(0, first["time"])
        facts["command"] = newest["command"]
        versions = [f"{name} {version}" for name, version in newest["versions"].items()]
        facts["versions"] = ", ".join(versions)
        facts["ranks"] = str(newest["ranks"])
    if len(times) > 1:
        begin, end = (time.ctime(moment) for moment in (times[0], times[-1]))
        facts["date"] = f"{begin} to {end} ({duration(times[-1] - times[0])})"
    options = options_of(run.config)
    facts["steps"] = str(len(run.steps))
    if "model.path" in options:
        facts["model"] = options["model.path"]
    return facts


def _tile(run: Run, key: str, label: str = "") -> Tile | None:
    """Return the mean of a key over the last steps; None if no step has it."""
    points = figures.points_of(run.steps, key)
    if not points:
        return None
    count = max(LAST_LEAST, round(LAST_SHARE * len(points)))
    last = [value for _, value in points[-count:]]
    return Tile(key, label, sum(last) / len(last), len(last))


def _unusual(run: Run) -> list[tuple[Tile, Metric]]:
    """Return every metric whose mean over the last steps is outside its normal values."""
    unusual = []
    for key in sorted(set().union(*run.steps)):
        metric = metric_names.find(key)
        tile = _tile(run, key)
        # None: the metric states no normal values
        if metric and tile and metric.is_normal(tile.mean) is False:
            unusual.append((tile, metric))
    return unusual


def _samples(rows: Sequence[Record]) -> list[Record]:
    """Return the template's values of the newest samples, the newest first; NaN for a reward that failed.

    `accepted[i]` counts the rounds that accepted i drafts.
    """
    samples = []
    for row in reversed(rows[-SAMPLES_SHOWN:]):
        accepted = row["accepted"]
        length = f"{accept_length(accepted):.2f}" if any(accepted) else "plain"
        reward = math.nan if row["reward"] is None else row["reward"]
        samples.append({**row, "reward": reward, "accept_length": length})
    return samples


def _glossary(drawings: Sequence[DrawnChart]) -> Mapping[str, Metric]:
    """Return the entries of all keys that are drawn, by the keys of their families, such as `drafter/loss_<d>`."""
    glossary: dict[str, Metric] = {}
    for drawing in drawings:
        for series in drawing.series:
            metric = metric_names.find(series.key)
            if metric:
                glossary[metric.key] = metric
    return glossary

"""`rlspec report RUN_DIR`: one self-contained HTML page of a run, readable while the run goes on."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, Strict, ValidationError

from megatron_rlspec import arguments, files
from megatron_rlspec.metrics import RecordError, read_records
from megatron_rlspec.speculation.acceptance import accept_length

Records = Sequence[Mapping[str, Any]]
Row = TypeVar("Row", bound=BaseModel)

TEMPLATE = Path(__file__).with_suffix(".html.j2")
SAMPLES_SHOWN = 12
TIMELINES_SHOWN = 2
MOVES_SHOWN = 40
LABELS = {"rollout/accept_length": "all rounds", "spec/accept_length": "rounds that drafted"}
DRAWN_MOST = 1e30  # the pictures leave out larger values and NaN


class StepRow(BaseModel):
    """One line of metrics.jsonl. Values other than `step` are numbers, or texts, which are not drawn."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, float | str | bool | None] = Field(init=False)
    step: int = Field(ge=0, lt=10**12)


class SampleRow(BaseModel):
    """One line of samples.jsonl."""

    model_config = ConfigDict(extra="allow", strict=True)
    step: int = Field(ge=0, lt=10**12)
    prompt: str
    response: str
    label: Any = None
    reward: float | None
    accepted: list[NonNegativeInt]
    pieces: list[Annotated[tuple[str, bool], Strict(False)]] | None = None


class EventRow(BaseModel):
    """One line of events.jsonl."""

    model_config = ConfigDict(extra="allow", strict=True)
    kind: str
    message: str


class MoveRow(BaseModel):
    """A move within a rollout; seconds since its begin."""

    model_config = ConfigDict(extra="allow", strict=True)
    source: str
    target: str
    ids: Annotated[tuple[str, ...], Strict(False)]
    how: str
    why: str
    began: float
    ms: float
    bytes: int
    rounds: float
    refused: str


class TailRow(BaseModel):
    """One line of moves.jsonl: a rollout's samples on engines, [id, engine, from s, to s], and its moves."""

    model_config = ConfigDict(extra="allow", strict=True)
    step: int
    stays: list[Annotated[tuple[str, str, float, float], Strict(False)]]
    moves: list[MoveRow]


class ComparisonRow(BaseModel):
    """An accept length, or the difference of two: `minus` names the other drafter."""

    steps: int
    drafter: str
    minus: str = ""
    value: float
    low: float
    high: float
    shown: str = ""


class ComparisonTable(BaseModel):
    """What `rlspec compare --out RUN_DIR/comparison.json` wrote."""

    accept_lengths: list[ComparisonRow]
    differences: list[ComparisonRow]


def parser() -> arguments.Parser:
    p = arguments.Parser(prog="rlspec report", description=__doc__, example="rlspec report runs/mine")
    p.add_argument("run_dir", type=Path)
    p.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    return p


def main(argv: list[str] | None = None) -> int:
    """Write the page and print its path. Raises RecordError and FileError."""
    own = parser()
    options = own.parse_args(argv)
    out = options.out or options.run_dir / "report.html"
    records = read(options.run_dir / "metrics.jsonl", StepRow)
    if not records:
        own.error(
            f"{options.run_dir}: no metrics.jsonl with at least one step; expected a run directory of `rlspec train`"
        )
    if out.resolve() in {path.resolve() for path in options.run_dir.glob("*.json*")}:
        own.error(f"--out {out}: this file is a record of the run; name another one")
    files.check_output(out)
    page = render(options.run_dir, [record.model_dump() for record in records])
    files.write_output(out, page.encode("utf-8", "replace"))  # half a surrogate pair in a text becomes "?"
    print(out)
    return 0


def read(path: Path, kind: type[Row]) -> list[Row]:
    """Read and check the lines of a JSONL file. Raises RecordError, which names file, line and field."""
    rows = []
    for number, record in enumerate(read_records(path), 1):
        try:
            rows.append(kind.model_validate(record))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(map(str, first["loc"]))
            got = "" if first["type"] == "missing" else f", got {repr(first['input'])[:60]}"
            raise RecordError(f"{path}:{number}: {field}: {first['msg']}{got}") from None
    return rows


def render(run_dir: Path, records: Records) -> str:
    """Return the HTML page of a run. Raises RecordError and FileError if events, samples or config are unreadable."""
    import jinja2

    shown = ("rollout/reward", "rollout/accept_length", "rollout/tokens_per_second", "policy/loss")
    last = {key.split("/")[1]: f"{_drawn(records[-1][key]):.3g}" for key in shown if key in records[-1]}
    config = run_dir / "config.json"
    rollouts = [row for row in read(run_dir / "moves.jsonl", TailRow) if any(move.ids for move in row.moves)]
    return (
        jinja2.Environment(autoescape=True)
        .from_string(TEMPLATE.read_text())
        .render(
            name=run_dir.name,
            steps=len(records),
            last=last,
            plots=plots(records),
            timelines=[(row.step + 1, _timeline(row)) for row in rollouts[-TIMELINES_SHOWN:]],
            moves=[(row.step + 1, move) for row in rollouts for move in row.moves][-MOVES_SHOWN:],
            events=read(run_dir / "events.jsonl", EventRow),
            comparison=_comparison(run_dir / "comparison.json"),
            samples=[_sample(row) for row in read(run_dir / "samples.jsonl", SampleRow)[-SAMPLES_SHOWN:]],
            config=json.dumps(files.read_json(config), indent=1) if config.exists() else "",
        )
    )


def _comparison(path: Path) -> list[list[str]]:
    """Return the rows of a table that `rlspec compare --out` wrote: drafts, what, value and interval, what it shows."""
    if not path.exists():
        return []
    try:
        found = ComparisonTable.model_validate(files.read_json(path))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise RecordError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    rows = []
    for row in (*found.accept_lengths, *found.differences):
        what = f"{row.drafter} - {row.minus}" if row.minus else row.drafter
        rows.append([str(row.steps), what, f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}]", row.shown])
    return rows


def _sample(row: SampleRow) -> dict[str, Any]:
    """Return the template's values for one sample. `accepted[i]` counts the rounds that accepted i drafts."""
    return {
        **row.model_dump(),
        "pieces": [(row.response, False)] if row.pieces is None else row.pieces,
        "reward": math.nan if row.reward is None else row.reward,
        "accept_length": f"{accept_length(row.accepted):.2f}" if any(row.accepted) else "plain",
    }


def _drawn(value: object) -> float:
    """Return a record's value as a number to draw; NaN for text and for values beyond `DRAWN_MOST`."""
    if not isinstance(value, int | float) or not abs(value) <= DRAWN_MOST:
        return math.nan
    return float(value)


def plots(records: Records) -> list[tuple[str, str]]:
    """Return (title, base64 PNG) of every picture for which the records hold a value."""
    recorded = {key for record in records for key in record}
    parts = [part for part in ("generate", "train", "push") if f"seconds_{part}" in records[-1]]
    shares = sorted({key for record in records for key in record if key.startswith("spec/share_")})
    wanted = [
        ("reward", ["rollout/reward"], "line"),
        ("accept length (tokens per round)", ["rollout/accept_length", "spec/accept_length"], "line"),
        ("share of rounds per configuration", shares, "stack"),
        ("drafter loss by depth", sorted(k for k in recorded if k.startswith("drafter/loss_")), "line"),
        ("drafter agreement by depth", sorted(k for k in recorded if k.startswith("drafter/match_")), "line"),
        ("seconds of a step", [f"seconds_{part}" for part in parts], "stack"),
        ("rollout tokens per second", ["rollout/tokens_per_second"], "line"),
        ("response length", [f"rollout/{name}_response" for name in ("median", "p90", "longest")], "line"),
        ("share of truncated responses", ["rollout/truncated"], "line"),
        ("policy loss", ["policy/loss"], "line"),
        ("policy beside its start", ["drift/kl", "drift/changed"], "line"),
        ("drafter objective: weighted sum over depths", ["drafter/objective"], "line"),
        ("gradient norms", ["policy/grad_norm", "drafter/grad_norm"], "line"),
    ]
    pictures = []
    for title, keys, kind in wanted:
        keys = [key for key in keys if key in recorded]
        if keys:
            pictures.append((title, _picture(records, title, keys, kind)))
    return pictures


def _picture(records: Records, title: str, keys: Sequence[str], kind: str) -> str:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [record["step"] + 1 for record in records]
    series = [[_drawn(record.get(key)) for record in records] for key in keys]
    if kind == "stack":
        series = [[0.0 if math.isnan(value) else value for value in values] for values in series]
    labels = [
        LABELS.get(key, key)
        .removeprefix("spec/share_")
        .removeprefix("seconds_")
        .removeprefix("rollout/")
        .removesuffix("_response")
        for key in keys
    ]
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    if kind == "stack":
        axes.stackplot(steps, series, labels=labels)
    else:
        for values, label in zip(series, labels, strict=True):
            known = [i for i, value in enumerate(values) if not math.isnan(value)]  # a drafter may learn every N steps
            marker = "." if len(known) < 3 else None
            axes.plot([steps[i] for i in known], [values[i] for i in known], label=label, marker=marker)
    axes.set(title=title, xlabel="step")
    if len(keys) > 1:
        axes.legend(fontsize="small")
    return _png(figure)


def _timeline(row: TailRow) -> str:
    """Draw the engines of a rollout over time: samples as bars, moves as arrows between them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    engines = sorted({engine for _, engine, _, _ in row.stays})
    order = sorted(row.stays, key=lambda stay: (engines.index(stay[1]), stay[2], stay[3]))
    places = {(sample, engine, began): place for place, (sample, engine, began, _) in enumerate(order)}
    figure, axes = plt.subplots(figsize=(10, min(12, 1 + 0.08 * len(order))), layout="constrained")
    for place, (_, engine, began, ended) in enumerate(order):
        axes.barh(place, ended - began, left=began, height=0.8, color=f"C{engines.index(engine) % 10}")
    by_sample: dict[str, list[tuple[str, float, float]]] = {}
    for sample, engine, began, ended in sorted(row.stays, key=lambda stay: stay[2]):
        by_sample.setdefault(sample, []).append((engine, began, ended))
    for sample, stays in by_sample.items():
        for (left, from_, until), (reached, begins, _) in itertools.pairwise(stays):
            start = (until, places[sample, left, from_])
            axes.annotate("", (begins, places[sample, reached, begins]), start, arrowprops={"arrowstyle": "->"})
    middles = [[place for place, stay in enumerate(order) if stay[1] == engine] for engine in engines]
    axes.set_yticks([sum(places_) / len(places_) for places_ in middles], engines)
    axes.set(title=f"step {row.step + 1}: samples on engines, and moves", xlabel="seconds")
    return _png(figure)


def _png(figure: Any) -> str:
    import matplotlib.pyplot as plt

    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=100)
    plt.close(figure)
    return base64.b64encode(image.getvalue()).decode()

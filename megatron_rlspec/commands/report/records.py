"""The files of a run directory that a report reads, with their schemas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, Strict, ValidationError

from megatron_rlspec import files
from megatron_rlspec.config import Config
from megatron_rlspec.config.base import first_mistake
from megatron_rlspec.records.recorder import RecordError, read_records

Row = TypeVar("Row", bound=BaseModel)


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
    reward_error: str = ""  # why there is no reward
    accepted: list[NonNegativeInt]  # at i: rounds that accepted i drafts
    tokens: int | None = None
    status: str = ""
    pieces: list[Annotated[tuple[str, bool], Strict(False)]] | None = None


class EventRow(BaseModel):
    """One line of events.jsonl."""

    model_config = ConfigDict(extra="allow", strict=True)
    kind: str
    message: str


class MoveRow(BaseModel):
    """A move within a rollout."""

    model_config = ConfigDict(extra="allow", strict=True)
    source: str
    target: str
    ids: Annotated[tuple[str, ...], Strict(False)]
    how: str
    why: str
    ms: float
    bytes: int
    rounds: float
    refused: str


class SizeRow(BaseModel):
    """A change of the engines' tensor-parallel size within a rollout."""

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=True)
    source: int = Field(alias="from")
    target: int = Field(alias="to")
    samples: int
    ms: float
    how: str = ""


class TailRow(BaseModel):
    """One line of moves.jsonl: the moves of a rollout, and its changes of the tensor-parallel size."""

    model_config = ConfigDict(extra="allow", strict=True)
    step: int
    moves: list[MoveRow]
    sizes: list[SizeRow] = []


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


def read(path: Path, kind: type[Row]) -> list[Row]:
    """Read and check the lines of a JSONL file. Raises RecordError, which names file, line and field."""
    rows = []
    for number, record in enumerate(read_records(path), 1):
        try:
            rows.append(kind.model_validate(record))
        except ValidationError as error:
            raise RecordError(f"{path}:{number}: {first_mistake(error)}") from None
    return rows


class ProcessRow(BaseModel):
    """A start or an end of the run: a line of process.jsonl."""

    model_config = ConfigDict(extra="allow", strict=True)
    kind: str
    time: float
    step: int
    command: str = ""
    ranks: int = 1
    versions: dict[str, str] = {}


@dataclass(frozen=True)
class Run:
    """What a run directory holds."""

    name: str
    steps: list[dict[str, Any]]
    events: list[EventRow]
    samples: list[SampleRow]
    rollouts: list[TailRow]
    starts: list[ProcessRow]
    comparison: ComparisonTable | None
    config: Mapping[str, Any]

    def changed_options(self) -> list[tuple[str, str, str]]:
        """Return (option, value, default) of every option that is not at its default."""
        defaults = options_of(Config().model_dump(mode="json"))
        return [
            (k, v, defaults.get(k, ""))
            for k, v in options_of(self.config).items()
            if v != defaults.get(k)
        ]


def options_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `section.key` -> value as text, of nested tables."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": text for inner, text in options_of(value).items()}
        else:
            found[key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def read_run(directory: Path) -> Run:
    """Read a run directory. Raises RecordError and FileError for files that cannot be read."""
    config = directory / "config.json"
    options = files.read_json(config) if config.exists() else {}
    if not isinstance(options, Mapping):
        raise RecordError(f"{config}: expected a JSON object with the options of the run")
    return Run(
        name=directory.resolve().name,
        steps=[row.model_dump() for row in read(directory / "metrics.jsonl", StepRow)],
        events=read(directory / "events.jsonl", EventRow),
        samples=read(directory / "samples.jsonl", SampleRow),
        rollouts=read(directory / "moves.jsonl", TailRow),
        starts=[
            row for row in read(directory / "process.jsonl", ProcessRow) if row.kind == "start"
        ],
        comparison=_comparison(directory / "comparison.json"),
        config=options,
    )


def _comparison(path: Path) -> ComparisonTable | None:
    if not path.exists():
        return None
    try:
        return ComparisonTable.model_validate(files.read_json(path))
    except ValidationError as error:
        raise RecordError(f"{path}: {first_mistake(error)}") from None

"""The rows of a cost table and their checks. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar

from megatron_rlspec.types import SpecConfig


class CostTableError(ValueError):
    """The cost table cannot be used. The message is one line: what is wrong, what was expected, where."""

    exit_code = 2


@dataclass(frozen=True)
class Provenance:
    """The origin of the figures. `simulated`: a model computed them, no engine ran."""

    model: str
    hardware: str
    dtype: str
    engine: str
    engine_version: str
    date: str
    simulated: bool = False
    note: str = ""


@dataclass(frozen=True)
class RoundCost:
    """One measured point: a whole decode round of `batch` requests with `context_tokens` tokens in all.

    `ms` is the median over `samples` rounds, `spread_ms` half their interquartile range. `config.num_draft_tokens` is
    the number of verified tokens per request; `OFF` is plain decoding.
    """

    tp: int
    batch: int
    context_tokens: int
    config: SpecConfig
    ms: float
    spread_ms: float = 0.0
    samples: int = 1


@dataclass(frozen=True)
class PrefillCost:
    """`ms` to extend a batch by `tokens` new tokens in all."""

    tp: int
    batch: int
    tokens: int
    ms: float
    spread_ms: float = 0.0
    samples: int = 1


@dataclass(frozen=True)
class Repair:
    """A measured cost below that of less work, and the value that replaces it."""

    cell: RoundCost
    ms: float

    def __str__(self) -> str:
        change = 100 * (self.ms / self.cell.ms - 1)
        return f"{where(self.cell)}: {self.cell.ms:.3f} -> {self.ms:.3f} ms ({change:+.1f} %)"


def where(cell: RoundCost) -> str:
    return f"tp={cell.tp} batch={cell.batch} context={cell.context_tokens} {cell.config}"


def cell_json(cell: RoundCost) -> dict[str, Any]:
    row = asdict(cell)
    config = row.pop("config")
    return {**row, **config}


_AXES = ("num_steps", "topk", "num_draft_tokens")
_MOST = {
    "tp": 1 << 12,
    "batch": 1 << 20,
    "num_steps": 1 << 10,
    "topk": 1 << 10,
    "num_draft_tokens": 1 << 20,
}
_MOST_COUNT = 1 << 40  # of samples and tokens
_MOST_NUMBER = 1e9  # ms (eleven days): larger ones are mistakes, and would overflow the fit
Row = TypeVar("Row", Provenance, RoundCost, PrefillCost)


def cell(row: object, source: str) -> RoundCost:
    """Read one JSON object of `rounds`. Raises CostTableError, which names `source` and the field."""
    values = _object(row, source)
    values.pop("parts", None)  # empty in files of earlier releases
    lost = [name for name in _AXES if name not in values]
    if lost:
        raise CostTableError(f"{source}: no field {lost[0]!r}")
    steps, topk, tokens = (_count(name, values.pop(name), source, least=0) for name in _AXES)
    if topk > 1 and (steps < 1 or tokens < 1):
        raise CostTableError(
            f"{source}: num_steps={steps}, num_draft_tokens={tokens}, expected 1 or more for a tree"
        )
    if topk == 0 and (steps or tokens):
        raise CostTableError(
            f"{source}: num_steps={steps}, num_draft_tokens={tokens}, expected 0 with topk=0 (plain decoding)"
        )
    try:
        config = SpecConfig(steps, topk, tokens)
    except ValueError as error:
        raise CostTableError(f"{source}: {error}") from None
    return _made(RoundCost, {**values, "config": config}, source)


def record(kind: type[Row], row: object, source: str) -> Row:
    """Make an object of `kind` from a JSON object and check every field. Raises CostTableError, as `cell`."""
    return _made(kind, _object(row, source), source)


def number(name: str, value: object, source: str) -> float:
    """Return a finite JSON number from 0 to 1e9. Raises CostTableError, as `cell`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= _MOST_NUMBER
    ):
        raise CostTableError(
            f"{source}: {name}={short(value)}, expected a number from 0 to {_MOST_NUMBER:g}"
        )
    return float(value)


def short(value: object) -> str:
    """Format a value for a message, on one line and at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _made(kind: type[Row], values: Mapping[str, Any], source: str) -> Row:
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise CostTableError(
            f"{source}: unknown field {short(unknown[0])}; known are {', '.join(known)}"
        )
    lost = [name for name, f in known.items() if name not in values and f.default is MISSING]
    if lost:
        raise CostTableError(f"{source}: no field {lost[0]!r}")
    return kind(
        **{
            name: _field(name, str(known[name].type), value, source)
            for name, value in values.items()
        }
    )


def _field(name: str, wanted: str, value: Any, source: str) -> Any:
    """Check the value of a dataclass field with the annotation `wanted`."""
    if wanted == "int":
        return _count(name, value, source, least=1)
    if wanted == "float":
        return number(name, value, source)
    if wanted == "str" and not isinstance(value, str):
        raise CostTableError(f"{source}: {name}={short(value)}, expected text")
    if wanted == "bool" and not isinstance(value, bool):
        raise CostTableError(f"{source}: {name}={short(value)}, expected true or false")
    return value


def _count(name: str, value: object, source: str, least: int) -> int:
    most = _MOST.get(name, _MOST_COUNT)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CostTableError(
            f"{source}: {name}={short(value)}, expected an integer from {least} to {most}"
        )
    return value


def _object(row: object, source: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise CostTableError(f"{source}: {short(row)}, expected an object with named fields")
    return dict(row)

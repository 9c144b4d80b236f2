"""The rows of a cost table, and how they are read from JSON. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar

from megatron_rlspec.types import SpecConfig

MOST_COUNT = 1 << 40  # of samples and tokens
MOST_STEPS = 1 << 10
MOST_MS = 1e9  # eleven days: larger values are mistakes, and would overflow the fit


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

    def __str__(self) -> str:
        return f"tp={self.tp} batch={self.batch} context={self.context_tokens} {self.config}"


@dataclass(frozen=True)
class PrefillCost:
    """`ms` to extend a batch by `tokens` new tokens in all."""

    tp: int
    batch: int
    tokens: int
    ms: float
    spread_ms: float = 0.0
    samples: int = 1

    def __str__(self) -> str:
        return f"prefill tp={self.tp} batch={self.batch} tokens={self.tokens}"


Row = TypeVar("Row", Provenance, RoundCost, PrefillCost)


def round_json(row: RoundCost) -> dict[str, Any]:
    values = asdict(row)
    config = values.pop("config")
    return {**values, **config}


def read_round(row: object, source: str) -> RoundCost:
    """Read one JSON object of `rounds`. Raises CostTableError, which names `source` and the field."""
    values = _object(row, source)
    triple = {}
    for name in ("num_steps", "topk", "num_draft_tokens"):
        if name not in values:
            raise CostTableError(f"{source}: no field {name!r}")
        triple[name] = _count(name, values.pop(name), source, least=0)
    if triple["topk"] > 1 and not (triple["num_steps"] and triple["num_draft_tokens"]):
        raise CostTableError(f"{source}: {triple}, expected 1 or more of each for a tree")
    if triple["topk"] == 0 and any(triple.values()):
        raise CostTableError(f"{source}: {triple}, expected 0 with topk=0 (plain decoding)")
    try:
        config = SpecConfig(**triple)
    except ValueError as error:
        raise CostTableError(f"{source}: {error}") from None
    return _made(RoundCost, {**values, "config": config}, source)


def read(kind: type[Row], row: object, source: str) -> Row:
    """Make an object of `kind` from a JSON object and check every field. Raises CostTableError, as `read_round`."""
    return _made(kind, _object(row, source), source)


def read_number(name: str, value: object, source: str) -> float:
    """Return a finite JSON number from 0 to 1e9. Raises CostTableError, as `read_round`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_MS:  # type: ignore[operator]
        raise CostTableError(
            f"{source}: {name}={short(value)}, expected a number from 0 to {MOST_MS:g}"
        )
    return float(value)  # type: ignore[arg-type]


def short(value: object) -> str:
    """Format a value for a message, on one line and at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _made(kind: type[Row], values: Mapping[str, Any], source: str) -> Row:
    wanted = {field.name: field for field in fields(kind)}
    for name in sorted(values):
        if name not in wanted:
            expected = ", ".join(wanted)
            raise CostTableError(f"{source}: unknown field {short(name)}; expected {expected}")
    checked = {}
    for name, field in wanted.items():
        if name in values:
            checked[name] = _checked(name, str(field.type), values[name], source)
        elif field.default is MISSING:
            raise CostTableError(f"{source}: no field {name!r}")
    return kind(**checked)


def _checked(name: str, annotation: str, value: Any, source: str) -> Any:
    """Check the value of a dataclass field."""
    if annotation == "int":
        return _count(name, value, source, least=1)
    if annotation == "float":
        return read_number(name, value, source)
    if annotation == "str" and not isinstance(value, str):
        raise CostTableError(f"{source}: {name}={short(value)}, expected text")
    if annotation == "bool" and not isinstance(value, bool):
        raise CostTableError(f"{source}: {name}={short(value)}, expected true or false")
    return value


def _count(name: str, value: object, source: str, least: int) -> int:
    most = MOST_STEPS if name in ("tp", "num_steps", "topk") else MOST_COUNT
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:  # type: ignore[operator]
        raise CostTableError(
            f"{source}: {name}={short(value)}, expected an integer from {least} to {most}"
        )
    return value  # type: ignore[return-value]


def _object(row: object, source: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise CostTableError(f"{source}: {short(row)}, expected an object with named fields")
    return dict(row)

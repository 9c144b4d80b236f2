"""The rows of a cost table: what was measured, where and how. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_rlspec.types import SpecConfig


class CostTableError(ValueError):
    """A table that must not be used. One line: what is wrong, what was expected, where."""


@dataclass(frozen=True)
class Provenance:
    """Where the figures come from. `simulated` is true for anything that no engine ran."""

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
    """One measured point: a whole decode round of `batch` requests that hold `context_tokens` tokens together.

    `ms` is a median over `samples` rounds and `spread_ms` half their interquartile range. `config.num_draft_tokens` is
    the axis of verified tokens per request; `OFF` is plain decoding. `parts` splits the round where the engine tells.
    """

    tp: int
    batch: int
    context_tokens: int
    config: SpecConfig
    ms: float
    spread_ms: float = 0.0
    samples: int = 1
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillCost:
    """`ms` to extend a batch by `tokens` new tokens in all; also what a drafter's catch-up after `OFF` is made of."""

    tp: int
    batch: int
    tokens: int
    ms: float
    spread_ms: float = 0.0
    samples: int = 1


@dataclass(frozen=True)
class Link:
    """What moving data between two engines costs."""

    source: str
    target: str
    gigabytes_per_second: float
    latency_ms: float = 0.0


@dataclass(frozen=True)
class Repair:
    """A measured cost that fell where it cannot fall, and what it was replaced by."""

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


def cell(row: Mapping[str, Any]) -> RoundCost:
    axes = dict(row)
    config = SpecConfig(axes.pop("num_steps"), axes.pop("topk"), axes.pop("num_draft_tokens"))
    found: RoundCost = record(RoundCost, {**axes, "config": config})
    return found


def record(kind: type, row: Mapping[str, Any]) -> Any:
    unknown = set(row) - {f.name for f in fields(kind)}
    if unknown:
        raise CostTableError(f"{kind.__name__}: unknown field {min(unknown)!r}")
    return kind(**row)

"""The cost table: the measured duration of a decode round by batch, context, configuration and tensor-parallel size.

Standard library, numpy and scipy only. `rlspec profile` writes the table; the solver and the online rule read it.
Sources of the axes: ReSpec, section 5.2 (batch, steps, branches, draft tokens); RLHFSpec, section 5.2 (context and
verified tokens); PAT, section 4 (tensor-parallel size, context tokens).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rlspec import files
from megatron_rlspec.speculation.cost_rows import (
    CostTableError,
    PrefillCost,
    Provenance,
    Repair,
    RoundCost,
    cell,
    cell_json,
    number,
    record,
    short,
    where,
)
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.surface import Surface, monotone, shrunk
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

SCHEMA = "rlspec.cost_table"
VERSION = 1
_KEYS = {
    "schema",
    "version",
    "units",
    "provenance",
    "switch_ms",
    "catch_up_ms",
    "rounds",
    "prefill",
}
_FORMER = {"links"}  # empty in files of earlier releases
LEAST_MS = 1e-9  # a smaller value is a mistake, and would overflow the fit of relative errors
# by which the factor of all configurations together counts in that of one (`CostTable.calibrated`)
PRIOR_ROUNDS = 32
UNITS = {"time": "ms", "bandwidth": "GB/s", "context": "tokens of the whole batch"}


class CostTable:
    """Costs of decode rounds; immutable. Raises CostTableError for NaN, a hole, or without rows of plain decoding.

    switch_ms    measured ms of a change of the configuration between two rounds
    catch_up_ms  measured ms per token to run the drafter on tokens that were decoded while it was off
    """

    def __init__(
        self,
        provenance: Provenance,
        rounds: Iterable[RoundCost],
        prefill: Iterable[PrefillCost] = (),
        switch_ms: float = 0.0,
        catch_up_ms: float = 0.0,
    ) -> None:
        self.provenance = provenance
        self.rounds = tuple(
            sorted(rounds, key=lambda c: (c.tp, c.config, c.batch, c.context_tokens))
        )
        self.prefill = tuple(sorted(prefill, key=lambda c: (c.tp, c.batch, c.tokens)))
        self.switch_ms = switch_ms
        self.catch_up_ms = catch_up_ms
        _check_numbers(self)
        _check_holes(self.rounds)

    @cached_property
    def tps(self) -> tuple[int, ...]:
        return tuple(sorted({c.tp for c in self.rounds}))

    def at(self, tp: int) -> CostTable:
        """Return the rows of one tensor parallel size as a table. Raises CostTableError if there are none."""
        self.check(tp)
        return self._with(
            (c for c in self.rounds if c.tp == tp), (c for c in self.prefill if c.tp == tp)
        )

    def of_engine(self, tp: int) -> CostTable:
        """Return the rows for an engine of size `tp`; a table of one size counts for any. Raises CostTableError."""
        return self if len(self.tps) == 1 else self.at(tp)

    def of_sizes(self, tps: Iterable[int]) -> CostTable:
        """Return the rows of these tensor parallel sizes as a table. Raises CostTableError if one has none."""
        wanted = {tp for tp in tps if self.check(tp)}
        return self._with(
            (c for c in self.rounds if c.tp in wanted), (c for c in self.prefill if c.tp in wanted)
        )

    def configs(self, tp: int | None = None) -> tuple[SpecConfig, ...]:
        """Return the configurations measured at this TP, OFF first."""
        tp = self._tp(tp)
        return tuple(sorted({c.config for c in self.rounds if c.tp == tp}))

    def batches(self, tp: int | None = None) -> tuple[int, ...]:
        return tuple(sorted({c.batch for c in self.rounds if c.tp == self._tp(tp)}))

    def lengths(self, tp: int | None = None) -> tuple[float, ...]:
        """Return the measured mean contexts, in tokens per request."""
        return tuple(
            sorted({c.context_tokens / c.batch for c in self.rounds if c.tp == self._tp(tp)})
        )

    def grid(
        self,
        configs: Sequence[SpecConfig],
        batch: np.ndarray,
        context: np.ndarray,
        tp: int | None = None,
    ) -> np.ndarray:
        """Compute ms of a round, `[configs, *broadcast(batch, context)]`; `context`: tokens of the whole batch."""
        return np.stack([self._surface(config, tp)(batch, context)[0] for config in configs])

    def ms(self, config: SpecConfig, batch: float, context: float, tp: int | None = None) -> float:
        return float(self._surface(config, tp)(np.array(batch), np.array(context))[0])

    def extrapolates(
        self, config: SpecConfig, batch: float, context: float, tp: int | None = None
    ) -> bool:
        """Return whether `ms` at this point comes from the fitted model instead of measured neighbours."""
        return bool(self._surface(config, tp)(np.array(batch), np.array(context))[1])

    def prefill_ms(self, tokens: float, batch: int = 1, tp: int | None = None) -> float:
        """Estimate the ms of a prefill of `tokens` new tokens, from the nearest measured batch.

        It is linear between measured token counts, and continues with the last slope. Raises CostTableError without
        prefill rows.
        """
        tp = self._tp(tp)
        cells = [c for c in self.prefill if c.tp == tp]
        if not cells:
            raise CostTableError(
                f"{self.provenance.model}: no prefill row for tp={tp}; measure with `rlspec profile`"
            )
        nearest = min({c.batch for c in cells}, key=lambda b: abs(b - batch))
        line = [c for c in cells if c.batch == nearest]
        counts = np.array([c.tokens for c in line], float)
        ms = np.array([c.ms for c in line])
        if len(line) == 1 or tokens <= counts[-1]:
            return float(np.interp(tokens, counts, ms))
        slope = max((ms[-1] - ms[-2]) / (counts[-1] - counts[-2]), 0.0)
        return float(ms[-1] + slope * (tokens - counts[-1]))

    @cached_property
    def repairs(self) -> tuple[Repair, ...]:
        """Return the cells in which noise made a larger batch or a longer context cheaper, with the values used."""
        fixed = {key: monotone(points) for key, points in self._points.items()}
        pairs = ((c, fixed[c.tp, c.config][c.batch, c.context_tokens]) for c in self.rounds)
        return tuple(Repair(c, ms) for c, ms in pairs if abs(ms / c.ms - 1) > 1e-6)

    def fit_error(self, tp: int | None = None) -> float:
        """Return the median relative error of the fitted model on the measured points."""
        return self._models[self._tp(tp)][1]

    def check(self, tp: int) -> CostTable:
        """Return self. Raises CostTableError if it holds no round of this tensor-parallel size."""
        if tp not in self.tps:
            raise CostTableError(
                f"cost table holds tp={list(self.tps)}, but this engine runs tp={tp}"
            )
        return self

    def calibrated(
        self, observed: Iterable[RoundStats], tp: int | None = None, like: Collection[int] = ()
    ) -> CostTable:
        """Scale the rows of each configuration to the durations that engines observed.

        The factor of a configuration is the median of observed / predicted ms. It is averaged with the factor of all
        configurations together, which has the weight of PRIOR_ROUNDS. An engine that is equally slow for all
        configurations therefore changes no choice. Rows of the sizes in `like` are scaled by that common factor.
        """
        tp = self._tp(tp)
        known = set(self.configs(tp))
        logs: dict[SpecConfig, list[tuple[float, int]]] = {}
        for s in observed:
            if s.rounds > 0 and s.ms > 0 and s.config in known:
                predicted = self.ms(s.config, max(s.batch, 1), s.context_tokens, tp)
                logs.setdefault(s.config, []).append(
                    (math.log(s.ms / s.rounds / predicted), s.rounds)
                )
        if not logs:
            return self
        common = _weighted_median([pair for pairs in logs.values() for pair in pairs])
        factor = {}
        for config in known:
            rounds = sum(n for _, n in logs.get(config, []))
            own = _weighted_median(logs[config]) if rounds else common
            factor[config] = math.exp(
                (rounds * own + PRIOR_ROUNDS * common) / (rounds + PRIOR_ROUNDS)
            )
        scaled = []
        for c in self.rounds:
            by = factor[c.config] if c.tp == tp else math.exp(common) if c.tp in like else 1.0
            scaled.append(replace(c, ms=c.ms * by, spread_ms=c.spread_ms * by))
        return self._with(scaled)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "units": dict(UNITS),
            "provenance": asdict(self.provenance),
            "switch_ms": self.switch_ms,
            "catch_up_ms": self.catch_up_ms,
            "rounds": [cell_json(c) for c in self.rounds],
            "prefill": [asdict(c) for c in self.prefill],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "cost table") -> CostTable:
        """Make the table that `to_json` returned. Raises CostTableError, which names `source` and the field."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise CostTableError(
                f"{source}: not a cost table (expected schema {SCHEMA!r}); write one with `rlspec profile`"
            )
        if data.get("version") != VERSION:
            raise CostTableError(
                f"{source}: version {short(data.get('version'))}, but this release reads version {VERSION}"
            )
        if data.get("units") != UNITS:
            raise CostTableError(f"{source}: units {short(data.get('units'))}, expected {UNITS}")
        unknown = sorted(data.keys() - _KEYS - _FORMER)
        if unknown:
            raise CostTableError(
                f"{source}: unknown field {short(unknown[0])}; known are {', '.join(sorted(_KEYS))}"
            )
        lost = [name for name in ("provenance", "rounds") if name not in data]
        if lost:
            raise CostTableError(f"{source}: no field {lost[0]!r}")
        provenance = record(Provenance, data["provenance"], f"{source}: provenance")
        rounds = [cell(row, where) for row, where in _rows(data, "rounds", source)]
        prefill = [record(PrefillCost, row, where) for row, where in _rows(data, "prefill", source)]
        switch_ms = number("switch_ms", data.get("switch_ms", 0.0), source)
        catch_up_ms = number("catch_up_ms", data.get("catch_up_ms", 0.0), source)
        try:
            return cls(provenance, rounds, prefill, switch_ms, catch_up_ms)
        except CostTableError as error:
            raise CostTableError(f"{source}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a file that `save` wrote. Raises CostTableError."""
        try:
            # `from_json` refuses NaN, and names its field
            data = files.read_json(path, finite=False)
        except files.FileError as error:
            raise CostTableError(str(error)) from None
        return cls.from_json(data, str(path))

    def save(self, path: str | Path) -> None:
        """Write the whole file or none of it. Raises OSError."""
        files.write(path, _one_row_a_line(self.to_json()))

    def _with(
        self, rounds: Iterable[RoundCost], prefill: Iterable[PrefillCost] | None = None
    ) -> CostTable:
        prefill = self.prefill if prefill is None else prefill
        return CostTable(self.provenance, rounds, prefill, self.switch_ms, self.catch_up_ms)

    def _tp(self, tp: int | None) -> int:
        if tp is None:
            if len(self.tps) > 1:
                raise CostTableError(f"cost table holds tp={list(self.tps)}: choose one of them")
            return self.tps[0]
        self.check(tp)
        return tp

    @cached_property
    def _points(self) -> dict[tuple[int, SpecConfig], dict[tuple[int, int], float]]:
        points: dict[tuple[int, SpecConfig], dict[tuple[int, int], float]] = {}
        for c in self.rounds:
            points.setdefault((c.tp, c.config), {})[c.batch, c.context_tokens] = c.ms
        return points

    @cached_property
    def _models(self) -> dict[int, tuple[Roofline, float]]:
        return {
            tp: Roofline.fit(
                (c.config, c.batch, c.context_tokens, c.ms) for c in self.rounds if c.tp == tp
            )
            for tp in self.tps
        }

    @cached_property
    def _surfaces(self) -> dict[tuple[int, SpecConfig], Surface]:
        return {
            (tp, config): Surface(config, monotone(points), self._models[tp][0])
            for tp in self.tps
            for config, points in self._shrunk(tp).items()
        }

    def _shrunk(self, tp: int) -> dict[SpecConfig, dict[tuple[int, int], float]]:
        measured = {config: self._points[tp, config] for config in self.configs(tp)}
        spreads: dict[SpecConfig, dict[tuple[int, int], float]] = {
            config: {} for config in measured
        }
        for c in self.rounds:
            if c.tp == tp:
                spreads[c.config][c.batch, c.context_tokens] = c.spread_ms
        return shrunk(measured, spreads, self._models[tp][0])

    def _surface(self, config: SpecConfig, tp: int | None) -> Surface:
        tp = self._tp(tp)
        surface = self._surfaces.get((tp, config))
        if surface is None:
            known = ", ".join(map(str, self.configs(tp)))
            raise CostTableError(f"cost table holds no {config} at tp={tp}; it holds {known}")
        return surface


def _check_numbers(table: CostTable) -> None:
    if not table.rounds:
        raise CostTableError("cost table holds no round")
    for c in table.rounds:
        if not (
            math.isfinite(c.ms)
            and c.ms >= LEAST_MS
            and math.isfinite(c.spread_ms)
            and c.spread_ms >= 0
        ):
            raise CostTableError(
                f"{where(c)}: ms={c.ms} spread_ms={c.spread_ms}, expected finite, and ms of {LEAST_MS:g} or more"
            )
        if min(c.tp, c.batch, c.samples) < 1 or c.context_tokens < c.batch:
            raise CostTableError(
                f"{where(c)}: expected tp, batch, samples >= 1 and a context of at least one token each"
            )
    points = set()
    for p in table.prefill:
        point = f"prefill tp={p.tp} batch={p.batch} tokens={p.tokens}"
        if not (math.isfinite(p.ms) and p.ms >= LEAST_MS and p.tokens > 0 and p.batch > 0):
            raise CostTableError(f"{point}: ms={p.ms}, expected {LEAST_MS:g} or more")
        if point in points:
            raise CostTableError(f"{point}: measured twice")
        points.add(point)
    for name in ("switch_ms", "catch_up_ms"):
        if not (math.isfinite(getattr(table, name)) and getattr(table, name) >= 0):
            raise CostTableError(f"{name}={getattr(table, name)}, expected finite and not negative")


def _check_holes(rounds: Sequence[RoundCost]) -> None:
    """Raise CostTableError unless, at each TP, all configurations and OFF were measured at the same points, once."""
    measured: dict[int, dict[SpecConfig, set[tuple[int, int]]]] = {}
    for c in rounds:
        points = measured.setdefault(c.tp, {}).setdefault(c.config, set())
        if (c.batch, c.context_tokens) in points:
            raise CostTableError(f"{where(c)}: measured twice")
        points.add((c.batch, c.context_tokens))
    for tp, by_config in measured.items():
        if OFF not in by_config:
            raise CostTableError(
                f"tp={tp}: no plain-decoding row (num_steps=0, topk=0): the cost of OFF is unknown"
            )
        union = set().union(*by_config.values())
        for config, points in sorted(by_config.items()):
            for batch, context in sorted(union - points):
                raise CostTableError(
                    f"hole at tp={tp} batch={batch} context={context}: {config} was not measured there"
                )


def _rows(data: Mapping[str, Any], name: str, source: str) -> list[tuple[object, str]]:
    """Return the elements of a list field, each with its place for an error. Raises CostTableError."""
    rows = data.get(name, [])
    if not isinstance(rows, list):
        raise CostTableError(f"{source}: {name}={short(rows)}, expected a list")
    return [(row, f"{source}: {name}[{index}]") for index, row in enumerate(rows)]


def _weighted_median(pairs: Sequence[tuple[float, int]]) -> float:
    ordered = sorted(pairs)
    half = sum(n for _, n in ordered) / 2
    for value, n in ordered:
        half -= n
        if half <= 0:
            return value
    return ordered[-1][0]


def _one_row_a_line(data: Mapping[str, Any]) -> str:
    """Return JSON with one element of a list per line, so that people can read and compare files."""
    parts = []
    for key, value in data.items():
        rows = ",\n  ".join(json.dumps(row) for row in value) if isinstance(value, list) else ""
        parts.append(f' "{key}": ' + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"

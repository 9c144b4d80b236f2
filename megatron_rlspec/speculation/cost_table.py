"""The cost table: the measured duration of a decode round by batch, context, configuration and tensor-parallel size.

`rlspec profile` writes the table; the rule reads it. Sources of the axes: ReSpec, section 5.2 (batch,
steps, branches, draft tokens); RLHFSpec, section 5.2 (context and verified tokens); PAT, section 4 (tensor-parallel
size, context tokens).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rlspec import files
from megatron_rlspec.speculation.cost_rows import (
    CostTableError,
    PrefillCost,
    Provenance,
    RoundCost,
    read,
    read_number,
    read_round,
    round_json,
    short,
)
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig

__all__ = ["CostTable", "CostTableError", "PrefillCost", "Provenance", "RoundCost"]

SCHEMA = "rlspec.cost_table"
VERSION = 1
UNITS = {"time": "ms", "bandwidth": "GB/s", "context": "tokens of the whole batch"}
LEAST_MS = 1e-9  # a smaller value is a mistake, and would overflow the fit of relative errors
# of a table by which a rule can be ragged
UNVERIFIED = (
    "with `unverified` rounds, which `rlspec profile` measures on engines that can be ragged"
)
_REQUIRED = ("provenance", "rounds")
_OPTIONAL = ("switch_ms", "catch_up_ms", "prefill", "unverified")
_KEYS = {"schema", "version", "units", *_OPTIONAL, *_REQUIRED}

Point = tuple[int, int]  # batch, context tokens of the whole batch


class CostTable:
    """Costs of decode rounds; immutable. Raises CostTableError for NaN, a hole, or without rows of plain decoding.

    unverified   rounds of a configuration that verified none of their drafts. They tell drafting from verifying: with
                 them a rule can verify of each request the drafts worth it
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
        unverified: Iterable[RoundCost] = (),
    ) -> None:
        self.provenance = provenance
        self.rounds = _in_order(rounds)
        self.unverified = _in_order(unverified)
        self.prefill = tuple(sorted(prefill, key=lambda row: (row.tp, row.batch, row.tokens)))
        self.switch_ms = switch_ms
        self.catch_up_ms = catch_up_ms
        if not self.rounds:
            raise CostTableError("cost table holds no round")
        for rows in (self.rounds, self.unverified, self.prefill):
            _check_rows(rows)
        _check_holes(self.rounds)

    # Parts

    @cached_property
    def tps(self) -> tuple[int, ...]:
        return tuple(sorted({row.tp for row in self.rounds}))

    def at(self, tp: int) -> CostTable:
        """Return the rows of one tensor-parallel size as a table. Raises CostTableError if there are none."""
        return self.of_sizes([tp])

    def of_engine(self, tp: int) -> CostTable:
        """Return the rows for an engine of size `tp`; a table of one size counts for any. Raises CostTableError."""
        return self if len(self.tps) == 1 else self.at(tp)

    def of_sizes(self, tps: Iterable[int]) -> CostTable:
        """Return the rows of these tensor-parallel sizes as a table. Raises CostTableError if one has none."""
        wanted = set(tps)
        for tp in wanted - set(self.tps):
            raise CostTableError(
                f"cost table holds tp={list(self.tps)}, but this engine runs tp={tp}"
            )
        return CostTable(
            self.provenance,
            rounds=[row for row in self.rounds if row.tp in wanted],
            prefill=[row for row in self.prefill if row.tp in wanted],
            switch_ms=self.switch_ms,
            catch_up_ms=self.catch_up_ms,
            unverified=[row for row in self.unverified if row.tp in wanted],
        )

    # Of a table of one size; each raises CostTableError for one of several

    @property
    def tp(self) -> int:
        return self._rows[0].tp

    @cached_property
    def _rows(self) -> tuple[RoundCost, ...]:
        if len(self.tps) > 1:
            raise CostTableError(f"cost table holds tp={list(self.tps)}: choose one of them")
        return self.rounds

    def configs(self) -> tuple[SpecConfig, ...]:
        """Return the configurations measured, OFF first."""
        return tuple(sorted({row.config for row in self._rows}))

    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({row.batch for row in self._rows}))

    def lengths(self) -> tuple[float, ...]:
        """Return the measured mean contexts, in tokens per request."""
        return tuple(sorted({row.context_tokens / row.batch for row in self._rows}))

    def grid(
        self,
        configs: Sequence[SpecConfig],
        batch: np.ndarray,
        context: np.ndarray,
        drafts: np.ndarray | None = None,
    ) -> np.ndarray:
        """Compute ms of a round, `[configs, *broadcast(batch, context)]`, as `Roofline.grid` does.

        context  tokens of the whole batch
        """
        surfaces = [self._surface(config) for config in configs]
        if drafts is None:
            return np.stack([surface.ms(batch, context) for surface in surfaces])
        each = [drafts] if len(surfaces) == 1 else drafts[:, None]
        rows = []
        for surface, count in zip(surfaces, each, strict=True):
            if surface.config.off:
                rows.append(np.stack([surface.ms(batch, context)] * len(count)))
            else:
                rows.append(surface.uneven(batch, context, count, self._undrafted))
        return np.concatenate(rows)

    def ms(self, config: SpecConfig, batch: float, context: float) -> float:
        return float(self._surface(config).ms(np.array(batch), np.array(context)))

    def prefill_ms(self, tokens: float, batch: int = 1) -> float:
        """Estimate the ms of a prefill of `tokens` new tokens, from the nearest measured batch.

        It is linear between measured token counts, and continues with the last slope. Raises CostTableError without
        prefill rows.
        """
        tp = self.tp
        if not self.prefill:
            raise CostTableError(
                f"{self.provenance.model}: no prefill row for tp={tp}; measure with `rlspec profile`"
            )
        nearest = min(self.prefill, key=lambda row: abs(row.batch - batch)).batch
        rows = [row for row in self.prefill if row.batch == nearest]
        counts = np.array([row.tokens for row in rows], float)
        ms = np.array([row.ms for row in rows])
        if len(rows) == 1 or tokens <= counts[-1]:
            return float(np.interp(tokens, counts, ms))
        slope = max((ms[-1] - ms[-2]) / (counts[-1] - counts[-2]), 0.0)
        return float(ms[-1] + slope * (tokens - counts[-1]))

    def fit_error(self) -> float:
        """Return the median relative error of the fitted roofline on the measured points."""
        return self._fit[1]

    # Files

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "units": dict(UNITS),
            "provenance": asdict(self.provenance),
            "switch_ms": self.switch_ms,
            "catch_up_ms": self.catch_up_ms,
            "rounds": [round_json(row) for row in self.rounds],
            "prefill": [asdict(row) for row in self.prefill],
            "unverified": [round_json(row) for row in self.unverified],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "cost table") -> CostTable:
        """Make the table that `to_json` returned. Raises CostTableError, which names `source` and the field."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise CostTableError(
                f"{source}: not a cost table (expected schema {SCHEMA!r}); write one with `rlspec profile`"
            )
        for name, expected in (("version", VERSION), ("units", UNITS)):
            if data.get(name) != expected:
                raise CostTableError(
                    f"{source}: {name} {short(data.get(name))}, but this release reads {name} {expected}"
                )
        for name in sorted(data.keys() - _KEYS):
            raise CostTableError(
                f"{source}: unknown field {short(name)}; expected {', '.join(sorted(_KEYS))}"
            )
        for name in _REQUIRED:
            if name not in data:
                raise CostTableError(f"{source}: no field {name!r}")
        provenance = read(Provenance, data["provenance"], f"{source}: provenance")
        rounds = [read_round(*found) for found in _listed(data, "rounds", source)]
        prefill = [read(PrefillCost, *found) for found in _listed(data, "prefill", source)]
        unverified = [read_round(*found) for found in _listed(data, "unverified", source)]
        switch_ms = read_number("switch_ms", data.get("switch_ms", 0.0), source)
        catch_up_ms = read_number("catch_up_ms", data.get("catch_up_ms", 0.0), source)
        try:
            return cls(provenance, rounds, prefill, switch_ms, catch_up_ms, unverified)
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

    @cached_property
    def _fit(self) -> tuple[Roofline, float]:
        return Roofline.fit((row.config, *_point(row), row.ms) for row in self._rows)

    @cached_property
    def _surfaces(self) -> dict[SpecConfig, _Surface]:
        return self._surfaces_of(self._rows)

    @cached_property
    def _undrafted(self) -> _Surface:
        """Return the surface of rounds that verify no draft."""
        surfaces = self._surfaces_of(self.unverified, verified=0.0)
        return surfaces[max(surfaces)]

    def _surfaces_of(
        self, rounds: Iterable[RoundCost], verified: float | None = None
    ) -> dict[SpecConfig, _Surface]:
        points: dict[SpecConfig, dict[Point, float]] = {}
        for row in rounds:
            points.setdefault(row.config, {})[_point(row)] = row.ms
        surfaces = {}
        for config, measured in points.items():
            surfaces[config] = _Surface(config, measured, self._fit[0], verified)
        return surfaces

    def _surface(self, config: SpecConfig) -> _Surface:
        surface = self._surfaces.get(config)
        if surface is None:
            configs = ", ".join(map(str, self.configs()))
            raise CostTableError(
                f"cost table holds no {config} at tp={self.tp}; it holds {configs}"
            )
        return surface


class _Surface:
    """ms of one configuration by batch and context: a roofline, times the ratio that was measured near.

    The logarithm of the ratio is linear in the mean context, and in the logarithm of the batch. It is that of the
    nearest point outside the measured ones.
    """

    def __init__(
        self,
        config: SpecConfig,
        points: Mapping[Point, float],
        model: Roofline,
        verified: float | None = None,
    ) -> None:
        self.config = config
        self.model = model
        ordered = sorted(points)
        batch, context = np.array(ordered, float).T
        ms = np.array([points[point] for point in ordered])
        drafts = None if verified is None else np.array([verified])
        modelled = model.grid([config], batch, context, drafts)[0]
        ratio = np.log(ms / modelled)
        self.batches = np.unique(batch)
        # of each batch: mean contexts, logarithms of ratios
        self.rows = []
        for measured in self.batches:
            here = batch == measured
            self.rows.append((context[here] / measured, ratio[here]))

    def ms(self, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        batch, context = np.broadcast_arrays(np.asarray(batch, float), np.asarray(context, float))
        ratio = self._log_ratio(batch, context)
        ms: np.ndarray = self.model.grid([self.config], batch, context)[0] * np.exp(ratio)
        return ms

    def uneven(
        self, batch: np.ndarray, context: np.ndarray, drafts: np.ndarray, undrafted: _Surface
    ) -> np.ndarray:
        """Return ms `[n]` of rounds of one batch that verify `drafts [n]` of a request on average.

        undrafted  of rounds that verify none. Between them and rounds that verify all, the ratio is linear
        """
        share = drafts / max(self.config.num_draft_tokens - 1, 1)
        none = undrafted._log_ratio(batch, context)
        every = self._log_ratio(batch, context)
        ratio = none + share * (every - none)
        ms: np.ndarray = self.model.grid([self.config], batch, context, drafts) * np.exp(ratio)
        return ms

    def _log_ratio(self, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        at_batches = np.stack([np.interp(context / batch, *row) for row in self.rows])
        last = len(self.batches) - 1
        place = np.interp(np.log(batch), np.log(self.batches), np.arange(last + 1))
        lower = np.minimum(place.astype(int), max(last - 1, 0))
        upper = np.minimum(lower + 1, last)
        low = np.take_along_axis(at_batches, lower[None], 0)[0]
        high = np.take_along_axis(at_batches, upper[None], 0)[0]
        ratio: np.ndarray = low + (place - lower) * (high - low)
        return ratio


def _point(row: RoundCost) -> Point:
    return row.batch, row.context_tokens


def _in_order(rounds: Iterable[RoundCost]) -> tuple[RoundCost, ...]:
    return tuple(sorted(rounds, key=lambda row: (row.tp, row.config, *_point(row))))


def _check_rows(rows: Sequence[RoundCost | PrefillCost]) -> None:
    points = set()
    for row in rows:
        point = str(row)
        if not row.ms >= LEAST_MS:
            raise CostTableError(f"{point}: ms={row.ms}, expected {LEAST_MS:g} or more")
        if isinstance(row, RoundCost) and row.context_tokens < row.batch:
            raise CostTableError(f"{point}: expected a context of at least one token each")
        if point in points:
            raise CostTableError(f"{point}: measured twice")
        points.add(point)


def _check_holes(rounds: Sequence[RoundCost]) -> None:
    """Raise CostTableError unless, at each TP, all configurations and OFF were measured at the same points."""
    measured: dict[int, dict[SpecConfig, set[Point]]] = {}
    for row in rounds:
        measured.setdefault(row.tp, {}).setdefault(row.config, set()).add(_point(row))
    for tp, of_config in measured.items():
        if OFF not in of_config:
            raise CostTableError(
                f"tp={tp}: no plain-decoding row (num_steps=0, topk=0): the cost of OFF is unknown"
            )
        everywhere = set().union(*of_config.values())
        for config, points in sorted(of_config.items()):
            for batch, context in sorted(everywhere - points):
                raise CostTableError(
                    f"hole at tp={tp} batch={batch} context={context}: {config} was not measured there"
                )


def _listed(data: Mapping[str, Any], name: str, source: str) -> list[tuple[object, str]]:
    """Return the elements of a list field, each with its place for an error. Raises CostTableError."""
    rows = data.get(name, [])
    if not isinstance(rows, list):
        raise CostTableError(f"{source}: {name}={short(rows)}, expected a list")
    return [(row, f"{source}: {name}[{index}]") for index, row in enumerate(rows)]


def _one_row_a_line(data: Mapping[str, Any]) -> str:
    """Return JSON with one element of a list per line, so that people can read and compare files."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            text = f"[\n  {rows}\n ]" if rows else "[]"
        parts.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"

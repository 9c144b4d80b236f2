"""Measured durations of decode rounds at several tensor-parallel sizes, which `benchmarks/round_costs.py` writes.

The file is JSON. `rounds` is a list of [tensor-parallel size, requests, context tokens of all requests, drafts, ms],
and `prefill` a list of [tensor-parallel size, tokens, ms]. Other fields say where it was measured, and are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_rlspec import files
from megatron_rlspec.types import SpecConfig

# columns, and the least number in each
ROUND = {"tp": 1, "requests": 1, "context tokens": 1, "drafts": 0, "ms": 1e-9}
PREFILL = {"tp": 1, "tokens": 1, "ms": 1e-9}
MOST = 1e12


class RoundCostError(ValueError):
    """Durations of rounds that cannot be used. The message is one line: what is wrong, what was expected, where."""

    exit_code = 2


class RoundCosts:
    """Durations at one tensor-parallel size, interpolated linearly between those that were measured.

    Beyond the largest measured number of requests or tokens, the last slope goes on.

    rounds   measured: [requests, context tokens of all requests, drafts, ms] each
    prefill  measured: [tokens, ms] each
    """

    def __init__(
        self, rounds: Iterable[Sequence[float]], prefill: Iterable[tuple[float, float]] = ()
    ) -> None:
        # ms by drafts, requests, and context tokens of one request
        self._ms: dict[int, dict[float, dict[float, float]]] = {}
        for requests, context, drafts, ms in rounds:
            of_requests = self._ms.setdefault(int(drafts), {})
            of_requests.setdefault(requests, {})[context / requests] = ms
        self._prefill = dict(prefill)

    def configs(self) -> tuple[SpecConfig, ...]:
        """Return the configurations measured, OFF first."""
        return tuple(SpecConfig.of(k) for k in sorted(self._ms))

    def grid(
        self, configs: Sequence[SpecConfig], batch: np.ndarray, context: np.ndarray
    ) -> np.ndarray:
        """Return ms of a round `[configs, n]` of `batch` [n] requests with `context` [n] tokens in all."""
        return np.array([self._row(config.num_steps, batch, context / batch) for config in configs])

    def _row(self, drafts: int, batch: np.ndarray, length: np.ndarray) -> list[float]:
        of_requests = self._ms[drafts]
        at_length = np.array([_line(line, length) for line in of_requests.values()])
        ms = []
        for requests, column in zip(batch, at_length.T, strict=True):
            there = dict(zip(of_requests, column, strict=True))
            ms.append(float(_line(there, requests)))
        return ms

    def prefill_ms(self, tokens: float) -> float:
        """Return ms to compute the caches of so many tokens; infinite if no prefill was measured."""
        return float(_line(self._prefill, tokens)) if self._prefill else math.inf


def _line(points: dict[float, float], x: float | np.ndarray) -> np.ndarray:
    """Return y at x of `points` of x and y. Beyond the largest x the last slope goes on."""
    xs = sorted(points)
    ys = [points[known] for known in xs]
    y = np.asarray(np.interp(x, xs, ys))
    if len(xs) > 1:
        slope = max((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), 0.0)
        y = y + slope * np.maximum(np.asarray(x) - xs[-1], 0.0)
    return y


def read(path: str | Path, sizes: Iterable[int]) -> dict[int, RoundCosts]:
    """Return the durations at each of these tensor-parallel sizes. Raises RoundCostError."""
    try:
        data = files.read_json(path)
    except files.FileError as error:
        raise RoundCostError(str(error)) from None
    if not isinstance(data, dict) or "rounds" not in data:
        raise RoundCostError(f"{path}: no `rounds`; expected a file of benchmarks/round_costs.py")
    rounds = data["rounds"]
    prefill = data.get("prefill", [])
    _check(f"{path}: rounds", rounds, ROUND)
    _check(f"{path}: prefill", prefill, PREFILL)
    costs = {}
    for tp in sizes:
        of_size = [row[1:] for row in rounds if row[0] == tp]
        if not of_size:
            measured = ", ".join(str(size) for size in sorted({int(row[0]) for row in rounds}))
            raise RoundCostError(
                f"{path}: no round at tensor-parallel size {tp}; it holds {measured or 'none'}"
            )
        costs[tp] = RoundCosts(of_size, [row[1:] for row in prefill if row[0] == tp])
    return costs


def _check(name: str, rows: object, columns: Mapping[str, float]) -> None:
    """Raise RoundCostError for rows of other columns, or values below the least of their column."""
    expected = ", ".join(columns)
    if not isinstance(rows, list):
        raise RoundCostError(f"{name}: expected a list of [{expected}]")
    for number, row in enumerate(rows):
        whole = isinstance(row, list) and len(row) == len(columns)
        if not whole or not all(map(_fits, row, columns.values())):
            shown = " ".join(repr(row).split())[:60]
            raise RoundCostError(f"{name}[{number}] is {shown}; expected [{expected}]")


def _fits(value: object, least: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value <= MOST  # type: ignore[operator]

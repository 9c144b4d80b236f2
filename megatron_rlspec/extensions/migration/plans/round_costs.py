"""Read measured durations of decode rounds at several tensor-parallel sizes (`tail.cost_table`).

`benchmarks/round_costs.py` writes the file, as JSON. `rounds` is a list of [tensor-parallel size, requests, context
tokens of all requests, drafts of each request, ms], and `prefill` a list of [tensor-parallel size, tokens, ms]. Other
fields say where it was measured, and are not read here. `TPPlanner` compares sizes by these durations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_rlspec import files
from megatron_rlspec.types import SpecConfig

# the columns of a row in their order, and the least number in each
ROUND = {"tp": 1, "requests": 1, "context tokens": 1, "drafts": 0, "ms": 1e-9}
PREFILL = {"tp": 1, "tokens": 1, "ms": 1e-9}
MOST_VALUE = 1e12  # in any column: a larger number, or infinity, is a damaged file


class RoundCostError(ValueError):
    """Durations of rounds that cannot be used. The message is one line: what is wrong, what was expected, where."""

    exit_code = 2


class RoundCosts:
    """Durations at one tensor-parallel size, interpolated linearly between those that were measured.

    Beyond the largest measured number of requests or tokens, the last slope goes on.

    rounds   measured: [requests, context tokens of all requests, drafts, ms] each
    prefill  measured: [tokens, ms] each

    Of rows that differ in ms only, the last one counts.
    """

    def __init__(
        self, rounds: Iterable[Sequence[float]], prefill: Iterable[tuple[float, float]] = ()
    ) -> None:
        # ms by drafts, requests, and context tokens of one request
        self._ms: dict[int, dict[float, dict[float, float]]] = {}
        for requests, context, drafts, ms in rounds:
            of_drafts = self._ms.setdefault(int(drafts), {})
            of_drafts.setdefault(requests, {})[context / requests] = ms
        self._prefill = dict(prefill)  # ms by tokens

    def configs(self) -> tuple[SpecConfig, ...]:
        """Return the configurations measured, OFF first."""
        return tuple(SpecConfig.of(k) for k in sorted(self._ms))

    def grid(
        self, configs: Sequence[SpecConfig], batch: np.ndarray, context: np.ndarray
    ) -> np.ndarray:
        """Return ms of a round, `[configs, n]`, as `pace.Cost` has it. `configs` must be among those of `configs()`.

        batch    `[n]` requests, at least 1 each
        context  `[n]` context tokens of all requests together
        """
        return np.array([self._row(config.num_steps, batch, context / batch) for config in configs])

    def _row(self, drafts: int, batch: np.ndarray, length: np.ndarray) -> list[float]:
        """Interpolate first over context tokens of a request (`length`), then over requests. Returns ms, `[n]`."""
        by_requests = self._ms[drafts]
        at_length = np.array([_interpolate(points, length) for points in by_requests.values()])
        ms = []
        # Transposed: for each of the n points, the ms at every measured number of requests.
        for requests, ms_of_point in zip(batch, at_length.T, strict=True):
            points = dict(zip(by_requests, ms_of_point, strict=True))
            ms.append(float(_interpolate(points, requests)))
        return ms

    def prefill_ms(self, tokens: float) -> float:
        """Return ms to compute the caches of so many tokens; infinite if no prefill was measured."""
        return float(_interpolate(self._prefill, tokens)) if self._prefill else math.inf


def _interpolate(points: dict[float, float], x: float | np.ndarray) -> np.ndarray:
    """Return y at x, in the shape of x, interpolated between points {x: y}.

    Below the least x, y is constant. Above the largest, the last slope goes on.
    """
    xs = sorted(points)
    ys = [points[measured_x] for measured_x in xs]
    y = np.asarray(np.interp(x, xs, ys))
    if len(xs) > 1:
        # Noise can make the last slope negative. Then y stays constant: more work never takes less time.
        slope = max((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), 0.0)
        y = y + slope * np.maximum(np.asarray(x) - xs[-1], 0.0)
    return y


def read(path: str | Path, sizes: Iterable[int]) -> dict[int, RoundCosts]:
    """Return the durations by tensor-parallel size, for each of `sizes`.

    Raises RoundCostError for a file that cannot be read or is malformed, and for a size without rounds.
    """
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
    """Raise RoundCostError for rows of other columns, or values outside [least, MOST_VALUE]. `columns` as ROUND."""
    expected = ", ".join(columns)
    if not isinstance(rows, list):
        raise RoundCostError(f"{name}: expected a list of [{expected}]")
    for number, row in enumerate(rows):
        whole = isinstance(row, list) and len(row) == len(columns)
        if not whole or not all(map(_fits, row, columns.values())):
            shown = " ".join(repr(row).split())[:60]
            raise RoundCostError(f"{name}[{number}] is {shown}; expected [{expected}]")


def _fits(value: object, least: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)  # bool is an int
    return is_number and least <= value <= MOST_VALUE  # type: ignore[operator]

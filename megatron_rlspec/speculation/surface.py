"""Latency surfaces: interpolation inside a measured grid, a fitted roofline outside it, and the repair of noise.

One surface holds the round cost of one (TP, config) over batch and context. Its rows are the measured batch sizes.
Along a row the cost is piecewise linear in context tokens (PAT, section 4). Between two batch sizes it is
interpolated at equal *mean* context per request. So every point of a measured rectangle (batch, mean length) is
interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import isotonic_regression

from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SpecConfig

Points = Mapping[tuple[int, int], float]  # (batch, context tokens of the whole batch) -> ms


def monotone(points: Points) -> dict[tuple[int, int], float]:
    """Return `points` without the noise that makes a larger batch or a longer context cheaper.

    Batches are compared only at equal mean context. The function pools both directions in turn until nothing changes.
    """
    fixed = dict(points)
    lines: dict[tuple[str, float], list[tuple[int, int]]] = {}
    for batch, context in sorted(points):
        lines.setdefault(("context", batch), []).append((batch, context))
        lines.setdefault(("batch", context / batch), []).append((batch, context))
    for _ in range(100):
        moved = 0.0
        for keys in lines.values():
            for key, value in zip(
                keys, isotonic_regression([fixed[k] for k in keys]).x.tolist(), strict=True
            ):
                moved = max(moved, abs(value - fixed[key]) / fixed[key])
                fixed[key] = float(value)
        if moved < 1e-9:
            break
    return fixed


class Surface:
    """ms by (batch, context tokens) for one (TP, config). `model` is fitted to all configurations of this TP."""

    def __init__(self, config: SpecConfig, points: Points, model: Roofline) -> None:
        self.config = config
        self.model = model
        rows: dict[int, list[tuple[float, float]]] = {}
        for (batch, context), ms in sorted(points.items()):
            rows.setdefault(batch, []).append((context / batch, ms))
        self.batches = np.array(sorted(rows), float)
        self.rows = [np.array(rows[b]).T for b in sorted(rows)]  # per batch: mean lengths, ms

    def __call__(self, batch: np.ndarray, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute (ms, extrapolated), each of the broadcast shape of `batch` and `context`.

        Outside the grid the result is the nearest measured cost times the ratio of the fitted model, so the cost is
        continuous at the edge. A context below the shortest measured one costs as much as that one, because the fitted
        slope is too noisy there.
        """
        batch, context = np.broadcast_arrays(np.asarray(batch, float), np.asarray(context, float))
        length = context / batch
        along = np.empty((len(self.rows), *batch.shape))
        beyond = np.empty(along.shape, bool)
        for i, (lengths, ms) in enumerate(self.rows):
            near = np.clip(length, lengths[0], lengths[-1])
            beyond[i] = length != near
            longer = np.maximum(length, lengths[0])
            along[i] = np.interp(near, lengths, ms) * self._ratio(
                self.batches[i], longer, self.batches[i], near
            )
        near_batch = np.clip(batch, self.batches[0], self.batches[-1])
        upper = np.clip(np.searchsorted(self.batches, near_batch), 1, max(len(self.batches) - 1, 1))
        upper = np.minimum(upper, len(self.batches) - 1)
        lower = np.maximum(upper - 1, 0)
        span = np.where(upper > lower, self.batches[upper] - self.batches[lower], 1.0)
        share = np.where(upper > lower, (near_batch - self.batches[lower]) / span, 0.0)
        low = np.take_along_axis(along, lower[None], 0)[0]
        high = np.take_along_axis(along, upper[None], 0)[0]
        longer = np.maximum(
            length, np.interp(near_batch, self.batches, [lengths[0] for lengths, _ in self.rows])
        )
        ms = (low + share * (high - low)) * self._ratio(batch, longer, near_batch, longer)
        outside = (batch != near_batch) | np.where(
            share < 1, np.take_along_axis(beyond, lower[None], 0)[0], False
        )
        outside |= np.where(share > 0, np.take_along_axis(beyond, upper[None], 0)[0], False)
        return ms, outside

    def _ratio(
        self, batch: np.ndarray, length: np.ndarray, near_batch: np.ndarray, near: np.ndarray
    ) -> np.ndarray:
        at = self.model.grid([self.config], batch, batch * length)[0]
        base = self.model.grid([self.config], near_batch, near_batch * near)[0]
        return np.where(base > 0, at / np.maximum(base, 1e-30), 1.0)


def shrunk(
    table: Mapping[SpecConfig, Points], spreads: Mapping[SpecConfig, Points], model: Roofline
) -> dict[SpecConfig, dict[tuple[int, int], float]]:
    """Return the points without the differences between configurations that the spreads do not let one tell.

    table, spreads: by configuration, ms and its spread at the same points; model: fitted to them

    At each point the costs of the configurations are compared, as logarithms, with their mean and with what the model
    says. A difference e from the model, with relative spread s, becomes e * t² / (t² + s²): t² is the variance that the
    table's differences have beyond their spreads (empirical Bayes). What slows all configurations alike stays.
    """
    configs = list(table)
    points = list(table[configs[0]])
    batch, context = np.array(points, float).T
    measured = np.log([[table[c][p] for p in points] for c in configs])
    expected = np.log(model.grid(configs, batch, context))
    noise = np.array([[spreads[c][p] / table[c][p] for p in points] for c in configs]) ** 2
    difference = measured - expected
    common = difference.mean(axis=0)
    difference = difference - common
    true = max(float(np.mean(difference**2 - noise * (1 - 1 / len(configs)))), 0.0)
    kept = np.divide(true, true + noise, out=np.ones_like(noise), where=noise > 0)
    fixed = np.exp(expected + common + kept * difference)
    return {
        c: dict(zip(points, row.tolist(), strict=True))
        for c, row in zip(configs, fixed, strict=True)
    }

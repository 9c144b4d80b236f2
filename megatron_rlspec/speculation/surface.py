"""Latency surfaces: interpolation inside a measured grid, a fitted model outside it, and the repair of noise.

One surface holds the round cost of one (TP, config) over batch and context. Its rows are the measured batch sizes.
Along a row the cost is piecewise linear in context tokens (PAT, section 4). Between rows it is linear at equal *mean*
context per request, so that every point of a measured rectangle (batch, mean length) is interpolated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rlspec.types import SpecConfig

Points = Mapping[tuple[int, int], float]  # (batch, context tokens of the whole batch) -> ms


RIDGES = 2.0 ** np.arange(-6, 13)  # tokens


def features(config: SpecConfig, batch: np.ndarray, context: np.ndarray, ridge: float) -> np.ndarray:
    """Compute the terms of a round's cost, `[..., 7]`; the fitted model is linear in them (docs/design.md, Round cost).

    In order: host, the target's pass, context, launches of drafter passes (the first, further ones), and these passes.
    A pass over n tokens takes (1 + (n / ridge) ** 4) ** 0.25: as long as reading the weights, up to the ridge.
    """
    batch, context = np.broadcast_arrays(np.asarray(batch, float), np.asarray(context, float))
    drafts = 0.0 if config.off else 1.0
    passes = max(config.num_steps - 1, 0)
    one = np.ones_like(batch)
    verify = (1 + (batch * (config.num_draft_tokens or 1) / ridge) ** 4) ** 0.25
    draft = (1 + (batch * config.topk / ridge) ** 4) ** 0.25
    return np.stack((one, verify, context, drafts * one, passes * one, drafts * verify, passes * draft), axis=-1)


@dataclass(frozen=True)
class Model:
    """A roofline fitted to a table: coefficients `[7]` of `features`, and the ridge in tokens."""

    coefficients: np.ndarray
    ridge: float

    def ms(self, config: SpecConfig, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Compute ms of a round, of the broadcast shape of `batch` and `context`."""
        return np.asarray(features(config, batch, context, self.ridge) @ self.coefficients)


def fit_nonnegative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Solve least squares with coefficients >= 0 (active set of Lawson and Hanson): x `[n, m]`, y `[n]` -> `[m]`."""
    n_terms = x.shape[1]
    scale = np.maximum(np.abs(x).max(axis=0), 1e-30)
    x = x / scale
    active = np.zeros(n_terms, bool)
    w = np.zeros(n_terms)
    for _ in range(3 * n_terms):
        gradient = x.T @ (y - x @ w)
        gradient[active] = -np.inf
        if gradient.max() <= 1e-10:
            break
        active[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(n_terms)
            trial[active] = np.linalg.lstsq(x[:, active], y, rcond=None)[0]
            negative = active & (trial <= 0)
            if not negative.any():
                break
            step = np.min(w[negative] / np.maximum(w[negative] - trial[negative], 1e-30))
            w = w + step * (trial - w)
            active &= w > 1e-12
            w[~active] = 0.0
        w = trial
    return np.asarray(w / scale)


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> np.ndarray:
    """Return the nondecreasing sequence that is nearest in weighted least squares, by pooling adjacent violators."""
    blocks: list[list[float]] = []  # [mean, weight, count]
    for value, weight in zip(values, np.ones(len(values)) if weights is None else weights, strict=True):
        blocks.append([float(value), float(weight), 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight, count = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
            last[1] += weight
            last[2] += count
    return np.repeat([b[0] for b in blocks], [int(b[2]) for b in blocks])


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
            for key, value in zip(keys, isotonic([fixed[k] for k in keys]), strict=True):
                moved = max(moved, abs(value - fixed[key]) / fixed[key])
                fixed[key] = float(value)
        if moved < 1e-9:
            break
    return fixed


class Surface:
    """ms by (batch, context tokens) for one (TP, config). `model` is fitted to all configurations of this TP."""

    def __init__(self, config: SpecConfig, points: Points, model: Model) -> None:
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
            along[i] = np.interp(near, lengths, ms) * self._ratio(self.batches[i], longer, self.batches[i], near)
        near_batch = np.clip(batch, self.batches[0], self.batches[-1])
        upper = np.clip(np.searchsorted(self.batches, near_batch), 1, max(len(self.batches) - 1, 1))
        upper = np.minimum(upper, len(self.batches) - 1)
        lower = np.maximum(upper - 1, 0)
        span = np.where(upper > lower, self.batches[upper] - self.batches[lower], 1.0)
        share = np.where(upper > lower, (near_batch - self.batches[lower]) / span, 0.0)
        low = np.take_along_axis(along, lower[None], 0)[0]
        high = np.take_along_axis(along, upper[None], 0)[0]
        longer = np.maximum(length, np.interp(near_batch, self.batches, [lengths[0] for lengths, _ in self.rows]))
        ms = (low + share * (high - low)) * self._ratio(batch, longer, near_batch, longer)
        outside = (batch != near_batch) | np.where(share < 1, np.take_along_axis(beyond, lower[None], 0)[0], False)
        outside |= np.where(share > 0, np.take_along_axis(beyond, upper[None], 0)[0], False)
        return ms, outside

    def _ratio(self, batch: np.ndarray, length: np.ndarray, near_batch: np.ndarray, near: np.ndarray) -> np.ndarray:
        at = self.model.ms(self.config, batch, batch * length)
        base = self.model.ms(self.config, near_batch, near_batch * near)
        return np.where(base > 0, at / np.maximum(base, 1e-30), 1.0)


def fit_model(samples: Iterable[tuple[SpecConfig, int, int, float]]) -> tuple[Model, float]:
    """Fit a `Model` to (config, batch, context, ms); return it and the median relative error."""
    by_config: dict[SpecConfig, list[tuple[float, float, float]]] = {}
    for config, batch, context, duration in samples:
        by_config.setdefault(config, []).append((batch, context, duration))
    columns = {config: np.array(points, float).T for config, points in by_config.items()}
    ms = np.concatenate([points[2] for points in columns.values()])
    best: tuple[float, Model, float] | None = None
    for ridge in RIDGES.tolist():
        x = np.concatenate([features(config, points[0], points[1], ridge) for config, points in columns.items()])
        # The fit minimises relative errors, so a round of 2 ms counts as much as one of 200 ms.
        coefficients = fit_nonnegative(x / ms[:, None], np.ones(len(ms)))
        errors = x @ coefficients / ms - 1
        if best is None or float(errors @ errors) < best[0]:
            best = float(errors @ errors), Model(coefficients, ridge), float(np.median(np.abs(errors)))
    assert best is not None
    return best[1], best[2]


def shrunk(
    table: Mapping[SpecConfig, Points], spreads: Mapping[SpecConfig, Points], model: Model
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
    expected = np.log([model.ms(c, batch, context) for c in configs])
    noise = np.array([[spreads[c][p] / table[c][p] for p in points] for c in configs]) ** 2
    difference = measured - expected
    common = difference.mean(axis=0)
    difference = difference - common
    true = max(float(np.mean(difference**2 - noise * (1 - 1 / len(configs)))), 0.0)
    kept = np.divide(true, true + noise, out=np.ones_like(noise), where=noise > 0)
    fixed = np.exp(expected + common + kept * difference)
    return {c: dict(zip(points, row.tolist(), strict=True)) for c, row in zip(configs, fixed, strict=True)}

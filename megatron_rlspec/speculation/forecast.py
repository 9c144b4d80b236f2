"""Forecast the acceptance of the next rollout: the trainer's prediction, calibrated by the rollouts before.

`losses/predict.py` makes the prediction from the logits of a training step. Shapes: D depths, K step counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_rlspec.speculation.acceptance import Prediction, expected_tokens
from megatron_rlspec.types import RoundStats, SpecConfig

GAINS = (0.1, 0.2, 0.4, 1.0)  # of exponential smoothing; 1 keeps the last value only
TRUST = (0.0, 0.5, 1.0)  # share of a change in the prediction that enters the forecast
FIRST_WEIGHTS = (9.0, 3.0, 1.0)  # of each trust before any error is known: observations weigh more than predictions
MEMORY = 0.95  # factor on past errors, per step
ENOUGH = 20.0  # information (n a (1 - a)) at which a depth's observed log-odds count for half
NOISES = 2.0  # steps of sampling noise that are added to the errors of every smoother


class Calibration:
    """Calibrates predicted rates, learns from each rollout, and reports its errors.

    A prediction is biased, because its forward ran before the optimizer step, and it has the noise of one rollout's
    texts. The bias changes slowly. Per depth and in log-odds, the forecast is

        level + trust · (predicted - before)

    where level is the smoothed observed rate and before the smoothed predicted rate. Trust 1 is the prediction without
    its bias. Trust 0 ignores the prediction. Gain 1 with trust 0 is the last observed rate. All pairs of a gain and a
    trust run side by side. Their forecasts are averaged with weights that fall with their squared errors in tokens per
    round (Bayesian model averaging).
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be positive")
        self.level = np.zeros((len(GAINS), depth))
        self.before = np.zeros((len(GAINS), depth))
        self.steps = np.zeros(depth)  # rollouts that reached the depth
        self.loss = np.zeros((len(GAINS), len(TRUST)))  # squared errors; they fade with MEMORY
        self.noise = 0.0  # variance of the last rollout's mean tokens per round, from sampling only
        self.scored = 0.0  # errors in `loss`; they fade in the same way
        self.last: list[float] | None = None  # observed rates of the previous rollout

    def apply(self, rates: Sequence[float]) -> list[float]:
        """Return the calibrated rates a_1.. of predicted ones."""
        corrected = _sigmoid(np.einsum("gt,gtd->d", self.weights(), self._log_odds(rates)))
        return [float(rate) for rate in corrected]

    def weights(self) -> np.ndarray:
        """Return the weight of each gain and trust in the forecast, `[gains, trusts]`, summing to 1."""
        loss = self.loss + NOISES * self.noise
        variance = loss.min() / (self.scored + NOISES)
        weights = np.array(FIRST_WEIGHTS) * (np.exp((loss.min() - loss) / (2 * variance)) if variance > 0 else 1.0)
        weights = np.broadcast_to(weights, loss.shape)
        return np.asarray(weights / weights.sum())

    def update(self, prediction: Prediction, observed: Mapping[int, ArrayLike]) -> dict[str, float]:
        """Compare `prediction` with the rollout it was made for, then learn from it. Returns metrics.

        `observed[k][i]` requests accepted i drafts in rounds of k steps. Step counts not predicted are left out.
        `last_value_error` is the error of assuming the previous rollout's rates.
        """
        known = {k: np.asarray(h, float) for k, h in observed.items() if k in prediction.steps and np.sum(h) > 0}
        if not known:
            return {}
        rounds = {k: float(h.sum()) for k, h in known.items()}
        total = sum(rounds.values())
        emitted = {k: 1.0 + np.arange(len(h)) for k, h in known.items()}
        seen = sum(float(known[k] @ emitted[k]) for k in known) / total
        raw = {k: prediction.rates(k) for k in known}
        guess = self._mean_tokens({k: self.apply(r) for k, r in raw.items()}, rounds)
        metrics = {
            "predicted_tokens": guess,
            "uncalibrated_tokens": self._mean_tokens(raw, rounds),
            "observed_tokens": seen,
            "error": guess - seen,
        }
        if self.last is not None:
            metrics["last_value_error"] = self._mean_tokens(dict.fromkeys(known, self.last), rounds) - seen
            self.noise = sum(float(known[k] @ (emitted[k] - seen) ** 2) for k in known) / total**2
            self._score(raw, rounds, seen)
        self._learn(known, raw)
        return metrics

    def _log_odds(self, rates: Sequence[float]) -> np.ndarray:
        """Return the forecast of every smoother, `[gains, trusts, depths]`; depths never observed stay as predicted."""
        predicted = _logit(np.array(rates))
        depth = len(self.steps)
        change = predicted[:depth] - self.before[:, : len(rates)]
        shift = (self.level - self.before)[:, None, : len(rates)] + (np.array(TRUST)[:, None] - 1) * change[:, None]
        shift = np.where(self.steps[: len(rates)] > 0, shift, 0.0)
        beyond = np.repeat(shift[..., -1:], max(len(rates) - depth, 0), axis=-1)
        return np.asarray(predicted + np.concatenate([shift, beyond], axis=-1))

    def _score(self, raw: Mapping[int, Sequence[float]], rounds: Mapping[int, float], seen: float) -> None:
        rates = {k: _sigmoid(self._log_odds(r)) for k, r in raw.items()}
        self.loss *= MEMORY
        self.scored = MEMORY * self.scored + 1
        for at in np.ndindex(*self.loss.shape):
            self.loss[at] += (self._mean_tokens({k: r[at] for k, r in rates.items()}, rounds) - seen) ** 2

    def _mean_tokens(self, rates: Mapping[int, Sequence[float]], rounds: Mapping[int, float]) -> float:
        mean = {k: expected_tokens(SpecConfig(k), r) for k, r in rates.items()}
        return sum(rounds[k] * mean[k] for k in rounds) / sum(rounds.values())

    def _learn(self, known: Mapping[int, np.ndarray], raw: Mapping[int, Sequence[float]]) -> None:
        """Update every smoother at every depth, from all step counts that reach it, weighted by their drafts."""
        last: list[float] = []
        for d in range(max(known)):
            draws = {k: float(h[d:].sum()) for k, h in known.items() if k > d}
            n = sum(draws.values())
            if n == 0:
                break
            rate = sum(float(known[k][d + 1 :].sum()) for k in draws) / n
            last.append(rate)
            if d < len(self.steps):
                predicted = _logit(sum(draws[k] * raw[k][d] for k in draws) / n)
                if self.steps[d] == 0:
                    self.level[:, d] = self.before[:, d] = predicted
                self.steps[d] += 1
                rate = (rate * n + 0.5) / (n + 1)
                information = n * rate * (1 - rate)  # of a logit: small if nearly all drafts are accepted
                pull = np.maximum(GAINS, 1 / self.steps[d]) * information / (information + ENOUGH)
                self.level[:, d] += pull * (_logit(rate) - self.level[:, d])
                self.before[:, d] += pull * (predicted - self.before[:, d])
        self.last = last or self.last

    def to_json(self) -> dict[str, Any]:
        """Return the state, for `from_json`."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return {**arrays, "noise": self.noise, "scored": self.scored, "last": self.last}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Restore the state that `to_json` returned. Raises ValueError."""
        calibration = cls(len(data["steps"]))
        for name in _ARRAYS:
            value = np.array(data[name], float)
            if value.shape != getattr(calibration, name).shape:
                raise ValueError(f"calibration state: {name} has shape {value.shape}, from another release")
            setattr(calibration, name, value)
        calibration.noise = float(data["noise"])
        calibration.scored = float(data["scored"])
        calibration.last = None if data["last"] is None else [float(x) for x in data["last"]]
        return calibration


_ARRAYS = ("level", "before", "steps", "loss")


class Forecast:
    """Holds the prediction of the next rollout, and the calibration learned from the finished rollouts."""

    def __init__(self, depth: int) -> None:
        self.calibration = Calibration(depth)
        self.pending: Prediction | None = None

    def score(self, stats: Iterable[RoundStats]) -> dict[str, float]:
        """Compare the pending prediction with the rounds of the rollout that has ended. Returns `predict/…` metrics."""
        observed: dict[int, np.ndarray] = {}
        for s in stats:
            if k := s.config.num_steps:
                histogram = observed.setdefault(k, np.zeros(k + 1))
                histogram[: len(s.accepted)] += s.accepted
        if self.pending is None or not observed:
            return {}
        return {f"predict/{name}": x for name, x in self.calibration.update(self.pending, observed).items()}

    def expect(self, prediction: Prediction | None) -> dict[str, float]:
        """Keep the prediction of the next rollout. Returns its calibrated tokens per round, by step count."""
        self.pending = prediction
        if prediction is None:
            return {}
        rates = {k: self.calibration.apply(prediction.rates(k)) for k in prediction.steps}
        return {f"predict/next_tokens_k{k}": expected_tokens(SpecConfig(k), r) for k, r in rates.items()}

    def rates(self) -> list[float] | None:
        """Return calibrated a_1.. of the next rollout, at the deepest predicted step count, if one is predicted."""
        return None if self.pending is None else self.calibration.apply(self.pending.rates())

    def to_json(self) -> dict[str, Any]:
        """Return the state, for `from_json`."""
        pending = self.pending
        return {
            "calibration": self.calibration.to_json(),
            "pending": pending and [list(pending.steps), pending.reached.tolist(), pending.accepted.tolist()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Forecast:
        """Restore the state that `to_json` returned. Raises ValueError."""
        forecast = cls(1)
        forecast.calibration = Calibration.from_json(data["calibration"])
        if data["pending"]:
            forecast.pending = Prediction.of_sums(*data["pending"])
        return forecast


def _logit(rate: Any) -> Any:
    rate = np.clip(rate, 1e-4, 1 - 1e-4)
    return np.log(rate / (1 - rate))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))

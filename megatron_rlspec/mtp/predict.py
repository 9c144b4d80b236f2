"""What the next rollout will accept, from the logits of the training forward that just ran.

Training sees every position once; an engine sees the positions at which its rounds start, and those crowd where drafts
fail, because an accepted draft is a start skipped. The mean over positions is therefore too high (2.41 against a true
1.71 tokens per round where half the text accepts with 0.95 and half with 0.1, at three steps). `walk` follows each
sequence instead: a round starts at its first position, ends after as many tokens as this very text would have had
accepted, and the next one starts there.

T positions in sequence order (context-parallel shards joined), D depths, K step counts. Row t, depth d speaks of the
drafter's prediction of token t + 1 + d, as `PackedBatch.drafter_*` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.types import RoundStats, SpecConfig, Verifier


def target_probabilities(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1
) -> torch.Tensor:
    """What an engine samples from, `[N, V]`: softmax at a temperature, cut to top-k and top-p, renormalised.

    Temperature 0 is greedy. A token stays while the mass of the likelier ones is at most `top_p`, as in SGLang.
    """
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = (logits / temperature).softmax(-1)
    if top_p >= 1 and top_k < 0:
        return p
    ordered, tokens = p.sort(dim=-1, descending=True, stable=True)
    drop = ordered.cumsum(-1) - ordered > top_p
    if top_k > 0:
        drop[..., top_k:] = True
    ordered = ordered.masked_fill(drop, 0.0)
    return torch.zeros_like(p).scatter_(-1, tokens, ordered / ordered.sum(-1, keepdim=True))


def accept_probabilities(
    target: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    verifier: Verifier = "position_keyed",
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(accept, reach), both `[N]`, of rows of one depth.

    target        what the engine samples the predicted token from, `[N, V]` (`target_probabilities`)
    draft_logits  the drafter's, `[N, V]`; under rejection it proposes from their softmax at `temperature`, else argmax
    tokens        the token that the text has there, `[N]`

    `accept` is the probability that a draft of this depth is accepted, over what the target might have said; `reach`
    the probability that it was accepted given what it did say: what carries a round to the next depth. Both draw on
    the target's own sampling, so their means agree; the first varies less.
    """
    if verifier in ("position_keyed", "target_only"):
        best = draft_logits.argmax(-1)
        return target.gather(-1, best[:, None])[:, 0], (best == tokens).to(target.dtype)
    if verifier != "rejection":
        raise ValueError(f"verifier={verifier!r}; known: position_keyed, target_only, rejection")
    q = target_probabilities(draft_logits, temperature)
    p_token, q_token = (x.gather(-1, tokens[:, None])[:, 0] for x in (target, q))
    reach = (q_token / p_token.clamp_min(torch.finfo(p_token.dtype).tiny)).clamp(max=1.0)
    return torch.minimum(target, q).sum(-1), reach


@dataclass(frozen=True)
class Prediction:
    """Sums over round starts: `reached[i, d]` drafts of depth d + 1 were reached in rounds of `steps[i]`, of which
    `accepted[i, d]` were accepted. Add predictions of micro-batches; reduce both arrays over ranks."""

    steps: tuple[int, ...]
    reached: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of_sums(cls, steps: Sequence[int], reached: Sequence[float], accepted: Sequence[float]) -> Prediction:
        """From the two arrays flattened, as they come back from a reduction over ranks."""
        shape = (len(steps), max(steps))
        return cls(tuple(steps), np.array(reached).reshape(shape), np.array(accepted).reshape(shape))

    def __add__(self, other: Prediction) -> Prediction:
        if self.steps != other.steps:
            raise ValueError(f"predictions for steps {self.steps} and {other.steps} do not add")
        return Prediction(self.steps, self.reached + other.reached, self.accepted + other.accepted)

    def rates(self, num_steps: int | None = None) -> list[float]:
        """a_1..a_num_steps (of the deepest, if omitted); 0 where nothing was reached."""
        row = self.steps.index(num_steps) if num_steps is not None else int(np.argmax(self.steps))
        reached, accepted = self.reached[row], self.accepted[row]
        rates = np.divide(accepted, reached, out=np.zeros_like(accepted), where=reached > 0)
        return [float(rate) for rate in rates[: self.steps[row]]]

    def tokens_per_round(self, num_steps: int) -> float:
        return expected_tokens(SpecConfig(num_steps), self.rates(num_steps)) if num_steps else 1.0


def of_rows(
    rows: Mapping[str, torch.Tensor], depth: int, verifier: Verifier, *, sampled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(accept, reach), `[T, depth]`, from what `Student.rows` kept of a training step, `[depth * T]`, depth by depth.

    sampled  the rollout draws from the policy's softmax at the training temperature, unfiltered; otherwise (greedy,
             top-p, top-k) what was accepted is all that is known of what might have been, and the text itself tells it
    """
    if verifier == "rejection":
        if not sampled or "overlap" not in rows:
            raise ValueError("acceptance by rejection is predicted from a teacher's unfiltered distribution only")
        accept, reach = rows["overlap"], rows["label_ratio"].clamp(max=1.0)
    else:
        reach = rows["match"]
        accept = rows["argmax_prob"] if sampled and "argmax_prob" in rows else reach
    return accept.view(depth, -1).T, reach.view(depth, -1).T


def deepen(table: torch.Tensor, depth: int) -> torch.Tensor:
    """`[T, D]` to `[T, depth]`: below the deepest trained depth, its column one position on stands for the next.

    Row t, depth D + j and row t + j, depth D predict the same token. Of accept, reach and mask alike: a row whose
    shallower depths lie within one response is within it at the next one, too, if its successor is.
    """
    columns = list(table.unbind(1))
    while len(columns) < depth:
        last = columns[-1]
        columns.append(torch.cat([last[1:], torch.zeros_like(last[:1])]))
    return torch.stack(columns[:depth], 1)


def walk(accept: torch.Tensor, reach: torch.Tensor, mask: torch.Tensor, steps: Sequence[int]) -> Prediction:
    """Follow the rounds of each sequence at every step count; accept, reach, mask `[T, D]`, largest step at most D.

    `mask[t, d]` is 1 where depth d + 1 at t predicts a token that was generated (`drafter_targets`). A stretch of
    masked rows is one response, or one turn of it: its first position starts a round. What would be drafted past its
    end counts for nothing.
    """
    depth = accept.shape[1]
    if not (accept.shape == reach.shape == mask.shape):
        raise ValueError(f"accept {list(accept.shape)}, reach {list(reach.shape)} and mask {list(mask.shape)} differ")
    if not steps or min(steps) < 1 or max(steps) > depth:
        raise ValueError(f"steps={list(steps)} must lie between 1 and the {depth} depths of `accept`")
    valid = mask.detach().cpu().numpy() != 0
    alpha = np.where(valid, accept.detach().double().cpu().numpy(), 0.0)
    carried = np.cumprod(np.where(valid, reach.detach().double().cpu().numpy(), 0.0), axis=1)
    carried = np.concatenate([np.ones((len(carried), 1)), carried], axis=1)  # [T, D + 1]: depth d reached from t
    starts = _round_starts(valid[:, 0], carried, steps)
    weight = starts[:, :, None] * (carried[:, :-1] * valid)[:, None, :]  # [T, K, D]
    weight *= np.arange(depth)[None, None, :] < np.array(steps)[None, :, None]
    return Prediction(tuple(steps), weight.sum(0), (weight * alpha[:, None, :]).sum(0))


def _round_starts(inside: np.ndarray, carried: np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """The probability that a round starts at each position, `[T, K]`; all stretches advance together."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    first, length = edges[::2], edges[1::2] - edges[::2]
    order = np.argsort(-length, kind="stable")
    first, length = first[order], length[order]
    depth = carried.shape[1] - 1
    ends = np.zeros((len(carried), depth + 1, len(steps)))  # P(a round from t at steps[k] accepts exactly j)
    for k, most in enumerate(steps):
        ends[:, :most, k] = carried[:, :most] - carried[:, 1 : most + 1]
        ends[:, most, k] = carried[:, most]
    starts = np.zeros((len(carried), len(steps)))
    ahead = np.zeros((len(first), depth + 1, len(steps)))  # starts due at this position and the next `depth`
    ahead[:, 0] = 1.0
    running = np.searchsorted(-length, -np.arange(1, (length[0] if len(length) else 0) + 1), side="right")
    for offset, n in enumerate(running):
        at = first[:n] + offset
        now = starts[at] = ahead[:n, 0].copy()
        ahead[:n, :-1] = ahead[:n, 1:]
        ahead[:n, -1] = 0.0
        ahead[:n] += now[:, None, :] * ends[at]
    return starts


GAINS = (0.1, 0.2, 0.4, 1.0)  # of the smoothing; 1: the last value
TRUST = (0.0, 0.5, 1.0)  # share of a change in the prediction that is believed
PRIOR = (9.0, 3.0, 1.0)  # weight of each trust before any error was seen: to be believed, a prediction has to earn it
MEMORY = 0.95  # of past errors, per step
ENOUGH = 20.0  # information (n a (1 - a)) at which a depth's observed log-odds count for half
PRIOR_STEPS = 2.0  # steps' worth of sampling noise that every smoother is held to have erred by


class Calibration:
    """From the predicted to the calibrated rates of the next rollout, learnt online; keeps the score.

    The forward that predicts ran before the update it predicts across, so it is biased, slowly varying, and it sees one
    rollout's texts, whose noise it carries. In log-odds, per depth: level = smoothed observed rates, before = predicted
    ones smoothed alike; the forecast is level + trust (predicted - before). Trust 1 is the prediction with its bias
    tracked, trust 0 ignores it, and gain 1 with trust 0 is the last value. Every gain and trust runs; their forecasts
    are averaged with weights that fall with their squared errors in tokens per round (Bayesian model averaging).
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be positive")
        self.level = np.zeros((len(GAINS), depth))
        self.before = np.zeros((len(GAINS), depth))
        self.steps = np.zeros(depth)  # rollouts that reached the depth
        self.loss = np.zeros((len(GAINS), len(TRUST)))  # squared errors, forgotten with MEMORY
        self.noise = 0.0  # variance of observed tokens per round from the draws alone, the latest
        self.scored = 0.0  # errors in `loss`, forgotten alike
        self.last: list[float] | None = None  # rates that the previous rollout showed

    def apply(self, rates: Sequence[float]) -> list[float]:
        return _sigmoid(np.einsum("gt,gtd->d", self.weights(), self._log_odds(rates))).tolist()

    def weights(self) -> np.ndarray:
        """What each gain and trust counts in the forecast, `[gains, trusts]`, summing to 1."""
        loss = self.loss + PRIOR_STEPS * self.noise
        variance = loss.min() / (self.scored + PRIOR_STEPS)
        weights = np.array(PRIOR) * (np.exp((loss.min() - loss) / (2 * variance)) if variance > 0 else 1.0)
        weights = np.broadcast_to(weights, loss.shape)
        return weights / weights.sum()

    def update(self, prediction: Prediction, observed: Mapping[int, Sequence[int]]) -> dict[str, float]:
        """Score `prediction` by the rollout it was made for, then learn from it; returns metrics for the record.

        `observed[k][i]` requests accepted i drafts in rounds of k steps. Step counts not predicted are left out.
        `last_value_error` is what assuming the previous rollout's rates would have cost.
        """
        known = {k: np.asarray(h, float) for k, h in observed.items() if k in prediction.steps and sum(h) > 0}
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
        """`[gains, trusts, depths]`: every smoother's forecast; depths never observed stay as predicted."""
        predicted, depth = _logit(np.array(rates)), len(self.steps)
        change = predicted[:depth] - self.before[:, : len(rates)]
        shift = (self.level - self.before)[:, None, : len(rates)] + (np.array(TRUST)[:, None] - 1) * change[:, None]
        shift = np.where(self.steps[: len(rates)] > 0, shift, 0.0)
        beyond = np.repeat(shift[..., -1:], max(len(rates) - depth, 0), axis=-1)
        return predicted + np.concatenate([shift, beyond], axis=-1)

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
        """Depth by depth: the step counts that reach it, each against its own prediction, weighted by their draws."""
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
                information = n * rate * (1 - rate)  # a logit's: little where nearly all pass
                pull = np.maximum(GAINS, 1 / self.steps[d]) * information / (information + ENOUGH)
                self.level[:, d] += pull * (_logit(rate) - self.level[:, d])
                self.before[:, d] += pull * (predicted - self.before[:, d])
        self.last = last or self.last

    def to_json(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return {**arrays, "noise": self.noise, "scored": self.scored, "last": self.last}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        calibration = cls(len(data["steps"]))
        for name in _ARRAYS:
            value = np.array(data[name], float)
            if value.shape != getattr(calibration, name).shape:
                raise ValueError(f"calibration state: {name} has shape {value.shape}, from another release")
            setattr(calibration, name, value)
        calibration.noise, calibration.scored = float(data["noise"]), float(data["scored"])
        calibration.last = None if data["last"] is None else [float(x) for x in data["last"]]
        return calibration


_ARRAYS = ("level", "before", "steps", "loss")


class Forecast:
    """A prediction waiting for the rollout it was made for, and the calibration that follows their differences."""

    def __init__(self, depth: int) -> None:
        self.calibration = Calibration(depth)
        self.pending: Prediction | None = None

    def score(self, stats: Iterable[RoundStats]) -> dict[str, float]:
        """The pending prediction against the rounds of the rollout that has just ended, as `predict/…` metrics."""
        observed: dict[int, np.ndarray] = {}
        for s in stats:
            if k := s.config.num_steps:
                histogram = observed.setdefault(k, np.zeros(k + 1))
                histogram[: len(s.accepted)] += s.accepted
        if self.pending is None or not observed:
            return {}
        return {f"predict/{name}": x for name, x in self.calibration.update(self.pending, observed).items()}

    def expect(self, prediction: Prediction | None) -> dict[str, float]:
        """Wait for the rollout that `prediction` is of; its calibrated tokens per round, by step count."""
        self.pending = prediction
        if prediction is None:
            return {}
        rates = {k: self.calibration.apply(prediction.rates(k)) for k in prediction.steps}
        return {f"predict/next_tokens_k{k}": expected_tokens(SpecConfig(k), r) for k, r in rates.items()}

    def rates(self) -> list[float] | None:
        """Calibrated a_1.. of the rollout that is waited for, at the deepest predicted step count."""
        return None if self.pending is None else self.calibration.apply(self.pending.rates())

    def to_json(self) -> dict[str, Any]:
        waiting = self.pending
        return {
            "calibration": self.calibration.to_json(),
            "pending": waiting and [list(waiting.steps), waiting.reached.tolist(), waiting.accepted.tolist()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Forecast:
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

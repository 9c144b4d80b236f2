"""Fit the simulator's acceptance to recorded samples: two regimes, easy and hard, between which a sample changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rlspec.extensions.simulator.samples import EASY, AcceptanceModel, shifted_rates
from megatron_rlspec.types import Sample

STEPS = 60  # of the fit
SHARES = np.linspace(0.05, 0.95, 10)  # of a sample's tokens in the easy regime


def rounds_of(sample: Sample) -> list[int]:
    """Return the accepted drafts of every verify round of a sample, in order.

    The pass that draws the first token is no round, even where it drafts, as in the embedded engine. The last round may
    have accepted drafts past the end; they are not counted, so it is left out.
    """
    spans = dict(sample.accepted_spans)
    found = []
    at = spans.get(0, 0) + 1
    tokens = len(sample.response)
    while at < tokens:
        accepted = spans.get(at, at) - at
        at += accepted + 1
        if at < tokens:
            found.append(accepted)
    return found


def fit(samples: Sequence[Sequence[int]], num_steps: int) -> AcceptanceModel:
    """Fit to samples' rounds of `num_steps` drafts each, by expectation and maximisation (Baum and Welch, 1970).

    Depths beyond `num_steps` get the rates of the last one. Raises ValueError without a round.
    """
    rows = [np.asarray(rounds, np.int64) for rounds in samples if len(rounds)]
    if not rows or num_steps < 1:
        raise ValueError(f"{len(rows)} samples with rounds of {num_steps} drafts, expected at least one of each")
    ends = np.array([len(rounds) for rounds in rows])
    there = np.arange(ends.max()) < ends[:, None]  # [N, T]
    rounds = np.zeros(there.shape, np.int64)
    rounds[there] = np.concatenate(rows)
    mean = _rates(rounds[there], np.ones(int(ends.sum())), num_steps)
    rates = np.stack([shifted_rates(mean, 0.8), shifted_rates(mean, -0.8)])
    persistence = 0.9
    weights = np.full(len(SHARES), 1 / len(SHARES))  # of the samples' shares
    for _ in range(STEPS):
        likelihood = _likelihood(rates, rounds, num_steps)
        likelihood[~there] = 1.0  # rounds after the end say nothing
        easy, drawn, evidence = _smooth(likelihood, rounds + 1, persistence)
        own = weights * np.exp(evidence - evidence.max(1, keepdims=True))
        own /= own.sum(1, keepdims=True)  # [N, K] probability of each share
        weights = own.mean(0)
        weight = (own[..., None] * easy).sum(1)[there]
        rates = np.stack([_rates(rounds[there], w, num_steps) for w in (weight, 1 - weight)])
        later = there[:, 1:]
        persistence = _persistence((own[..., None] * drawn).sum(1)[later], rounds[:, :-1][later] + 1)
    return AcceptanceModel(rates, persistence, own @ SHARES)


def independent(rates: Sequence[float]) -> AcceptanceModel:
    """Accept every draft independently, with these probabilities by depth. For controls."""
    return AcceptanceModel(np.array([rates, rates], float), 0.0, np.array([0.5]))


def _rates(rounds: np.ndarray, weight: np.ndarray, num_steps: int) -> np.ndarray:
    depths = np.arange(num_steps)
    reached = (rounds[:, None] >= depths) * weight[:, None]
    passed = (rounds[:, None] > depths) * weight[:, None]
    found: np.ndarray = np.clip((passed.sum(0) + 0.5) / (reached.sum(0) + 1.0), 0.01, 0.99)
    return found


def _likelihood(rates: np.ndarray, rounds: np.ndarray, num_steps: int) -> np.ndarray:
    """Return [N, T, 2], the probability of each round in each regime."""
    reach = np.concatenate([np.ones((2, 1)), np.cumprod(rates, 1)], 1)  # [2, D + 1]
    stop = np.concatenate([1 - rates, np.ones((2, 1))], 1)
    found: np.ndarray = (reach * stop).T[np.minimum(rounds, num_steps)]
    return found


def _smooth(
    likelihood: np.ndarray, tokens: np.ndarray, persistence: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run forward and backward over the rounds [N, T] of every sample, once for each of the K `SHARES`.

    Returns P(easy) [N, K, T], P(the regime was drawn anew since the round before) [N, K, T - 1], and the logarithm of
    the rounds' probability [N, K]. `tokens` [N, T] are those of each round.
    """
    start = np.stack([SHARES, 1 - SHARES], 1)  # [K, 2]
    keep = persistence ** tokens[:, :-1, None, None]  # [N, T - 1, 1, 1]
    likelihood = likelihood[:, :, None]  # [N, T, 1, 2]
    shape = (len(likelihood), likelihood.shape[1], len(SHARES))
    forward = np.zeros((*shape, 2))
    backward = np.ones((*shape, 2))
    drawn = np.zeros((*shape[:1], shape[1] - 1, *shape[2:]))
    evidence = np.zeros((shape[0], shape[2]))
    for t in range(shape[1]):
        before = keep[:, t - 1] * forward[:, t - 1] + (1 - keep[:, t - 1]) * start if t else start
        forward[:, t] = before * likelihood[:, t]
        total = forward[:, t].sum(-1, keepdims=True)
        forward[:, t] /= total
        evidence += np.log(total[..., 0])
    for t in range(shape[1] - 2, -1, -1):
        ahead = likelihood[:, t + 1] * backward[:, t + 1]
        anew = ((1 - keep[:, t]) * start * ahead).sum(-1)
        drawn[:, t] = anew / ((keep[:, t] * forward[:, t] * ahead).sum(-1) + anew)
        backward[:, t] = keep[:, t] * ahead + (1 - keep[:, t]) * (start * ahead).sum(-1, keepdims=True)
        backward[:, t] /= backward[:, t].sum(-1, keepdims=True)
    posterior = forward * backward
    easy = posterior[..., EASY] / posterior.sum(-1)
    return easy.swapaxes(1, 2), drawn.swapaxes(1, 2), evidence


def _persistence(drawn: np.ndarray, tokens: np.ndarray) -> float:
    """Return the likeliest persistence of one token, given P(drawn anew) [M] over so many tokens [M]."""
    sizes, which = np.unique(tokens, return_inverse=True)
    draws = np.bincount(which, drawn, len(sizes))
    keeps = np.bincount(which, 1 - drawn, len(sizes))
    low, high = 0.0, 0.998
    for _ in range(30):  # the slope of the logarithm of the likelihood falls from left to right
        middle = (low + high) / 2
        slope = (sizes * (keeps - draws * middle**sizes / (1 - middle**sizes))).sum()
        low, high = (middle, high) if slope > 0 else (low, middle)
    return low

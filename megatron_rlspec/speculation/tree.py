"""How many drafted tokens a round should verify, and which: RLHFSpec section 5, and one budget for the whole batch.

It needs the standard library and numpy only. A candidate's *score* is the summed log-probability that the drafter
gives to its path. F maps scores to acceptance probabilities. The expected tokens of a round, al(n), are one per sample
plus the sum of F over the verified candidates. The cost of a round is fitted over samples, cached tokens and verified
tokens. The number of verified candidates maximises the ratio of the two, tokens per millisecond.

A choice by the drafter's scores is lossless only under verifiers that do not use the drafter's probabilities:
position-keyed and target-only. With rejection sampling it changes the distribution, and engines refuse it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from megatron_rlspec.speculation.surface import fit_nonnegative, isotonic

Cost = Callable[[int, int, int], float]  # (samples, cached tokens of the batch, verified tokens) -> ms of the round


class AcceptanceMap:
    """F: a candidate's score -> the probability that it is accepted, monotone (RLHFSpec section 5.2 and figure 7).

    Rates are counted per bin of scores, pooled until they do not decrease, and interpolated between the bins' mean
    scores. The prior is F = exp(score), with the weight of `prior` candidates in every bin. About the last `window`
    candidates count, so that observations from before a policy update lose weight.
    """

    def __init__(self, bins: int = 24, lowest: float = -10.0, prior: float = 4.0, window: float = 20_000.0) -> None:
        borders = lowest * np.linspace(1.0, 0.0, bins + 1) ** 2  # finest near 0: most accepted ones
        self.edges, centre = borders[1:-1], (borders[1:] + borders[:-1]) / 2
        self.window = window
        self.prior = prior * np.stack([np.ones(bins), np.exp(centre), centre])
        self.counts = np.zeros(
            (3, bins)
        )  # candidates seen, accepted, and their summed scores (a bin is placed at its mean)
        self._refit()

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return F of scores of any shape."""
        return np.asarray(np.interp(scores, self.at, self.rate))

    def observe(self, scores: np.ndarray, accepted: np.ndarray) -> None:
        """Count verified candidates, [N] each: all of them, also those whose parents were rejected."""
        scores = np.maximum(np.asarray(scores, float), 2 * self.edges[0])
        where, bins = np.searchsorted(self.edges, scores), self.counts.shape[1]
        columns = (None, np.asarray(accepted, float), scores)
        self.counts += np.stack([np.bincount(where, column, bins) for column in columns])
        self.counts *= min(1.0, self.window / max(self.counts[0].sum(), 1.0))
        self._refit()

    def to_json(self) -> dict[str, Any]:
        return {k: np.asarray(getattr(self, k)).tolist() for k in ("window", "edges", "prior", "counts")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AcceptanceMap:
        made = cls(window=data["window"])
        made.edges, made.prior, made.counts = (np.array(data[k]) for k in ("edges", "prior", "counts"))
        made._refit()
        return made

    def _refit(self) -> None:
        seen, hits, mass = self.counts + self.prior
        rate = isotonic(hits / seen, seen)
        self.at, self.rate = np.append(mass / seen, 0.0), np.append(rate, rate[-1])


class VerifyCost:
    """ms of a round over (samples, cached tokens, verified tokens), fitted to measured rounds (RLHFSpec section 5.2).

    Linear in samples and cached tokens; convex and piecewise linear in verified tokens, since a further token costs
    more as the hardware approaches its compute limit. Answers are cached per bucket of the two token counts, each a
    quarter octave wide.
    """

    def __init__(self, knees: ArrayLike, weights: ArrayLike) -> None:
        self.knees, self.weights = np.asarray(knees, float), np.asarray(weights, float)
        self._known: dict[tuple[int, int, int], float] = {}

    @classmethod
    def fit(cls, rounds: Sequence[tuple[int, int, int, float]]) -> VerifyCost:
        """Fit to `rounds` of (samples, cached tokens, verified tokens, ms). Raises ValueError for fewer than four."""
        if len(rounds) < 4:
            raise ValueError(f"a cost needs at least 4 measured rounds, got {len(rounds)}")
        data = np.asarray(rounds, float)
        knees = np.unique(np.quantile(data[:, 2], [0.2, 0.4, 0.6, 0.8]))
        x = _features(data[:, 0], data[:, 1], data[:, 2], knees)
        # Relative errors count: a round of 2 ms matters as much as one of 200.
        return cls(knees, fit_nonnegative(x / data[:, 3:], np.ones(len(data))))

    def __call__(self, samples: int, context_tokens: int, verified: int) -> float:
        key = (samples, bucket(context_tokens), bucket(verified))
        if key not in self._known:
            samples_at, context_at, verified_at = (np.array([float(v)]) for v in key)
            at = _features(samples_at, context_at, verified_at, self.knees)
            self._known[key] = float((at @ self.weights)[0])
        return self._known[key]

    def to_json(self) -> dict[str, Any]:
        return {"knees": self.knees.tolist(), "weights": self.weights.tolist()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> VerifyCost:
        return cls(data["knees"], data["weights"])


class LearnedCost:
    """A `VerifyCost` fitted to an engine's own rounds: `cost` is None at first, then fitted again every `every` rounds.

    The first `rounds` are always kept: they were run with budgets of every size, later ones with the best size only.
    """

    TRIED = (0.0, 0.1, 0.25, 0.5, 1.0)  # shares of the limit, in turn, while nothing is known

    def __init__(self, rounds: int = 40, every: int = 64, recent: int = 256, warm_up: int = 4) -> None:
        self.first: list[tuple[int, int, int, float]] = []
        self.later: deque[tuple[int, int, int, float]] = deque(maxlen=recent)
        self.rounds, self.every, self._seen, self._warm_up = rounds, every, 0, warm_up
        self.cost: VerifyCost | None = None

    def trial(self, limit: int) -> int:
        """Return how many candidates the next round should verify per sample while the cost is being learned."""
        return round(self.TRIED[self._seen % len(self.TRIED)] * limit)

    def observe(self, samples: int, context_tokens: int, verified: int, ms: float) -> None:
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        (self.first if len(self.first) < self.rounds else self.later).append((samples, context_tokens, verified, ms))
        if len(self.first) == self.rounds and (self._seen - self._warm_up - self.rounds) % self.every == 0:
            self.cost = VerifyCost.fit([*self.first, *self.later])


class TreeBudget:
    """Decide before every verification which candidates the target verifies.

    An engine calls `keep`, `observe`, and at the end of the round `timed`. Without a `cost` it is learned from `timed`.
    share = "sample": RLHFSpec's one number n for all samples; each sample's n best candidates are verified.
    share = "batch": one budget for the batch; the best candidates of all samples are verified.
    """

    def __init__(
        self,
        cost: Cost | None = None,
        acceptance: AcceptanceMap | None = None,
        share: Literal["sample", "batch"] = "batch",
        patience: int = 3,
    ) -> None:
        if share not in ("sample", "batch"):
            raise ValueError(f"share={share!r}, expected sample or batch")
        self.cost, self.acceptance, self.share, self.patience = cost, acceptance or AcceptanceMap(), share, patience
        self._learned = LearnedCost() if cost is None else None

    def keep(self, scores: np.ndarray, depth: np.ndarray, context_tokens: int, limit: int) -> np.ndarray:
        """Mask [B, M] of the candidates with `scores [B, M]` at `depth [M]` to verify, at most `limit` per sample.

        A child must score no higher than its parent and come after it; then the mask is closed under parents.
        """
        cost = self.cost
        if cost is None:
            assert self._learned is not None  # a budget without a cost learns one
            return top(scores, self._learned.trial(limit))
        weights = self.acceptance(scores)
        if self.share == "sample":
            n = self._search_layers(cost, weights, depth, context_tokens, limit)
            return top(scores, n)
        allowed = top(scores, limit)
        order = np.argsort(np.where(allowed, -scores, np.inf), axis=None, kind="stable")[: int(allowed.sum())]
        count = self._search_batch(cost, weights.ravel()[order], len(scores), context_tokens)
        keep = np.zeros(scores.size, bool)
        keep[order[:count]] = True
        return keep.reshape(scores.shape)

    def observe(self, scores: np.ndarray, accepted: np.ndarray) -> None:
        self.acceptance.observe(scores, accepted)

    def timed(self, samples: int, context_tokens: int, verified: int, ms: float) -> None:
        """Record a whole round: its samples, their cached tokens, the verified tokens, milliseconds."""
        if self._learned is not None:
            self._learned.observe(samples, context_tokens, verified, ms)
            self.cost = self._learned.cost

    def _search_layers(self, cost: Cost, weights: np.ndarray, depth: np.ndarray, context: int, limit: int) -> int:
        """Find n (RLHFSpec section 5.3): it grows layer by layer until tokens per ms have fallen `patience` times.

        With layers 1..l considered, the n best are final while each weighs at least as much as any of layer l + 1.
        """
        samples, al = len(weights), float(len(weights))
        best, best_n, falling = samples / cost(samples, context, samples), 0, 0
        n = 0
        for layer in range(1, int(depth.max()) + 1):
            ranked = -np.sort(-weights[:, depth <= layer], axis=1)
            below = weights[:, depth == layer + 1]
            ahead = below.max(1) if below.size else np.full(samples, -np.inf)
            final = min(limit, int((ranked >= ahead[:, None]).sum(1).min()))
            while n < final:
                al += float(ranked[:, n].sum())
                n += 1
                value = al / cost(samples, context, samples * (n + 1))
                if value > best:
                    best, best_n, falling = value, n, 0
                else:
                    falling += 1
                    if falling == self.patience:
                        return best_n
        return best_n

    def _search_batch(self, cost: Cost, weights: np.ndarray, samples: int, context: int) -> int:
        """Find how many of the batch's candidates to verify, best first. Only the last of a cost bucket can be best."""
        al = np.concatenate([[0.0], np.cumsum(weights)]) + samples
        best, best_count, falling, count = 0.0, 0, 0, 0
        while True:
            value = al[count] / cost(samples, context, samples + count)
            if value > best:
                best, best_count, falling = value, count, 0
            else:
                falling += 1
            if count == len(weights) or falling == self.patience:
                return best_count
            count = min(len(weights), bucket(samples + count + 1) - samples)


def top(scores: np.ndarray, count: int) -> np.ndarray:
    """Mask [B, M] each row's `count` highest scores; of equals the earlier, so that parents come first."""
    keep = np.zeros(scores.shape, bool)
    np.put_along_axis(keep, np.argsort(-scores, axis=1, kind="stable")[:, :count], True, 1)
    return keep


def bucket(tokens: int) -> int:
    """Return the upper edge of a token count's bucket: 1 to 8, 10, 12, 14, 16, 20, ..., quarter octaves."""
    if tokens <= 4:
        return max(tokens, 1)
    step = 1 << max(0, (tokens - 1).bit_length() - 3)
    return -(-tokens // step) * step


def _features(samples: np.ndarray, context: np.ndarray, verified: np.ndarray, knees: np.ndarray) -> np.ndarray:
    above = np.maximum(verified[:, None] - knees, 0.0)
    return np.concatenate([np.ones((len(samples), 1)), np.stack([samples, context, verified], 1), above], 1)

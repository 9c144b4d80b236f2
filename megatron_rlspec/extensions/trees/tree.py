"""Choose how many drafted tokens a round verifies, and which (RLHFSpec, section 5).

Standard library, numpy and scipy only.

* A candidate's *score* is the sum of the drafter's log-probabilities on its path. F maps scores to probabilities of
  acceptance.
* The expected tokens of a round, al(n), are one per sample plus the sum of F over the n verified candidates.
* The cost of a round is fitted over samples, cached tokens and verified tokens.
* n maximises al(n) / cost(n), the tokens per millisecond.

A choice by the drafter's scores is lossless only under the verifiers position_keyed and target_only, which do not use
the drafter's probabilities. Under rejection it would change the distribution; engines refuse it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression, nnls

from megatron_rlspec.speculation.acceptance import top

# (samples, cached tokens of the batch, verified tokens) -> ms of the round
Cost = Callable[[int, int, int], float]


class AcceptanceMap:
    """F: a candidate's score -> the probability that it is accepted, nondecreasing (RLHFSpec, section 5.2, figure 7).

    It counts rates per bin of scores, pools bins until the rates do not decrease, and interpolates between the bins'
    mean scores. The prior is F = exp(score), with the weight of `prior` candidates in every bin. About the last
    `window` candidates count, so observations from before a policy update lose weight.
    """

    def __init__(
        self, bins: int = 24, lowest: float = -10.0, prior: float = 4.0, window: float = 20_000.0
    ) -> None:
        # finest near 0, where most accepted candidates are
        borders = lowest * np.linspace(1.0, 0.0, bins + 1) ** 2
        self.edges = borders[1:-1]
        centre = (borders[1:] + borders[:-1]) / 2
        self.window = window
        self.prior = prior * np.stack([np.ones(bins), np.exp(centre), centre])
        self.counts = np.zeros((3, bins))  # candidates seen, candidates accepted, sum of scores
        self._refit()

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return F of scores of any shape."""
        return np.asarray(np.interp(scores, self.at, self.rate))

    def observe(self, scores: np.ndarray, accepted: np.ndarray) -> None:
        """Count all verified candidates, also those with a rejected parent; `scores` and `accepted` are [N]."""
        scores = np.maximum(np.asarray(scores, float), 2 * self.edges[0])
        bin_of = np.searchsorted(self.edges, scores)
        bins = self.counts.shape[1]
        self.counts[0] += np.bincount(bin_of, minlength=bins)
        self.counts[1] += np.bincount(bin_of, np.asarray(accepted, float), bins)
        self.counts[2] += np.bincount(bin_of, scores, bins)
        seen = max(self.counts[0].sum(), 1.0)
        self.counts *= min(1.0, self.window / seen)
        self._refit()

    def _refit(self) -> None:
        seen, accepted, score_sums = self.counts + self.prior
        rate = isotonic_regression(accepted / seen, weights=seen).x
        self.at = np.append(score_sums / seen, 0.0)
        self.rate = np.append(rate, rate[-1])


class VerifyCost:
    """ms of a round by (samples, cached tokens, verified tokens), fitted to measured rounds (RLHFSpec, section 5.2).

    It is linear in samples and cached tokens. It is convex and piecewise linear in verified tokens, because a further
    token costs more when the hardware is close to its compute limit. Results are cached per bucket of the two token
    counts; a bucket is a quarter octave wide.
    """

    def __init__(self, knees: ArrayLike, weights: ArrayLike) -> None:
        self.knees = np.asarray(knees, float)
        self.weights = np.asarray(weights, float)
        self._known: dict[tuple[int, int, int], float] = {}

    @classmethod
    def fit(cls, rounds: Sequence[tuple[int, int, int, float]]) -> VerifyCost:
        """Fit to `rounds` of (samples, cached tokens, verified tokens, ms). Raises ValueError for fewer than four."""
        if len(rounds) < 4:
            raise ValueError(f"a cost needs at least 4 measured rounds, got {len(rounds)}")
        data = np.asarray(rounds, float)
        knees = np.unique(np.quantile(data[:, 2], [0.2, 0.4, 0.6, 0.8]))
        x = _features(data[:, 0], data[:, 1], data[:, 2], knees)
        # The fit minimises relative errors, so a round of 2 ms counts as much as one of 200 ms.
        relative = x / data[:, 3:]
        weights, _ = nnls(relative, np.ones(len(data)))
        return cls(knees, weights)

    def __call__(self, samples: int, context_tokens: int, verified: int) -> float:
        key = (samples, bucket(context_tokens), bucket(verified))
        if key not in self._known:
            point = np.array([key], float)
            features = _features(point[:, 0], point[:, 1], point[:, 2], self.knees)
            self._known[key] = float((features @ self.weights)[0])
        return self._known[key]


class LearnedCost:
    """A `VerifyCost` fitted to an engine's own rounds.

    `cost` is None for the first `rounds` rounds, then it is fitted again every `every` rounds. The fit always keeps the
    first rounds, because they ran with budgets of every size. Later rounds ran with the best size only.
    """

    TRIED = (0.0, 0.1, 0.25, 0.5, 1.0)  # shares of the limit that the first rounds use in turn

    def __init__(
        self, rounds: int = 40, every: int = 64, recent: int = 256, warm_up: int = 4
    ) -> None:
        self.first: list[tuple[int, int, int, float]] = []
        self.later: deque[tuple[int, int, int, float]] = deque(maxlen=recent)
        self.rounds = rounds
        self.every = every
        self._seen = 0
        self._warm_up = warm_up
        self.cost: VerifyCost | None = None

    def trial(self, limit: int) -> int:
        """Return how many candidates the next round should verify per sample while the cost is being learned."""
        return round(self.TRIED[self._seen % len(self.TRIED)] * limit)

    def observe(self, samples: int, context_tokens: int, verified: int, ms: float) -> None:
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        measured = (samples, context_tokens, verified, ms)
        if len(self.first) < self.rounds:
            self.first.append(measured)
        else:
            self.later.append(measured)
        since_first = self._seen - self._warm_up - self.rounds
        if since_first >= 0 and since_first % self.every == 0:
            self.cost = VerifyCost.fit([*self.first, *self.later])


class TreeBudget:
    """Chooses the candidates that the target verifies: the n best ones of each sample, with the same n for all samples.

    In every round an engine calls `keep`, then `observe`, then `timed`.

    cost      None: it is learned from the rounds given to `timed`
    patience  how many larger n in a row may lower the tokens per ms before the search for n stops
    """

    def __init__(
        self, cost: Cost | None = None, acceptance: AcceptanceMap | None = None, patience: int = 3
    ) -> None:
        self.cost = cost
        self.acceptance = acceptance or AcceptanceMap()
        self.patience = patience
        self._learned = LearnedCost() if cost is None else None

    def keep(
        self, scores: np.ndarray, depth: np.ndarray, context_tokens: int, limit: int
    ) -> np.ndarray:
        """Return the mask [B, M] of the candidates to verify, at most `limit` per sample.

        `scores [B, M]` and `depth [M]` are the candidates'. A child must come after its parent and must not score
        higher. The mask then holds the parents of every candidate in it.
        """
        cost = self.cost
        if cost is None:
            assert self._learned is not None  # __init__ made it, because no cost was given
            return top(scores, self._learned.trial(limit))
        weights = self.acceptance(scores)
        chosen = self._search(cost, weights, depth, context_tokens, limit)
        return top(scores, chosen)

    def observe(self, scores: np.ndarray, accepted: np.ndarray) -> None:
        self.acceptance.observe(scores, accepted)

    def timed(self, samples: int, context_tokens: int, verified: int, ms: float) -> None:
        """Record the ms of a round: its samples, their cached tokens, the verified tokens."""
        if self._learned is not None:
            self._learned.observe(samples, context_tokens, verified, ms)
            self.cost = self._learned.cost

    def _search(
        self, cost: Cost, weights: np.ndarray, depth: np.ndarray, context: int, limit: int
    ) -> int:
        """Find n (RLHFSpec, section 5.3). It grows layer by layer until tokens per ms have fallen `patience` times.

        With the candidates of layers 1..l, the n best of a sample cannot change any more if each weighs at least as
        much as the best one of layer l + 1.
        """
        samples = len(weights)
        al = float(samples)
        best = samples / cost(samples, context, samples)
        best_n = 0
        falling = 0
        n = 0
        for layer in range(1, int(depth.max()) + 1):
            above = weights[:, depth <= layer]
            below = weights[:, depth == layer + 1]
            ranked = -np.sort(-above, axis=1)
            # Candidates that no candidate of a deeper layer can replace.
            certain = np.full(samples, ranked.shape[1])
            if below.size:
                best_below = below.max(1, keepdims=True)
                certain = (ranked >= best_below).sum(1)
            final = min(limit, int(certain.min()))
            while n < final:
                al += float(ranked[:, n].sum())
                n += 1
                value = al / cost(samples, context, samples * (n + 1))
                if value > best:
                    best = value
                    best_n = n
                    falling = 0
                else:
                    falling += 1
                    if falling == self.patience:
                        return best_n
        return best_n


def bucket(tokens: int) -> int:
    """Return the upper edge of a token count's bucket: 1 to 8, then quarter octaves 10, 12, 14, 16, 20, ..."""
    if tokens <= 4:
        return max(tokens, 1)
    step = 1 << max(0, (tokens - 1).bit_length() - 3)
    return -(-tokens // step) * step


def _features(
    samples: np.ndarray, context: np.ndarray, verified: np.ndarray, knees: np.ndarray
) -> np.ndarray:
    constant = np.ones(len(samples))
    linear = np.stack([constant, samples, context, verified], 1)
    above_knees = np.maximum(verified[:, None] - knees, 0.0)
    return np.concatenate([linear, above_knees], 1)

"""What a simulated rollout draws: lengths of responses, and which drafts are accepted.

Acceptance is fitted to recorded samples; lengths go through published figures. Independent draws of acceptance would be
wrong: rounds start more often where drafts fail, so that a mean over positions promises too much (2.41 instead of 1.71
tokens a round in an example of two regimes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from megatron_rlspec.speculation.acceptance import Grown, grow
from megatron_rlspec.types import Sample

STEPS = 60  # of the fit
SHARES = np.linspace(0.05, 0.95, 10)  # of a sample's tokens in the easy regime
EASY = 0  # the regime; the hard one is 1
DEEPEST = 64  # drafts of a round, at most
NORMAL = NormalDist()


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


@dataclass(frozen=True, eq=False)
class AcceptanceModel:
    """Two regimes, between which a sample changes from token to token (a hidden Markov chain).

    The chain runs over tokens, not over rounds: a model that was fitted to deep drafts predicts shallow ones, too.

    rates        [2, D] probability that draft d is accepted if those before it were, in the easy and the hard regime
    persistence  probability that a token does not draw its regime anew; towards 1 stretches become long
    shares       [N] a sample's share of tokens in the easy regime is one of these, at random: samples differ
    sibling      probability that a further child of a tree's node is accepted if those before it were refused. Chains
                 do not record it. None: not known, and trees cannot be simulated
    """

    rates: np.ndarray
    persistence: float
    shares: np.ndarray
    sibling: float | None = None

    @classmethod
    def fit(cls, samples: Sequence[Sequence[int]], num_steps: int) -> AcceptanceModel:
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
        rates = np.stack([_shifted(mean, 0.8), _shifted(mean, -0.8)])
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
        return cls(rates, persistence, own @ SHARES)

    @classmethod
    def independent(cls, rates: Sequence[float]) -> AcceptanceModel:
        """Accept every draft independently, with these probabilities by depth. For controls."""
        return cls(np.array([rates, rates], float), 0.0, np.array([0.5]))

    def begin(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw (shares [count], first regimes [count]) of new samples."""
        shares = rng.choice(self.shares, count)
        return shares, (rng.random(count) >= shares).astype(np.int64)

    def accept(self, regime: int, num_steps: int, draw: float) -> int:
        """Return how many of `num_steps` drafts a round accepts; `draw` is uniform in [0, 1)."""
        reach = self._reach[regime]
        accepted = 0
        while accepted < num_steps and draw < reach[accepted]:
            accepted += 1
        return accepted

    def tree(self, regime: int, num_steps: int, topk: int) -> SimTree:
        """Return the tree that a drafter grows. Raises ValueError if the acceptance of siblings is not known.

        The drafter's probabilities are taken to be those of acceptance, as RLHFSpec finds (figure 7).
        """
        key = (regime, num_steps, topk)
        if key not in self._trees:
            if self.sibling is None:
                raise ValueError(
                    "acceptance.sibling is missing, which chains do not record: expected (E2 - E1) / (2 - E1) of "
                    "measured tokens a round, E1 with k1 and E2 with k1t2n3"
                )
            rates = self.rates[regime][np.minimum(np.arange(num_steps), self.rates.shape[1] - 1)]
            self._trees[key] = SimTree(grow(rates.tolist(), topk, self.sibling))
        return self._trees[key]

    @cached_property
    def _trees(self) -> dict[tuple[int, int, int], SimTree]:
        return {}

    def advance(self, regime: int, share: float, tokens: int, draw: float) -> int:
        """Return the regime after so many `tokens`; `draw` is uniform in [0, 1)."""
        kept = self._kept[tokens]
        if draw < kept:
            return regime
        return EASY if draw - kept < share * (1 - kept) else 1 - EASY

    def shifted(self, by: float) -> AcceptanceModel:
        """Return the model with `by` added to the log-odds of every rate: a drafter that drifts, or learns."""
        return replace(self, rates=_shifted(np.clip(self.rates, 1e-4, 1 - 1e-4), by)) if by else self

    @cached_property
    def _kept(self) -> list[float]:
        """Return P(the regime was not drawn anew) by tokens."""
        return [self.persistence**tokens for tokens in range(DEEPEST + 2)]

    @cached_property
    def _reach(self) -> list[list[float]]:
        """Return P(draft d and those before it are accepted) by regime and depth."""
        depth = np.minimum(np.arange(DEEPEST), self.rates.shape[1] - 1)
        reach: list[list[float]] = np.cumprod(self.rates[:, depth], 1).tolist()
        return reach


class SimTree:
    """A drafted tree of one sample. `scores [M]` are the drafter's, as in `speculation.tree`; `depth [M]`."""

    def __init__(self, grown: Grown) -> None:
        self.scores = np.log(np.maximum(grown.chance, 1e-30))
        self.depth = grown.depth
        above = np.maximum(np.append(grown.chance, 1.0)[grown.parents], 1e-300)  # the parent -1 is the root
        self._children: dict[int, list[tuple[int, float]]] = {}  # parent -> (child, P(it is accepted if the parent is))
        for child, (parent, chance) in enumerate(zip(grown.parents.tolist(), grown.chance / above, strict=True)):
            self._children.setdefault(parent, []).append((child, float(chance)))

    def accept(self, verified: np.ndarray, draw: float) -> list[int]:
        """Return the accepted candidates among those that the mask `verified [M]` holds; `draw` is uniform in [0, 1).

        At most one child of a node is accepted: the one that is the target's token. The draw says which, and its rest
        serves the next level. So a chain accepts what `AcceptanceModel.accept` does.
        """
        path: list[int] = []
        children = list(self._children.get(-1, ()))
        while children:
            child, chance = children.pop(0)
            if draw >= chance:
                draw -= chance  # another token than this child's
            elif not verified[child]:
                break
            else:
                draw /= chance
                path.append(child)
                children = list(self._children.get(child, ()))
        return path


def _rates(rounds: np.ndarray, weight: np.ndarray, num_steps: int) -> np.ndarray:
    depths = np.arange(num_steps)
    reached = (rounds[:, None] >= depths) * weight[:, None]
    passed = (rounds[:, None] > depths) * weight[:, None]
    found: np.ndarray = np.clip((passed.sum(0) + 0.5) / (reached.sum(0) + 1.0), 0.01, 0.99)
    return found


def _shifted(rates: np.ndarray, logits: float) -> np.ndarray:
    shifted: np.ndarray = 1 / (1 + np.exp(-(np.log(rates / (1 - rates)) + logits)))
    return shifted


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


@dataclass(frozen=True)
class LengthModel:
    """Response lengths in tokens: lognormal, cut at the cap, and correlated within a group of samples.

    mu, sigma  of the logarithm
    group      share of the variance of the logarithm that samples of one prompt have in common
    """

    mu: float
    sigma: float
    group: float = 0.0

    @classmethod
    def of_quantiles(cls, first: tuple[float, float], second: tuple[float, float], group: float = 0.0) -> LengthModel:
        """Return the model through two published (probability, length) pairs, such as (0.5, 378) and (0.95, 1373)."""
        (p, low), (q, high) = first, second
        a, b = NORMAL.inv_cdf(p), NORMAL.inv_cdf(q)
        sigma = (math.log(high) - math.log(low)) / (b - a)
        return cls(math.log(low) - a * sigma, sigma, group)

    def draw(self, prompts: int, samples: int, cap: int, rng: np.random.Generator) -> np.ndarray:
        """Draw lengths [prompts, samples], from 1 to `cap`."""
        common = rng.standard_normal((prompts, 1)) * math.sqrt(self.group)
        own = rng.standard_normal((prompts, samples)) * math.sqrt(1 - self.group)
        drawn = np.exp(self.mu + self.sigma * (common + own))
        lengths: np.ndarray = np.clip(np.rint(drawn), 1, cap).astype(np.int64)
        return lengths

"""What a simulated rollout draws: lengths of responses, and which drafts are accepted.

Lengths go through published figures. Acceptance has two regimes; `benchmarks/fit_acceptance.py` fits them to recorded
samples. Independent draws would be wrong: rounds start more often where drafts fail, so that a mean over positions
promises too much (2.41 instead of 1.71 tokens a round in an example).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from megatron_rlspec.speculation.acceptance import Grown, grow

EASY = 0  # the regime; the hard one is 1
DEEPEST = 64  # drafts of a round, at most
NORMAL = NormalDist()


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
        return (
            replace(self, rates=shifted_rates(np.clip(self.rates, 1e-4, 1 - 1e-4), by))
            if by
            else self
        )

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
    """A drafted tree of one sample. `scores [M]` are the drafter's, as in `trees.tree`; `depth [M]`."""

    def __init__(self, grown: Grown) -> None:
        self.scores = np.log(np.maximum(grown.chance, 1e-30))
        self.depth = grown.depth
        # the parent -1 is the root
        above = np.maximum(np.append(grown.chance, 1.0)[grown.parents], 1e-300)
        # parent -> (child, P(it is accepted if the parent is))
        self._children: dict[int, list[tuple[int, float]]] = {}
        for child, (parent, chance) in enumerate(
            zip(grown.parents.tolist(), grown.chance / above, strict=True)
        ):
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


def shifted_rates(rates: np.ndarray, logits: float) -> np.ndarray:
    """Add `logits` to the log-odds of rates."""
    shifted: np.ndarray = 1 / (1 + np.exp(-(np.log(rates / (1 - rates)) + logits)))
    return shifted


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
    def of_quantiles(
        cls, first: tuple[float, float], second: tuple[float, float], group: float = 0.0
    ) -> LengthModel:
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

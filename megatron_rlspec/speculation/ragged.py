"""Choose how many drafts of each request are verified (RLHFSpec, section 5, for chains).

Drafts differ in how likely they are to be accepted, and the drafter's own probability q of a draft tells it. A chain's
*product* is the probability that it is accepted up to a draft. A round verifies the drafts whose product reaches a
threshold. The threshold maximises tokens per ms: it rises with the cost of one more verified token.

* `table` turns q into a probability of acceptance. It is learnt from verified drafts: each one whose predecessors
  were accepted shows its own outcome. Some requests of every round verify all, so that drafts below the threshold
  show theirs, too.
* `plan` finds the best threshold by the chains of the latest rounds.
* `observe` says what a round would have accepted if it had verified all drafts: what was not verified counts by its
  chance. So the acceptance of a depth is not that of likely drafts alone.

The text stays the same under position-keyed sampling, and the distribution under `target_only`, because a draft that is
not verified is drawn later by the target itself.

Numpy and scipy only. Ranks that see the same drafts choose the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

BINS = 24  # of log q, finest near 0, where most drafts are
CELLS = 64 * BINS  # for each of which the chance is known
LOWEST = -10.0  # the lowest border
PRIOR = 4.0  # drafts of a bin that count as accepted with probability q
FORETOLD = 2000.0  # drafts that the trainer's rows count for, at most
WINDOW = 20_000.0  # drafts that count; older ones fade
LATEST = 256  # chains that a plan is made by
LEAST = 64  # chains without which all drafts are verified
PLANS = 49  # thresholds that a plan compares
EXPLORE = 64  # one of so many requests verifies all its drafts
INHERITED = 0.25  # weight of drafts that earlier weights made


class Plan(NamedTuple):
    """What rounds of some number of drafts verify.

    threshold  least product of a draft that is verified
    verified   drafts of a request, on average
    share      tokens of a round, as a share of those that verifying all drafts delivers
    """

    threshold: float
    verified: float
    share: float


def cells_of(logq: np.ndarray) -> np.ndarray:
    """Return the cells of log q, NaN in the lowest; `RaggedRound.choose` in SGLang computes the same."""
    share = np.sqrt(np.sqrt(np.fmin(np.abs(logq) / -LOWEST, 1.0)))
    cells: np.ndarray = ((1.0 - share) * (CELLS - 0.5)).astype(np.intp)
    return cells


class Selection:
    """See the head of this file. An engine calls `observe` after a round, which may be some rounds late.

    Between drafting and verifying it calls `lengths`. Or it chooses on its device: the likeliest drafts by `table`, as
    many of the batch as the plan says.

    counts  [2, BINS] drafts that were verified after accepted ones, and those of them that were accepted
    table   [CELLS] the probability that a draft of a cell is accepted if those before it are
    """

    def __init__(self, depth: int) -> None:
        borders = LOWEST * np.linspace(1.0, 0.0, BINS + 1) ** 4
        self._centres = (borders[1:] + borders[:-1]) / 2
        self._logq = LOWEST * (1 - (np.arange(CELLS) + 0.5) / CELLS) ** 4
        self.counts = np.zeros((2, BINS))
        self._prior = PRIOR * np.stack([np.ones(BINS), np.exp(self._centres)])
        # cells of the latest chains [depth, N]; -1 behind their last draft
        self._chains = np.zeros((depth, 0), np.intp)
        # their products, until more is learnt
        self._products: np.ndarray | None = None
        self._seen = 0
        # log q [B, k] of the newest round, and its cells [k, B]: numpy is faster along the longer axis
        self._newest = (self._chains.T, self._chains)
        self._refit()

    def exploring(self) -> int:
        """Return the first request that verifies all its drafts in the next round; every `EXPLORE`-th after it does."""
        return self._seen % EXPLORE

    def lengths(self, logq: np.ndarray, threshold: float) -> np.ndarray:
        """Return how many drafts [B] of each request to verify, by log q [B, k]."""
        products = _products(self.table.take(self._cells(logq)))
        lengths: np.ndarray = (products >= threshold).sum(0)
        lengths[self.exploring() :: EXPLORE] = logq.shape[1]
        return lengths

    def observe(self, logq: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> list[float]:
        """Learn from a round. Requests behind those of `logq` verified all their drafts.

        logq                [C, steps] of the requests among whose drafts was chosen
        verified, accepted  [B] drafts of each request, B >= C

        Returns how many requests accept 0, 1, ... drafts if all are verified, [steps + 1].
        """
        chosen, steps = logq.shape
        cells = self._cells(logq)
        depth = np.arange(steps)[:, None]
        right = depth < accepted
        seen = depth < np.minimum(verified, accepted + 1)[:chosen]
        outcomes = (cells + CELLS * right[:, :chosen])[seen] // (CELLS // BINS)
        refused, found = np.bincount(outcomes, minlength=2 * BINS).reshape(2, BINS)
        self.counts[0] += refused + found
        self.counts[1] += found
        chains = np.full((len(self._chains), chosen), -1)
        chains[:steps] = cells
        self._chains = np.concatenate([chains, self._chains], 1)[:, :LATEST]
        self._products = None
        self._seen += chosen
        chances = right.astype(float)
        unseen = depth >= verified[:chosen]
        of_chosen = chances[:, :chosen]
        of_chosen[:] = np.where(unseen, self.table.take(cells), of_chosen)
        reached = [len(accepted), *_products(chances).sum(1).tolist(), 0.0]
        return [above - here for above, here in itertools.pairwise(reached)]

    def plan(self, steps: int, ms: Callable[[np.ndarray], np.ndarray]) -> Plan:
        """Return the best threshold for rounds of `steps` drafts.

        ms  of a round in which a request verifies so many drafts on average
        """
        if self._seen < LEAST:
            return Plan(0.0, float(steps), 1.0)
        if self._products is None:
            self.counts *= min(1.0, WINDOW / max(self.counts[0].sum(), 1.0))
            self._refit()
            self._products = _products(self._latest())
        chains = self._products.shape[1]
        products = np.sort(self._products[:steps], axis=None)[::-1]
        sums = np.concatenate([[0.0], np.cumsum(products)])
        tokens = 1 + sums / chains
        # The largest products are verified: none, or one more of every few.
        counts = np.linspace(0, len(products), PLANS).astype(int)
        rates = tokens[counts] / ms(counts / chains)
        count = int(counts[rates.argmax()])
        threshold = 2.0
        if count:
            threshold = float(products[count - 1])
            count = int(np.searchsorted(-products, -threshold, "right"))
        return Plan(threshold, count / chains, float(tokens[count] / tokens[-1]))

    def foresee(self, counts: np.ndarray) -> None:
        """Begin with the drafts `[2, BINS]` that the trainer predicts for these weights, as `counts` has them."""
        self._prior += counts * (FORETOLD / max(counts[0].sum(), FORETOLD))
        self._refit()

    def inherit(self, former: Selection) -> None:
        """Go on from what was learnt under earlier weights, which counts less."""
        self.counts = former.counts * INHERITED
        self._chains = former._chains
        self._seen = former._seen
        self._refit()

    def restore(self, counts: Sequence[Sequence[float]]) -> None:
        """Begin with `counts` that another engine learnt under earlier weights. Raises ValueError."""
        self.counts = counts_of(counts) * INHERITED
        self._refit()

    def _cells(self, logq: np.ndarray) -> np.ndarray:
        """Return the cells [k, B] of log q [B, k], for which `lengths` and `observe` ask one after the other."""
        if logq is not self._newest[0]:
            self._newest = (logq, cells_of(np.ascontiguousarray(logq.T, np.float32)))
        return self._newest[1]

    def _latest(self) -> np.ndarray:
        """Return the chances of the latest chains, [depth, N]. Drafts that were not made are those of other chains."""
        chances: np.ndarray = self.table[self._chains]
        for depth, missing in enumerate(self._chains < 0):
            present = chances[depth, ~missing]
            if not len(present):
                present = chances[depth - 1]
            chances[depth, missing] = np.resize(present, missing.sum())
        return chances

    def _refit(self) -> None:
        self._products = None
        drafts, accepted = self.counts + self._prior
        rates = isotonic_regression(accepted / drafts, weights=drafts).x
        self.table = np.interp(self._logq, self._centres, rates)


def _products(chances: np.ndarray) -> np.ndarray:
    """Multiply chances [k, B] along their chains, in place. `np.cumprod` takes longer for short chains."""
    for above, here in itertools.pairwise(chances):
        here *= above
    return chances


def counts_of(counts: Sequence[Sequence[float]]) -> np.ndarray:
    """Return `Selection.counts` of JSON. Raises ValueError."""
    values = np.array(counts, float)
    if values.shape != (2, BINS) or not (values[0] >= values[1]).all():
        raise ValueError("speculation rule: chances: expected accepted drafts among the verified")
    if not np.isfinite(values).all() or values.min() < 0:
        raise ValueError("speculation rule: chances: expected finite counts from 0 on")
    return values

"""Choose how many drafts of each request are verified (RLHFSpec, section 5, for chains): a ragged round.

Drafts differ in how likely they are to be accepted. The drafter's own probability q of a draft predicts it. A request's
drafts are a chain: each one counts only if all before it are accepted. The *product* of a draft is the probability that
the chain is accepted up to it. A round verifies the drafts whose product reaches a threshold. `rule.py` asks
`Selection.plan` for the threshold with the most tokens per ms: it is higher where one more verified token costs more.

* `table` turns q into a *chance*: the probability that a draft is accepted if those before it are. It is learnt from
  verified drafts: each one whose predecessors were accepted shows its own outcome. One of EXPLORE requests verifies
  all its drafts, so that drafts below the threshold show theirs, too.
* `plan` compares thresholds by the chains of the latest rounds.
* `observe` estimates what a round would have accepted if it had verified all drafts: what was not verified counts by
  its chance. So the acceptance of a depth is not that of likely drafts alone.

The text stays the same under position-keyed sampling, and the distribution under `target_only`, because a draft that is
not verified is sampled later by the target itself.

This file reads no clock and draws no random numbers, so ranks that see the same drafts in the same order choose the
same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

# Bins of log q between LOWEST and 0, in which drafts are counted; finest near 0, where most drafts are. Border i is at
# LOWEST * (1 - i / BINS)^4. `losses/predict.by_logq` fills the same bins.
BINS = 24
LOWEST = -10.0
# entries of `table`: a finer division of the same kind, so a draft's bin is its cell // 64
CELLS = 64 * BINS
PRIOR = 4.0  # drafts of each bin, accepted with probability q, that are added to what was counted
FORETOLD = 2000.0  # drafts that the trainer's prediction weighs at most
WINDOW = 20_000.0  # drafts that the counts weigh at most; older ones fade
LATEST = 256  # chains that a plan is made from
LEAST = 64  # chains that must have been observed before a plan; until then all drafts are verified
PLANS = 49  # thresholds that a plan compares
EXPLORE = 64  # one of this number of requests verifies all its drafts
INHERITED = 0.25  # weight of drafts that earlier weights of the models made


class Plan(NamedTuple):
    """What rounds of one number of drafts verify.

    threshold  least product of a draft that is verified; 0: all drafts, above 1: none
    verified   verified drafts of a request, on average
    share      tokens of a round, as a share of those that verifying all drafts delivers
    """

    threshold: float
    verified: float
    share: float


def cells_of(logq: np.ndarray) -> np.ndarray:
    """Return the cell of each log q, of the same shape; NaN is in the lowest.

    `RaggedRound.choose` in `rollout/sglang/scheduler/ragged.py` computes the same on the device: change both.
    """
    share = np.sqrt(np.sqrt(np.fmin(np.abs(logq) / -LOWEST, 1.0)))
    cells: np.ndarray = ((1.0 - share) * (CELLS - 0.5)).astype(np.intp)
    return cells


class Selection:
    """Learns the chances of drafts, and plans which drafts are verified; see the head of this file.

    `SpecRule` owns it and calls it for an engine: `plan`, then `lengths` between drafting and verifying. An engine that
    chooses on its device reads `table` and `exploring` itself (`RaggedRound`), and verifies the drafts with the largest
    products, at least as many as `SpecRule.drafts` says. After a round, or some rounds later, comes `observe`.

    depth   the most drafts of a round, at least 1
    counts  [2, BINS] drafts that were verified after accepted ones, and those of them that were accepted
    table   [CELLS] the chance of a draft of each cell. A new array whenever it changes: `RaggedRound` copies it to the
            device if it is another object
    """

    def __init__(self, depth: int) -> None:
        borders = LOWEST * np.linspace(1.0, 0.0, BINS + 1) ** 4
        self._centres = (borders[1:] + borders[:-1]) / 2  # log q of each bin
        self._logq = LOWEST * (1 - (np.arange(CELLS) + 0.5) / CELLS) ** 4  # of each cell
        self.counts = np.zeros((2, BINS))
        self._prior = PRIOR * np.stack([np.ones(BINS), np.exp(self._centres)])
        # cells of the latest chains [depth, N]; -1 behind their last draft
        self._chains = np.zeros((depth, 0), np.intp)
        # their products [depth, N], for `plan`; None: to be computed again
        self._products: np.ndarray | None = None
        self._seen = 0  # requests observed so far
        # log q [B, k] of the newest round, and its cells [k, B], see `_cells`. Depth is the first axis: numpy is faster
        # along the longer one.
        self._newest = (self._chains.T, self._chains)
        self._refit()

    def exploring(self) -> int:
        """Return the first request that verifies all its drafts in the next round; every EXPLORE-th after it does, too.

        It moves by the number of requests observed, so that other requests explore. After a multiple of EXPLORE the
        same ones do.
        """
        return self._seen % EXPLORE

    def lengths(self, logq: np.ndarray, threshold: float) -> np.ndarray:
        """Return how many drafts [B] of each request to verify, by log q [B, k] and the threshold of a `Plan`.

        The order of the requests decides which of them explore (`exploring`), so all ranks need the same order.
        """
        products = _products(self.table.take(self._cells(logq)))
        # Products fall along a chain, so the drafts that reach the threshold are its first ones.
        lengths: np.ndarray = (products >= threshold).sum(0)
        lengths[self.exploring() :: EXPLORE] = logq.shape[1]
        return lengths

    def observe(self, logq: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> list[float]:
        """Learn from a round of `steps` drafts, from 1 to `depth`. Call it once for each round.

        logq                [C, steps] of the requests among whose drafts the round chose
        verified, accepted  [B] drafts of each request, accepted <= verified. B >= C: the requests from the C-th on
                            verified all their drafts

        Returns how many requests would accept 0, 1, ... drafts if all were verified, estimated: [steps + 1] floats.
        """
        # `chosen`: C
        chosen, steps = logq.shape
        cells = self._cells(logq)
        depth = np.arange(steps)[:, None]
        is_accepted = depth < accepted  # [steps, B]
        # Drafts with a known outcome: the accepted ones, and the refused one, if it was verified.
        has_outcome = depth < np.minimum(verified, accepted + 1)[:chosen]
        # The draft's bin (its cell // 64), plus BINS if it was accepted.
        outcomes = (cells + CELLS * is_accepted[:, :chosen])[has_outcome] // (CELLS // BINS)
        refused, passed = np.bincount(outcomes, minlength=2 * BINS).reshape(2, BINS)
        self.counts[0] += refused + passed
        self.counts[1] += passed
        chains = np.full((len(self._chains), chosen), -1)
        chains[:steps] = cells
        self._chains = np.concatenate([chains, self._chains], 1)[:, :LATEST]
        self._products = None
        self._seen += chosen
        # The chance of each draft: 1 or 0 where it was verified, else that of the table.
        chances = is_accepted.astype(float)
        unverified = depth >= verified[:chosen]
        of_chosen = chances[:, :chosen]  # a view, written in place
        of_chosen[:] = np.where(unverified, self.table.take(cells), of_chosen)
        # requests that accept at least 0, 1, ... drafts
        reached = [len(accepted), *_products(chances).sum(1).tolist(), 0.0]
        return [at_least - more for at_least, more in itertools.pairwise(reached)]

    def plan(self, steps: int, ms: Callable[[np.ndarray], np.ndarray]) -> Plan:
        """Return the plan with the most tokens per ms for rounds of `steps` drafts.

        ms  takes numbers of drafts [n] that a request verifies on average; returns the ms [n] of such rounds, above 0
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
        tokens = 1 + sums / chains  # of a request, if the i largest products are verified
        # PLANS numbers of products, from none to all of them.
        counts = np.linspace(0, len(products), PLANS).astype(int)
        rates = tokens[counts] / ms(counts / chains)
        count = int(counts[rates.argmax()])
        threshold = 2.0  # above every product: no draft is verified
        if count:
            threshold = float(products[count - 1])
            # All products equal to the threshold reach it, so they are counted, too.
            count = int(np.searchsorted(-products, -threshold, "right"))
        return Plan(threshold, count / chains, float(tokens[count] / tokens[-1]))

    def add_predicted(self, counts: np.ndarray) -> None:
        """Begin with the drafts [2, BINS] that the trainer predicts for these weights, in the meaning of `counts`.

        They come from `Prediction.chances`. They are added to the prior, because `inherit` and `restore` replace
        `counts`. Call it at most once: a second call would add to the first.
        """
        self._prior += counts * (FORETOLD / max(counts[0].sum(), FORETOLD))
        self._refit()

    def inherit(self, former: Selection) -> None:
        """Go on from the counts and chains of the rule under earlier weights; counts weigh less (INHERITED).

        `former` must have the same depth: `SpecRule.inherit` calls it only if the candidates are equal.
        """
        self.counts = former.counts * INHERITED
        self._chains = former._chains
        self._seen = former._seen
        self._refit()

    def restore(self, counts: Sequence[Sequence[float]]) -> None:
        """Begin with `counts` that an engine learnt under earlier weights; they weigh less. Raises ValueError."""
        self.counts = counts_of(counts) * INHERITED
        self._refit()

    def _cells(self, logq: np.ndarray) -> np.ndarray:
        """Return the cells [k, B] of log q [B, k].

        The last result is kept: `lengths` and `observe` ask for the same array one after the other. The array is
        compared by identity, so its values must not change in between.
        """
        if logq is not self._newest[0]:
            self._newest = (logq, cells_of(np.ascontiguousarray(logq.T, np.float32)))
        return self._newest[1]

    def _latest(self) -> np.ndarray:
        """Return the chances of the latest chains, [depth, N].

        Some of them had fewer drafts than `depth`. The missing drafts get the chances of other chains at that depth. If
        no chain had a draft there, they get those of the depth before.
        """
        # -1 reads the last cell; it is replaced below
        chances: np.ndarray = self.table[self._chains]
        for depth, missing in enumerate(self._chains < 0):
            present = chances[depth, ~missing]
            if not len(present):  # never at depth 0: every chain has a draft there
                present = chances[depth - 1]
            chances[depth, missing] = np.resize(present, missing.sum())
        return chances

    def _refit(self) -> None:
        """Compute `table` from counts and prior: a chance that never falls as q rises, by isotonic regression."""
        self._products = None
        drafts, accepted = self.counts + self._prior
        rates = isotonic_regression(accepted / drafts, weights=drafts).x
        self.table = np.interp(self._logq, self._centres, rates)


def _products(chances: np.ndarray) -> np.ndarray:
    """Turn chances [k, B] into products along their chains, in place, and return them.

    `np.cumprod` takes longer for short chains.
    """
    for shallower, deeper in itertools.pairwise(chances):
        deeper *= shallower
    return chances


def counts_of(counts: Sequence[Sequence[float]]) -> np.ndarray:
    """Return `Selection.counts` from JSON, the field "chances" of a rule. Raises ValueError for other data."""
    values = np.array(counts, float)
    if values.shape != (2, BINS) or not (values[0] >= values[1]).all():
        raise ValueError("speculation rule: chances: expected accepted drafts among the verified")
    if not np.isfinite(values).all() or values.min() < 0:
        raise ValueError("speculation rule: chances: expected finite counts from 0 on")
    return values

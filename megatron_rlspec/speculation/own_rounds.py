"""The costs of a table, corrected by the durations of the engine's own rounds, and which rounds are run to time them.

A table can be of another clock, of another machine, or of too few points. Here it is a prior. The logarithm of what a
round took over what the table says is, for configuration c at a place p (octaves of batch size and mean context),

    level + octave(p) + slope(p) · steps(c) + offset(c) + rest(p, c),

each part normal with mean 0 (a Gaussian process: Rasmussen and Williams, 2006, sections 2.2 and 5.4.1). The last three
have the width that the table states, times a factor, whose probabilities follow from the timings. So noise hardly
changes a table that agrees with the timed rounds, and one that does not soon weighs little.

Nothing here reads a clock: ranks that pass the same durations get the same costs and the same plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import SpecConfig

KEPT = 16  # newest timings of a cell: one configuration at one place
LEVEL = 2.0  # standard deviation of the logarithm of how much slower the machine is for all rounds
OCTAVE = 0.3  # the same of one place
NEAR = 0.5  # correlation of neighbouring octaves of batch sizes, and
NEAR_LENGTH = 0.8  # of mean contexts
FACTORS = 2.0 ** np.arange(7)  # of the table's width
UNLIKELY = 2.5  # standard deviation of the logarithm of that factor before anything was timed
LEAST_WIDTH = 0.01  # a share, as all widths
PER_OCTAVE = 0.06  # width for each octave to the nearest measured batch or context, above half of one
BEYOND = (0.15, 0.05)  # width for each octave beyond the measured batches, and contexts, above half of one
NOISE = 0.1  # standard deviation of the logarithm of one timing, until timings say otherwise; it counts for
NOISE_WEIGHT = 8.0  # timings
FLOOR = 0.02  # standard deviation of the median of any number of timings: the machine's speed drifts
FEW = {1: 0.6, 2: 0.2}  # the same of one and of two timings: a single round can be interrupted
AT_ONCE = 3  # timings of one configuration in turn
CHECKS = 1  # configurations beside the present one that are timed at first, whatever the table says
FREE = 8.0  # rounds that timing may lose at first, and
SHARE = 0.003  # the share of all rounds that it may lose after that
HORIZON = 300  # rounds for which a cost is worth knowing: after that acceptance has changed
LOOK = 16  # rounds between two looks for a configuration to time, unless a fit or a new place comes first
CLOSED = 1e-3  # a candidate of less than this share of the present rate must not run here

_PRIOR = np.exp(-0.5 * (np.log(FACTORS) / UNLIKELY) ** 2)
_PRIOR /= _PRIOR.sum()
Place = tuple[int, int]
Costs = Callable[[int, int], list[float]]  # batch, context tokens -> ms of each candidate by a table


def place(batch: int, context_tokens: int) -> Place:
    """Return the nearest powers of two of the batch size and of the mean context, as exponents."""
    return round(math.log2(batch)), round(math.log2(max(context_tokens / batch, 1.0)))


class Doubt(NamedTuple):
    """What is known at one place of the costs of n candidates, for each of m factors of the table's width.

    factors     [n] by which the table's costs are multiplied
    weights     [m] probabilities
    means       [m, n] of the logarithm of `factors`
    covariance  [m, n, n] of the same
    further     [n] variance of the median of AT_ONCE further timings; inf: they would tell nothing
    """

    factors: list[float]
    weights: np.ndarray
    means: np.ndarray
    covariance: np.ndarray
    further: np.ndarray

    def worth(self, now: int, rates: Sequence[float]) -> np.ndarray:
        """Return the share of a round that timing each candidate AT_ONCE times gains on average.

        It is the expected improvement over candidate `now` by what is known then, less what is promised already.
        rates  tokens per ms by `factors`
        """
        found = np.log(rates) + np.log(self.factors) - self.means
        ahead = found - found[:, [now]]
        own = np.diagonal(self.covariance, axis1=1, axis2=2)
        learnt = np.abs(own - self.covariance[:, now]) / np.sqrt(own + self.further)
        learnt = np.maximum(learnt, 1e-6)
        z = ahead / learnt
        improvement = learnt * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) + ahead * ndtr(z)
        worth: np.ndarray = self.weights @ improvement - np.maximum(np.log(rates) - math.log(rates[now]), 0.0)
        worth[now] = 0.0
        return worth


class OwnRounds:
    """Timings of an engine's rounds beside a table of one tensor-parallel size, and the costs that follow."""

    def __init__(self, table: CostTable, candidates: Sequence[SpecConfig]) -> None:
        self.candidates = list(candidates)
        self.tried: set[int] = set()  # candidates with timings
        self.fresh = False  # whether a fit came since the last look of the plan
        deepest = max(max(config.num_steps for config in candidates), 1)
        self._steps = np.array([config.num_steps / deepest for config in candidates])
        self._measured = [np.log2(np.array(axis, float)) for axis in (table.batches(), table.lengths())]
        spreads: dict[tuple[float, float], list[float]] = {}
        for cell in table.rounds:
            point = math.log2(cell.batch), math.log2(cell.context_tokens / cell.batch)
            spreads.setdefault(point, []).append(cell.spread_ms / cell.ms / math.sqrt(cell.samples))
        self._points = np.array(list(spreads))
        # Twice the standard error of a median: the two sides of a comparison.
        self._noise_widths = np.array([2 * float(np.median(shares)) for shares in spreads.values()])
        self._cells: dict[tuple[int, Place], deque[float]] = {}  # logarithms of ms over the table's
        self._count = 0
        self._next_fit = 2
        self._last: SpecConfig | None = None
        self._noise = NOISE
        self._weights = _PRIOR
        self._fitted: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []  # by factor
        self._doubts: dict[Place, Doubt] = {}

    def timed(self, config: SpecConfig, at: Place, ms: float, told: Sequence[float], change_ms: float = 0.0) -> None:
        """Add a round's duration; a table says `told` ms for each candidate.

        change_ms  of it, if it is the first one after another configuration: switching and catching up. Such a round
                   counts where few others are known, if most of it is decoding
        """
        former, self._last = self._last, config
        i = self.candidates.index(config)
        if former != config:
            if former is None or ms < 2 * change_ms or self.timings(i, at) >= AT_ONCE:
                return
            ms -= change_ms
        if not (ms > 0 and math.isfinite(ms)):
            return
        kept = self._cells.setdefault((i, at), deque(maxlen=KEPT))
        kept.append(math.log(ms / told[i]))
        self.tried.add(i)
        self._count += 1
        if len(kept) == AT_ONCE or self._count >= self._next_fit:
            self._next_fit = self._count + min(max(self._count // 4, 2), 64)
            self.fit()

    def timings(self, candidate: int, at: Place) -> int:
        return len(self._cells.get((candidate, at), ()))

    def width(self, places: np.ndarray) -> np.ndarray:
        """Return the width that the table states for differences between configurations, at `places` [k, 2]."""
        nearest = np.abs(places[:, None] - self._points[None, :]).sum(axis=2).argmin(axis=1)
        square = LEAST_WIDTH**2 + self._noise_widths[nearest] ** 2
        for axis, measured in enumerate(self._measured):
            at = places[:, axis]
            beyond = np.maximum(np.maximum(measured[0] - at, at - measured[-1]) - 0.5, 0.0)
            between = np.maximum(np.abs(at[:, None] - measured[None, :]).min(axis=1) - 0.5, 0.0)
            square += np.where(beyond > 0, BEYOND[axis] * beyond, PER_OCTAVE * between) ** 2
        width: np.ndarray = np.sqrt(square)
        return width

    def fit(self) -> None:
        """Find the probabilities of the factors from all timings. Takes about a millisecond."""
        self._doubts = {}
        self._fitted = []
        self._weights = _PRIOR
        self.fresh = True
        if not self._cells:
            return
        kept = [np.sort(np.array(timings)) for timings in self._cells.values()]
        medians = np.array([x[(len(x) - 1) // 2] for x in kept])  # the lower one: interruptions only lengthen a round
        counts = np.array([len(x) for x in kept])
        # Of a few timings most can be interrupted: then the shortest one is far below, and little is known.
        doubtful = np.where(counts <= AT_ONCE + 1, medians - np.array([x[0] for x in kept]), 0.0) ** 2
        variance = np.maximum(self._variance(counts), doubtful)
        apart = sum(float(np.minimum(np.abs(x - m) * 1.4826, 0.5).sum()) for x, m in zip(kept, medians, strict=True))
        self._noise = (NOISE * NOISE_WEIGHT + apart) / (NOISE_WEIGHT + float(counts.sum()))
        which = np.array([candidate for candidate, _ in self._cells])
        places = np.array([at for _, at in self._cells], float)
        scores = []
        for factor in FACTORS.tolist():
            covariance = self._kernel(which, places, which, places, factor) + np.diag(variance)
            lower = np.linalg.cholesky(covariance)
            y = np.linalg.solve(lower, medians)
            scores.append(-0.5 * float(y @ y) - float(np.log(np.diag(lower)).sum()))
            self._fitted.append((which, places, lower, y))
        likely = np.array(scores) + np.log(_PRIOR)
        weights = np.exp(likely - likely.max())
        self._weights = weights / weights.sum()

    def doubt(self, at: Place) -> Doubt:
        """Return what is known at this place. It does not change between two fits."""
        if at not in self._doubts:
            self._doubts[at] = self._doubt(at)
        return self._doubts[at]

    def take_up(self, former: OwnRounds, told: Costs, then: Costs) -> None:
        """Continue with another rule's timings; `told` and `then` are the costs by its table and by this one's."""
        if former.candidates != self.candidates:
            return
        for (i, at), kept in former._cells.items():
            batch = 2 ** at[0]
            context = batch * 2 ** at[1]
            shift = math.log(told(batch, context)[i] / then(batch, context)[i])
            self._cells[i, at] = deque((log_ms + shift for log_ms in kept), maxlen=KEPT)
        self.tried = set(former.tried)
        self._count = former._count
        self._next_fit = former._next_fit
        self.fit()

    def _variance(self, counts: np.ndarray) -> np.ndarray:
        """Return the variance of the median of so many timings."""
        variance: np.ndarray = 1.57 * self._noise**2 / np.maximum(counts, 1) + FLOOR**2
        for n, least in FEW.items():
            variance = np.where(counts == n, np.maximum(variance, least**2), variance)
        return variance

    def _kernel(self, c: np.ndarray, p: np.ndarray, d: np.ndarray, q: np.ndarray, factor: float) -> np.ndarray:
        """Return the covariance of candidates `c` at places `p` and candidates `d` at places `q`."""
        apart = np.abs(p[:, None] - q[None, :])
        near = NEAR ** apart[..., 0] * NEAR_LENGTH ** apart[..., 1]
        same = (c[:, None] == d[None, :]).astype(float)
        steps = self._steps[c][:, None] * self._steps[d][None, :]
        width = factor**2 * self.width(p)[:, None] * self.width(q)[None, :]
        covariance: np.ndarray = LEVEL**2 + OCTAVE**2 * near + width * (steps * near + 0.5 * same * (1 + near))
        return covariance

    def _doubt(self, at: Place) -> Doubt:
        own = np.arange(len(self.candidates))
        here = np.tile(np.array(at, float), (len(own), 1))
        means = np.zeros((len(FACTORS), len(own)))
        covariance = np.stack([self._kernel(own, here, own, here, factor) for factor in FACTORS.tolist()])
        for i, (which, places, lower, y) in enumerate(self._fitted):
            cross = np.linalg.solve(lower, self._kernel(which, places, own, here, float(FACTORS[i])))
            means[i] = cross.T @ y
            covariance[i] -= cross.T @ cross
        counts = np.array([self.timings(i, at) for i in own.tolist()])
        after = 1 / self._variance(np.minimum(counts + AT_ONCE, KEPT))
        gained = after - np.where(counts > 0, 1 / self._variance(counts), 0.0)
        further = np.divide(1.0, gained, out=np.full(len(own), np.inf), where=gained > 0.02 * after)
        return Doubt(np.exp(self._weights @ means).tolist(), self._weights, means, covariance, further)


class TimingPlan:
    """Decides which configuration to run a few rounds to time it, and when.

    First CHECKS configurations are timed whatever the table says, plain decoding before others, because timings of one
    configuration say nothing of the differences. After that one is timed where knowing its cost gains more, over
    HORIZON rounds, than the timing loses. Timing loses at most FREE rounds at first, and SHARE of the rounds after
    that.
    """

    def __init__(self) -> None:
        self.left = FREE  # rounds that timing may still lose
        self.requests = 0  # that draft in the rounds to time
        self._config = -1
        self._more = 0  # rounds of it to come
        self._checks = 0
        self._wait = 0  # rounds until the next look
        self._at: Place = (-1, -1)

    def next(
        self,
        own: OwnRounds,
        at: Place,
        now: int,
        rates: Sequence[float],
        tokens: Sequence[float],
        switches: float,
        catching_up: Mapping[int, float],
    ) -> int:
        """Return the candidate of the next round, if that is run to time it; else -1.

        now          the present candidate
        rates        tokens per ms of each candidate
        tokens       per request and round of each candidate
        switches     rounds that going to another candidate and back takes
        catching_up  by the number of requests that would draft, all of them last: rounds that their drafter needs first
        """
        self.left += SHARE
        if self._more > 0 and at == self._at and self._config != now:
            self._more -= 1
            return self._config
        self._more = 0
        self._wait -= 1
        if self._wait > 0 and at == self._at and not own.fresh:
            return -1
        self._wait = LOOK
        self._at = at
        own.fresh = False
        if own.timings(now, at) < AT_ONCE:
            return -1
        worth = own.doubt(at).worth(now, rates)
        each = np.array(rates) / rates[now]
        share = np.array(list(catching_up))[:, None] / max(catching_up)
        longer = np.array(tokens) / tokens[now] / each  # a round of it, in present rounds
        loses = longer - (1 + (np.array(tokens) - 1) * share) / tokens[now]
        extra = switches + np.array(list(catching_up.values()))[:, None]
        costs = np.maximum(loses, 0.0) * AT_ONCE + extra
        cost = costs.min(axis=0)
        gain = worth * HORIZON - cost
        unknown = [i for i in range(len(each)) if i not in own.tried and i != now and each[i] > CLOSED]
        if unknown and self._checks < CHECKS:
            gain[max(unknown, key=lambda i: (own.candidates[i].off, worth[i] / max(cost[i], 0.1)))] = math.inf
        gain[(cost > self.left) | (each <= CLOSED)] = -1.0
        self._config = int(gain.argmax())
        if gain[self._config] <= 0:
            return -1
        self._checks += math.isinf(gain[self._config])
        self.left -= float(cost[self._config])
        self._more = AT_ONCE - 1
        self.requests = list(catching_up)[int(costs[:, self._config].argmin())]
        return self._config

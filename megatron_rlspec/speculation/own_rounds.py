"""The costs of a table, corrected by the durations of the engine's own rounds, and which rounds are run to time them.

A table can be of another clock, of another machine, or of too few points. Here it is a prior. The logarithm of what a
round took over what the table says is, for configuration c at a place p (octaves of batch size and mean context),

    level + octave(p) + slope(p) · log(1 + steps(c)) + offset(p, c),

each part normal with mean 0 (a Gaussian process: Rasmussen and Williams, 2006, sections 2.2 and 5.4.1). The last two
have the width that the table states, times a factor. The probabilities of factors, and of two widths of the offset,
follow from the timings. So noise hardly changes a table that agrees with the timed rounds, and one that does not soon
weighs little. Where the errors of the timed configurations lie on a line, those of the others are taken to lie there.

Nothing here reads a clock: ranks that pass the same durations get the same costs and the same plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, softmax

from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import SpecConfig

KEPT = 32  # newest timings of a cell: one configuration at one place
CELLS = 48  # that were timed last
UNSURE = 0.5  # standard deviation of what switching and catching up takes, as a share of it
LEVEL = 2.0  # standard deviation of the logarithm of how much slower the machine is for all rounds
OCTAVE = 0.3  # the same of one octave
NEAR = 0.5  # correlation of neighbouring octaves of batch sizes, and
NEAR_LENGTH = 0.98  # of mean contexts
FACTORS = 2.0 ** np.arange(7)  # of the table's width
# width of single configurations over that of the slope: a smooth error, or one of each
OFFSETS = (0.2, 0.8)
UNLIKELY = 2.5  # standard deviation of the logarithm of that factor before anything was timed
LEAST_WIDTH = 0.01  # a share, as all widths
# width for each octave to the nearest measured batch or context, above half of one
PER_OCTAVE = 0.06
# width for each octave beyond the measured batches, and contexts, above half of one
BEYOND = (0.15, 0.05)
# standard deviation of the logarithm of one timing, until timings say otherwise; it counts for
NOISE = 0.1
NOISE_WEIGHT = 8.0  # timings
# standard deviation of the median of any number of timings: the machine's speed drifts
FLOOR = 0.01
FEW = 0.6  # the same of one timing, at most, if it is longer than expected: it can be interrupted
AT_ONCE = 3  # timings of one configuration in turn
CHECKS = 1  # configurations beside the present one that are timed at first, whatever the table says
FREE = 6.0  # rounds that timing may lose at first, and
SHARE = 0.003  # the share of all rounds that it may lose after that
HORIZON = 700  # rounds for which a cost is worth knowing: after that acceptance has changed
CLOSED = 1e-3  # a candidate of less than this share of the present rate must not run here

_WIDTHS, _OFFSETS = (grid.reshape(-1, 1, 1) ** 2 for grid in np.meshgrid(FACTORS, OFFSETS))
_PRIOR = np.exp(-0.5 * (np.log(_WIDTHS[:, 0, 0]) / (2 * UNLIKELY)) ** 2)
_PRIOR /= _PRIOR.sum()
Place = tuple[float, float]
# batch, context tokens -> ms of each candidate by a table
Costs = Callable[[int, int], list[float]]


def place(batch: int, context_tokens: int) -> Place:
    """Return the nearest octave of the batch size and half octave of the mean context, as exponents of two."""
    return round(math.log2(batch)), round(2 * math.log2(max(context_tokens / batch, 1.0))) / 2


class Doubt(NamedTuple):
    """What is known at one place of the costs of n candidates, for each of m pairs of FACTORS and OFFSETS.

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
        learnt = np.maximum(
            np.abs(own - self.covariance[:, now]) / np.sqrt(own + self.further), 1e-6
        )
        z = ahead / learnt
        improvement = learnt * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) + ahead * ndtr(z)
        worth: np.ndarray = self.weights @ improvement - np.maximum(
            np.log(rates) - math.log(rates[now]), 0.0
        )
        worth[now] = 0.0
        return worth


class OwnRounds:
    """Timings of an engine's rounds beside a table of one tensor-parallel size, and the costs that follow."""

    def __init__(self, table: CostTable, candidates: Sequence[SpecConfig]) -> None:
        self.candidates = list(candidates)
        self.tried: set[int] = set()  # candidates with timings
        self.fresh = False  # whether a fit came since the last look of the plan
        deepest = max(max(config.num_steps for config in candidates), 1)
        self._steps = np.log1p([config.num_steps for config in candidates]) / math.log1p(deepest)
        self._measured = [
            np.log2(np.array(axis, float)) for axis in (table.batches(), table.lengths())
        ]
        spreads: dict[tuple[float, float], list[float]] = {}
        for cell in table.rounds:
            point = math.log2(cell.batch), math.log2(cell.context_tokens / cell.batch)
            spreads.setdefault(point, []).append(cell.spread_ms / cell.ms / math.sqrt(cell.samples))
        self._points = np.array(list(spreads))
        # Twice the standard error of a median: the two sides of a comparison.
        self._noise_widths = np.array([2 * float(np.median(shares)) for shares in spreads.values()])
        # The logarithm of ms over the table's, how far above the expected one, share of the change that was taken off.
        self._cells: dict[tuple[int, Place], deque[tuple[float, float, float]]] = {}
        self._count = 0
        self._next_fit = 2
        self._last: SpecConfig | None = None
        self._noise = NOISE
        self._weights = _PRIOR
        self._fitted: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None
        self._doubts: dict[Place, Doubt] = {}

    def timed(
        self,
        config: SpecConfig,
        at: Place,
        ms: float,
        told: Sequence[float],
        change_ms: float = 0.0,
    ) -> None:
        """Add a round's duration; a table says `told` ms for each candidate.

        change_ms  of it, if it is the first one after another configuration: switching and catching up. Such a round
                   counts where few others are known, if most of it is decoding
        """
        former, self._last = self._last, config
        i = self.candidates.index(config)
        if former == config:
            change_ms = 0.0
        elif former is None or ms < 2 * change_ms or self.timings(i, at) >= AT_ONCE:
            return
        ms -= change_ms
        if not (ms > 0 and math.isfinite(ms)):
            return
        log_ms = math.log(ms / told[i])
        above = max(log_ms - math.log(self.doubt(at).factors[i]), 0.0) if self._cells else math.inf
        kept = self._cells.pop((i, at), deque(maxlen=KEPT))
        kept.append((log_ms, above, change_ms / (ms + change_ms)))
        self._cells[i, at] = kept
        if len(self._cells) > CELLS:
            del self._cells[next(iter(self._cells))]
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
        self.fresh = True
        if not self._cells:
            return
        timings = [np.array(cell).T for cell in self._cells.values()]
        kept = [np.sort(log_ms) for log_ms, _, _ in timings]
        # the lower one: interruptions only lengthen a round
        medians = np.array([x[(len(x) - 1) // 2] for x in kept])
        counts = np.array([len(x) for x in kept])
        apart = sum(
            float(np.minimum(np.abs(x - m) * 1.4826, 0.5).sum())
            for x, m in zip(kept, medians, strict=True)
        )
        self._noise = (NOISE * NOISE_WEIGHT + apart) / (NOISE_WEIGHT + float(counts.sum()))
        # Of a few timings most can be interrupted: then the shortest one is far below, and little is known.
        doubtful = (
            np.where(counts <= AT_ONCE + 1, medians - np.array([x[0] for x in kept]), 0.0) ** 2
        )
        variance = np.maximum(
            self._variance(counts, np.array([above.min() for _, above, _ in timings])), doubtful
        )
        variance += (UNSURE * np.array([share.mean() for _, _, share in timings])) ** 2
        which = np.array([candidate for candidate, _ in self._cells])
        places = np.array([at for _, at in self._cells], float)
        lower = np.linalg.cholesky(self._kernel(which, places, which, places) + np.diag(variance))
        y = np.linalg.solve(lower, medians[:, None])
        scores = -0.5 * (y[..., 0] ** 2).sum(-1) - np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(
            -1
        )
        self._fitted = which, places, lower, y
        self._weights = softmax(scores + np.log(_PRIOR))

    def doubt(self, at: Place) -> Doubt:
        """Return what is known at this place. It does not change between two fits."""
        if at not in self._doubts:
            self._doubts[at] = self._doubt(at)
        return self._doubts[at]

    def take_up(self, former: OwnRounds, told: Costs, then: Costs) -> None:
        """Continue with the timings of a rule of the same candidates.

        told, then  the costs by its table, and by this one's
        """
        for (i, at), kept in former._cells.items():
            batch = round(2 ** at[0])
            context = round(batch * 2 ** at[1])
            shift = math.log(told(batch, context)[i] / then(batch, context)[i])
            self._cells[i, at] = deque(
                ((log_ms + shift, above, share) for log_ms, above, share in kept), maxlen=KEPT
            )
        self.tried |= former.tried
        self.fit()

    def _variance(self, counts: np.ndarray, above: np.ndarray | float = 0.0) -> np.ndarray:
        """Return the variance of the median of so many timings; the least of them is `above` the expected one."""
        many = np.maximum(counts, 1)
        doubtful = np.where(counts <= 2, np.minimum(above, FEW * many**-1.5), 0.0)
        variance: np.ndarray = np.maximum(1.57 * self._noise**2 / many + FLOOR**2, doubtful**2)
        return variance

    def _kernel(self, c: np.ndarray, p: np.ndarray, d: np.ndarray, q: np.ndarray) -> np.ndarray:
        """Return the covariance [m, ., .] of candidates `c` at places `p` and candidates `d` at places `q`."""
        apart = np.abs(p[:, None] - q[None, :])
        near = NEAR ** apart[..., 0] * NEAR_LENGTH ** apart[..., 1]
        steps = self._steps[c][:, None] * self._steps[d][None, :]
        width = _WIDTHS * self.width(p)[:, None] * self.width(q)[None, :]
        covariance: np.ndarray = LEVEL**2 + near * (
            OCTAVE**2 + width * (steps + _OFFSETS * (c[:, None] == d[None, :]))
        )
        return covariance

    def _doubt(self, at: Place) -> Doubt:
        own = np.arange(len(self.candidates))
        here = np.tile(np.array(at, float), (len(own), 1))
        covariance = self._kernel(own, here, own, here)
        means = np.zeros(covariance.shape[:2])
        if self._fitted is not None:
            which, places, lower, y = self._fitted
            cross = np.linalg.solve(lower, self._kernel(which, places, own, here)).transpose(
                0, 2, 1
            )
            means = (cross @ y)[..., 0]
            covariance = covariance - cross @ cross.transpose(0, 2, 1)
        counts = np.array([self.timings(i, at) for i in own.tolist()])
        after = 1 / self._variance(np.minimum(counts + AT_ONCE, KEPT))
        gained = after - np.where(counts > 0, 1 / self._variance(counts), 0.0)
        further = np.divide(1.0, gained, out=np.full(len(own), np.inf), where=gained > 0.02 * after)
        return Doubt(
            np.exp(self._weights @ means).tolist(), self._weights, means, covariance, further
        )


class TimingPlan:
    """Decides which configuration to run a few rounds to time it, and when.

    It looks after each fit, and at each new place. First CHECKS configurations are timed whatever the table says, plain
    decoding before others, because timings of one configuration say nothing of the differences. After that one is timed
    where knowing its cost gains more, over HORIZON rounds, than the timing loses. Timing loses at most FREE rounds at
    first, and SHARE of the rounds after that.
    """

    def __init__(self) -> None:
        self.left = FREE  # rounds that timing may still lose
        self.requests = 0  # that draft in the rounds to time
        self._config = -1
        self._more = 0  # rounds of it to come
        self._checks = 0
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
        if (
            self._more > 0
            and at == self._at
            and self._config != now
            and rates[self._config] > CLOSED * rates[now]
        ):
            self._more -= 1
            return self._config
        self._more = 0
        if at == self._at and not own.fresh:
            return -1
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
        unknown = [
            i for i in range(len(each)) if i not in own.tried and i != now and each[i] > CLOSED
        ]
        if unknown and self._checks < CHECKS:
            gain[
                max(unknown, key=lambda i: (own.candidates[i].off, worth[i] / max(cost[i], 0.1)))
            ] = math.inf
        gain[(cost > self.left) | (each <= CLOSED)] = -1.0
        self._config = int(gain.argmax())
        if gain[self._config] <= 0:
            return -1
        self._checks += math.isinf(gain[self._config])
        self.left -= float(cost[self._config])
        self._more = AT_ONCE - 1
        self.requests = list(catching_up)[int(costs[:, self._config].argmin())]
        return self._config

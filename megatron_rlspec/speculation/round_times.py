"""How long decode rounds take: by the model's sizes, corrected by the rounds that an engine times.

A roofline knows nothing of the machine. So a round of configuration c takes

    log ms = log cost(c, batch, context) + speed + error[c] + noise.

`cost` is the roofline's. `speed` is the same for all configurations and moves with time. `error[c]` is by how much the
cost is wrong about one of them. Both are estimated separately near each power of two of the batch size (an "octave"),
by a Kalman filter: the more uncertain an estimate is, the further a timing moves it. Only differences between errors
matter to a choice. They become known when two configurations run shortly after each other.

An engine's `SpecRule` owns a `RoundTimes`. The trainer's `Learning` makes one from what engines report, to estimate
what drafting saved.

Nothing here reads a clock. Ranks that make the same calls in the same order, with the same durations, have the same
estimates.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig

# Standard deviations of logarithms, so about relative ones.
DOUBT = 0.4  # of `error` of the deepest configuration, if above one draft, at first, without the share ALONE
NOISE = 0.05  # of one timing, until timings say otherwise
DRIFT = 0.01  # of `speed`, from one timing to the next
AWAY = 0.1  # of `speed`, while the engine ran other batch sizes
NEXT_OCTAVE = 0.3  # of `speed` where an octave begins with its neighbour's
NEVER_SEEN = 3.0  # of `speed` before anything was timed

# Shares of the variance of `error` before anything was timed.
ALONE = 0.15  # independent for each configuration; the rest grows with log(1 + steps)
PER_OCTAVE = 0.2  # added where an octave begins with the estimates of its neighbour
PER_TIMING = 2e-4  # added with every timing: contexts grow, and machines change

# a timing further off than this number of standard deviations raises the uncertainty
SURPRISE = 3.0
MOST_VARIANCE = 0.5  # of an error
FORGET_NOISE = 0.05  # weight of the newest pair of rounds in the estimate of noise


class RoundTimes:
    """Estimates the ms of a round of each candidate, with errors.

    candidates   at least one. Index 1 + i of `mean` and `covariance` is candidate i; index 0 is `speed`
    octaves      by the exponent of the power of two: (mean [1 + n], covariance [1 + n, 1 + n]) of (speed, errors). The
                 arrays are changed in place
    noise        standard deviation of the log of one timing
    timings      number of timings of each candidate
    comparisons  number of timings that came after one of another candidate near the same batch size

    Call `enter` (or `ms`, which does) before `errors` and `knows`: these are of the present octave. Batch sizes are at
    least 1.
    """

    def __init__(self, cost: Roofline, candidates: Sequence[SpecConfig]) -> None:
        self.cost = cost
        self.candidates = tuple(candidates)
        steps = np.log1p([config.num_steps for config in candidates])
        steps /= max(steps.max(), 1.0)
        size = 1 + len(self.candidates)
        self._prior = np.zeros((size, size))
        self._prior[1:, 1:] = DOUBT**2 * (np.outer(steps, steps) + ALONE * np.eye(size - 1))
        # Learnt times are corrections of this cost, so `restore` refuses those of another one.
        self._cost_id = zlib.crc32(json.dumps(cost.to_json()).encode())
        self.octaves: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.noise = NOISE
        self.timings = [0] * len(self.candidates)
        self.comparisons = 0
        self._octave = -1  # the present one, set by `enter`; -1: none yet
        self._last: SpecConfig | None = None  # configuration of the last round
        # log(ms / cost) of the first of two rounds in a row
        self._first_of_pair: float | None = None
        self._learnt_last = (-1, -1)  # octave and index of the last timing that counted
        # (batch, quarter octave of context) -> cost of each candidate, for `_verified`
        self._rows: dict[tuple[int, int], list[float]] = {}
        # drafts of each candidate (`set_verified`); None: all
        self._verified: np.ndarray | None = None
        # (candidate, batch, quarter octave of context) -> costs by verified drafts
        self._curves: dict[tuple[int, int, int], list[float]] = {}
        self._off = self.candidates.index(OFF) if OFF in self.candidates else -1
        # What follows from the estimates at the present batch size, until they change.
        self._factors: list[float] = []
        self._errors: dict[int, list[float]] = {}

    def set_verified(self, drafts: Sequence[float]) -> None:
        """Set how many drafts rounds verify, for ragged rules: `ms` and `timed` then compute costs of such rounds.

        Each call replaces the one before.

        drafts  drafts that a round of each candidate verifies of a request on average, in the order of the candidates
        """
        self._verified = np.array(drafts)
        self._rows.clear()
        self._curves.clear()

    def ragged_ms(
        self, candidate: int, batch: int, context_tokens: int, drafts: np.ndarray
    ) -> np.ndarray:
        """Return ms [n] of rounds of a candidate that verify `drafts [n]` of a request on average.

        The unit is that of `ms`. Unlike there, the result can be less than the ms of plain decoding.
        """
        self.enter(batch)
        mean, _ = self.octaves[self._octave]
        place = np.array(batch), np.array(context_tokens)
        # `speed` (mean[0]) is left out, as in `ms`: it is common to all candidates
        cost = self.cost.grid([self.candidates[candidate]], *place, drafts)
        return math.exp(mean[1 + candidate]) * cost

    def _ragged_cost(self, candidate: int, batch: int, context_tokens: int, drafts: float) -> float:
        """Return the cost of one round that verifies `drafts` of a request on average.

        It is interpolated between multiples of 1/8 draft. Their costs are kept until the next `set_verified`, because
        computing them in every round takes too long.
        """
        config = self.candidates[candidate]
        quarter = _quarter(batch, context_tokens)
        key = candidate, batch, quarter
        if key not in self._curves:
            # one multiple more than the most drafts, so that `place + 1` below exists, too
            counts = np.arange(8 * config.num_steps + 2) / 8
            sizes = np.array(batch), np.array(_context_of(batch, quarter))
            self._curves[key] = self.cost.grid([config], *sizes, counts).tolist()
        place = min(int(8 * drafts), 8 * config.num_steps)
        low, high = self._curves[key][place : place + 2]
        return low + (8 * drafts - place) * (high - low)

    def enter(self, batch: int) -> None:
        """Make the octave of this batch size the present one.

        If it never ran, it starts with the estimates of the nearest octave that did, and more uncertainty. Each change
        of octave makes its `speed` more uncertain, so enter only those that rounds are about to run in.
        """
        octave = octave_of(batch)
        if octave == self._octave:
            return
        self._octave = octave
        self._drop_derived()
        if octave in self.octaves:
            mean, covariance = self.octaves[octave]
            covariance[0, 0] += AWAY**2  # in place: the speed may have changed since
            return
        mean = np.zeros(len(self._prior))
        covariance = self._prior.copy()
        covariance[0, 0] = NEVER_SEEN**2
        if self.octaves:
            # of two equally near ones the lower: all ranks must take the same
            nearest = min(self.octaves, key=lambda other: (abs(other - octave), other))
            mean, covariance = (part.copy() for part in self.octaves[nearest])
            far = abs(nearest - octave)
            covariance += PER_OCTAVE * far * self._prior
            covariance[0, 0] += NEXT_OCTAVE**2 * far
        self.octaves[octave] = mean, covariance

    def ms(self, batch: int, context_tokens: int) -> list[float]:
        """Return the ms of a round of each candidate, up to a common factor (exp of `speed`).

        If `OFF` is a candidate, the others take at least its ms, whatever the estimates say.
        """
        self.enter(batch)
        if not self._factors:
            mean, _ = self.octaves[self._octave]
            self._factors = np.exp(mean[1:]).tolist()
        costs = self._cost_of(batch, context_tokens)
        ms = [cost * factor for cost, factor in zip(costs, self._factors, strict=True)]
        if self._off >= 0:
            plain = ms[self._off]
            ms = [max(value, plain) for value in ms]
        return ms

    def errors(self, reference: int) -> list[float]:
        """Return the standard deviation of log(ms of each candidate / ms of candidate `reference`).

        It is that of the present octave.
        """
        if reference not in self._errors:
            _, covariance = self.octaves[self._octave]
            errors = covariance[1:, 1:]
            diagonal = errors.diagonal()
            # of a difference of two errors; rounding may go below 0
            variances = np.maximum(diagonal + diagonal[reference] - 2 * errors[reference], 0.0)
            self._errors[reference] = np.sqrt(variances).tolist()
        return self._errors[reference]

    def knows(self, candidate: int) -> bool:
        """Return whether rounds of this candidate were timed in the present octave, or near it, lately.

        They were if the estimate of log ms, of `speed` and `error` together, has a standard deviation below 0.5.
        """
        _, covariance = self.octaves[self._octave]
        column = covariance[0] + covariance[1 + candidate]
        return bool(column[0] + column[1 + candidate] < 0.25)  # the variance of the sum: 0.5²

    def timed(
        self,
        config: SpecConfig,
        batch: int,
        context_tokens: int,
        ms: float | None,
        drafts: float | None = None,
    ) -> None:
        """Learn from the duration of a round. Call it for every round, in the order in which they ran.

        config  one of the candidates
        ms      above 0; None if other work is in it: the round does not count
        drafts  drafts that it verified of a request, on average; None: as many as `set_verified` said, or all

        The first round after another configuration does not count. The others count in pairs: of two rounds in a row
        the shorter one counts, because interruptions only lengthen a round.
        """
        last, self._last = self._last, config
        if last != config or ms is None:
            self._first_of_pair = None
            return
        i = self.candidates.index(config)
        if drafts is None:
            cost = self._cost_of(batch, context_tokens)[i]
        else:
            cost = self._ragged_cost(i, batch, context_tokens, drafts)
        log_ms = math.log(ms / cost)
        if self._first_of_pair is None:
            self._first_of_pair = log_ms
            return
        distance = abs(log_ms - self._first_of_pair)
        log_ms = min(log_ms, self._first_of_pair)
        self._first_of_pair = None
        # Two normal values differ by 1.13 standard deviations on average. It is capped: an interruption is no noise.
        deviation = min(distance / 1.13, 4 * self.noise)
        self.noise += FORGET_NOISE * (deviation - self.noise)
        self.noise = max(self.noise, 1e-3)
        self._learn(octave_of(batch), 1 + i, log_ms)

    def _learn(self, octave: int, i: int, log_ms: float) -> None:
        """Move the estimates of an octave towards a timing of candidate i - 1: one step of the Kalman filter.

        i       index in `mean` and `covariance`
        log_ms  log(ms / cost), a measurement of mean[0] + mean[i]
        """
        # No `ms` was computed in this octave, because the round was launched under the rule before this one.
        if octave not in self.octaves:
            return
        self.timings[i - 1] += 1
        self._drop_derived()
        mean, covariance = self.octaves[octave]
        covariance += PER_TIMING * self._prior
        covariance[0, 0] += DRIFT**2
        noise = 0.68 * self.noise**2  # variance of the smaller of two normal values
        difference = log_ms - mean[0] - mean[i]
        # covariance of (speed, errors) with the measured sum, and the variance of the measurement
        column = covariance[0] + covariance[i]
        variance = column[0] + column[i] + noise
        # A timing far off means that the estimates are less certain than they claim.
        if difference**2 > SURPRISE**2 * variance:
            if (octave, i) == self._learnt_last:
                # The same configuration ran all the time, so the machine's speed has changed.
                covariance[0, 0] += difference**2
            else:
                # The cost is wrong about this candidate by more than was thought, so trust it less for the others, too.
                largest_factor = MOST_VARIANCE / covariance.diagonal()[1:].max()
                covariance *= min(difference**2 / variance, largest_factor)
                if difference > 0:
                    # It can be an interruption: let this timing weigh little, so that a second one must agree.
                    noise = (difference / SURPRISE) ** 2
            column = covariance[0] + covariance[i]
            variance = column[0] + column[i] + noise
        self.comparisons += octave == self._learnt_last[0] and i != self._learnt_last[1]
        self._learnt_last = octave, i
        mean += column * (difference / variance)
        covariance -= np.outer(column, column) / variance

    def to_json(self) -> dict[str, Any]:
        """Return the state for `restore`, of this or another engine. `Learning` reads "timings" and "candidates" of it.

        The list "timings" is not a copy: it changes with later calls of `timed`, until it is written as JSON.
        """
        octaves = {}
        for octave, (mean, covariance) in self.octaves.items():
            octaves[str(octave)] = [mean.tolist(), covariance.tolist()]
        return {
            "cost": self._cost_id,
            "candidates": [config.to_json() for config in self.candidates],
            "timings": self.timings,
            "comparisons": self.comparisons,
            "noise": self.noise,
            "octaves": octaves,
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Set what `to_json` returned. Returns False, and sets nothing, for another cost or other candidates.

        Call it before `enter`: the present octave need not be among the restored ones.
        """
        candidates = tuple(map(SpecConfig.from_json, state["candidates"]))
        if state["cost"] != self._cost_id or candidates != self.candidates:
            return False
        self._drop_derived()
        self.octaves = {}
        for octave, (mean, covariance) in state["octaves"].items():
            self.octaves[int(octave)] = np.array(mean, float), np.array(covariance, float)
        self.noise = float(state["noise"])
        self.comparisons = int(state["comparisons"])
        self.timings = [int(count) for count in state["timings"]]
        return True

    def _drop_derived(self) -> None:
        """Drop what was computed from the estimates. Call it whenever these or the present octave change."""
        self._factors = []
        self._errors = {}

    def _cost_of(self, batch: int, context_tokens: int) -> list[float]:
        """Return the cost of a round of each candidate at this batch size and context.

        The mean context is rounded to a quarter octave, so that most rounds find their costs in `_rows`.
        """
        quarter = _quarter(batch, context_tokens)
        if (batch, quarter) not in self._rows:
            self._compute_costs(batch, quarter)
        return self._rows[batch, quarter]

    def _compute_costs(self, batch: int, quarter: int) -> None:
        """Put into `_rows` the costs of this batch size and its neighbours: sixteen take little longer than one."""
        first = (batch - 1) // 16 * 16 + 1
        batches = np.arange(first, first + 16)
        contexts = _context_of(batches, quarter)
        costs = self.cost.grid(self.candidates, batches, contexts, self._verified)
        for near, row in zip(batches.tolist(), costs.T.tolist(), strict=True):
            self._rows[near, quarter] = row


def _quarter(batch: int, context_tokens: int) -> int:
    """Return the log2 of the mean context of a request, in quarters, rounded."""
    return round(4 * math.log2(max(context_tokens / batch, 1.0)))


def _context_of(batch: Any, quarter: int) -> Any:
    """Return the context tokens of all requests: of a batch size, or of an array of them, by `_quarter` of the mean."""
    return batch * 2 ** (quarter / 4)


def octave_of(batch: int) -> int:
    """Return the exponent of the power of two that is nearest to the batch size, by logarithm."""
    return round(math.log2(batch))

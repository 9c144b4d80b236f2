"""Trials: a few rounds of a candidate that is not the incumbent, run to learn its time and its acceptance.

A trial comes where a candidate could be better than the incumbent by more than is known, and where what it loses can be
paid. All trials lose at most FREE rounds at first, and a share of the rounds after that. Each one that changes nothing
doubles the wait for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rlspec.speculation.acceptance import Acceptance, expected_tokens
from megatron_rlspec.speculation.round_times import RoundTimes
from megatron_rlspec.types import OFF, SpecConfig

ROUNDS = 3  # of a trial; the first after a change is not timed
DRAFTS = 9  # requests that draft in a trial of more drafts, over its rounds
FREE = 3.0  # rounds that trials may lose at first, and
SHARE = 0.01  # the share of all rounds after that
WAIT = 4  # rounds between two trials at first, and
MOST_WAIT = 512  # after many that changed nothing
OPTIMISM = 1.5  # errors by which a candidate may be better than is known
LEAST_GAIN = 0.01  # that a candidate must promise
PLAIN_ERROR = (
    0.15  # of plain decoding's time against the incumbent's: above it plain decoding is tried
)
CHANGE = 0.02  # standard deviation by which acceptance changes in a round without drafts, and
MOST_CHANGE = 0.4  # in any number of them; it grows with the square root


class Situation(NamedTuple):
    """What a decision depends on, before a round.

    incumbent    index of the candidate that runs
    ms           of a round of each candidate
    rates        tokens per ms and request of each candidate; 0 where it must not run
    catch_up_ms  takes n; returns the ms in which the drafter reads what the n requests missed that missed least
    apart        whether some of the requests can catch up and draft while the others do not
    """

    batch: int
    incumbent: int
    ms: Sequence[float]
    rates: Sequence[float]
    catch_up_ms: Callable[[int], float]
    apart: bool


class Trials:
    """Chooses which candidate is tried and when, and pays for it.

    forecast   acceptance a_1, a_2, ... that the trainer predicts for new weights; None: none, or used already
    requests   that draft in the present trial
    unseen     rounds since acceptance was last observed
    allowance  rounds that trials may lose now
    """

    def __init__(
        self,
        candidates: Sequence[SpecConfig],
        acceptance: Acceptance,
        times: RoundTimes,
        forecast: Sequence[float] | None,
    ) -> None:
        self.candidates = candidates
        self.acceptance = acceptance
        self.times = times
        self.forecast = forecast
        self.requests = 0
        self.unseen = 0
        self.allowance = FREE
        self.interval = WAIT
        self.wait = WAIT
        self._off = candidates.index(OFF) if OFF in candidates else -1
        self._tried = -1
        self._left = 0  # rounds of the present trial
        self._unpaid = 0  # rounds of the last one that the allowance has not paid yet

    @property
    def changed(self) -> float:
        """Return the standard deviation by which acceptance may have changed since it was observed."""
        return min(CHANGE * math.sqrt(self.unseen), MOST_CHANGE)

    def restart(self) -> None:
        """End the present trial, and wait as at the start: another candidate is the incumbent."""
        self._left = 0
        self.interval = self.wait = WAIT

    def inherit(self, former: Trials, rounds: int) -> None:
        """Go on from the trials before a push, which counts as `rounds` rounds without drafts."""
        self.unseen = former.unseen + rounds
        self.allowance = former.allowance
        self.interval = max(former.interval // 4, WAIT)
        self.wait = min(former.wait, self.interval)

    def next(self, now: Situation) -> int:
        """Return the candidate to try in the next round; -1: none."""
        self.allowance += SHARE
        self.wait -= 1
        if self._left == 0 and not self._begin(now):
            return -1
        if now.rates[self._tried] == 0:
            self._left = 0
            return -1
        self._left -= 1
        self._unpaid += 1
        return self._tried

    def _begin(self, now: Situation) -> bool:
        """Begin a trial if one is due and can be paid for. Returns whether it did."""
        tried = self._foretold(now)
        foretold = tried >= 0
        if not foretold and self.wait > 0:
            return False
        # The rounds of the last trial are timed by now.
        self.allowance -= self._unpaid * self._loss(self._tried, now)
        self._unpaid = 0
        if not foretold:
            tried = self._most_promising(now)
        if tried < 0:
            self.wait = self.interval
            return False
        requests = now.batch
        reading = 0.0
        if now.incumbent == self._off:
            if now.apart:
                requests = min(now.batch, -(-DRAFTS // ROUNDS))
            reading = now.catch_up_ms(requests) / now.ms[now.incumbent]
        loss = ROUNDS * self._loss(tried, now)
        if self._nothing_compared():
            loss = 0.0  # the cost may be wrong about it
        if loss + reading > self.allowance:
            return False
        self.allowance -= reading
        if foretold:
            # whatever was observed before is of other weights
            self.forecast = None
            self.unseen = max(self.unseen, round((MOST_CHANGE / CHANGE) ** 2))
        self._tried = tried
        self._left = ROUNDS
        if self._steps(tried) > self._steps(now.incumbent):
            self._left = max(ROUNDS, -(-DRAFTS // requests))
        self.requests = requests
        self.interval = min(2 * self.interval, MOST_WAIT)
        self.wait = self.interval
        return True

    def _foretold(self, now: Situation) -> int:
        """Return the candidate that pays off most by the forecast, if none drafts now; else -1."""
        if self.forecast is None or now.incumbent != self._off:
            return -1
        best, most = -1, 1.0 + LEAST_GAIN
        for i, config in enumerate(self.candidates):
            tokens = expected_tokens(config, self.forecast)
            known = self.acceptance.totals[config.num_steps]
            gain = now.rates[i] / known * tokens / now.rates[now.incumbent]
            if gain > most:
                best, most = i, gain
        return best

    def _most_promising(self, now: Situation) -> int:
        """Return the candidate that may gain most for what its trial loses; -1: none may gain.

        Plain decoding comes first if its time is not known. Before the incumbent was timed here, nothing is compared.
        """
        incumbent = now.incumbent
        errors = [0.0] * len(now.rates)
        compare = False
        if any(self.times.timings):
            if not self.times.knows(incumbent):
                return -1
            errors = self.times.errors(incumbent)
            compare = self._nothing_compared()
            if self._off not in (-1, incumbent):
                error = errors[self._off]
                ahead = math.log(now.rates[incumbent] / now.rates[self._off])
                if compare or (error > PLAIN_ERROR and ahead < 3 * error):
                    return self._off
        best, most = -1, 0.0
        for i, config in enumerate(self.candidates):
            if i == incumbent or now.rates[i] == 0:
                continue
            of_tokens = self.acceptance.error(
                self._steps(incumbent), config.num_steps, self.changed
            )
            error = math.hypot(errors[i], of_tokens)
            gain = math.log(now.rates[i] / now.rates[incumbent]) + OPTIMISM * error
            worth = math.exp(gain) / (1 + self._loss(i, now))
            if (gain > LEAST_GAIN or compare) and worth > most:
                best, most = i, worth
        return best

    def _nothing_compared(self) -> bool:
        """Return whether timings say nothing of the differences yet."""
        return not self.times.comparisons

    def _loss(self, tried: int, now: Situation) -> float:
        """Return the rounds of the incumbent that one round of a trial loses if it delivers no more drafts."""
        totals = self.acceptance.totals
        tokens = totals[self._steps(tried)] / totals[self._steps(now.incumbent)]
        return max(now.ms[tried] / now.ms[now.incumbent] - min(tokens, 1.0), 0.0)

    def _steps(self, candidate: int) -> int:
        return self.candidates[candidate].num_steps

    def to_json(self) -> dict[str, Any]:
        return {"allowance": self.allowance, "interval": self.interval, "wait": self.wait}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `to_json` returned."""
        self.allowance = float(state["allowance"])
        self.interval = int(state["interval"])
        self.wait = int(state["wait"])

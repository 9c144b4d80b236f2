"""Trials: a few rounds of a candidate that is not the incumbent, run to learn its time and its acceptance.

`rule.py` chooses the incumbent, and asks `Trials.next` before every round whether to run another candidate. A candidate
is tried if it could be better than the incumbent within the errors of the estimates, and if the allowance pays for what
the trial may lose. The allowance begins with FREE rounds and grows by SHARE with every round. Until two candidates were
timed one after the other, the loss of a trial that begins counts as 0: its estimate may be wrong, and only a trial can
show it. Each trial that changes nothing doubles the wait for the next.

Losses, the allowance and waits are in rounds of the incumbent. A candidate is an index into `candidates`; -1 is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rlspec.speculation.acceptance import Acceptance, expected_tokens
from megatron_rlspec.speculation.round_times import RoundTimes
from megatron_rlspec.types import OFF, SpecConfig

# rounds of a trial: `RoundTimes` does not count the first after a change, and takes one of the next two
ROUNDS = 3
# requests that draft in a trial of more drafts, summed over its rounds: fewer say little of acceptance
DRAFTS = 9
FREE = 3.0  # rounds that all trials together may lose at first
SHARE = 0.01  # rounds that they may lose more with every round
WAIT = 4  # rounds before the first trial; each trial doubles it
MOST_WAIT = 512  # rounds between two trials after many that changed nothing
OPTIMISM = 1.5  # standard deviations by which a candidate may be better than its estimate
LEAST_GAIN = 0.01  # relative gain in tokens per ms that a candidate must promise
# Standard deviation of log time of plain decoding against the incumbent's, above which plain decoding is tried.
PLAIN_ERROR = 0.15
# After n rounds without drafts, rates may have changed by a standard deviation of CHANGE · √n, at most MOST_CHANGE.
CHANGE = 0.02
MOST_CHANGE = 0.4


class Situation(NamedTuple):
    """What a decision depends on, before a round.

    batch        requests of the round
    incumbent    index of the candidate that runs if nothing is tried
    ms           estimated ms of a round of each candidate
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

    acceptance, times  the estimates, which the rule shares and updates
    forecast           acceptance a_1, a_2, ... that the trainer predicts for new weights; None: none, or used already
    requests           the number of requests that draft in the present trial; only if `next` returned a candidate
    unseen             rounds since acceptance was last observed; `rule.py` counts them
    allowance          rounds that trials may lose now; it can fall below 0, and no trial begins until it has recovered
    interval, wait     rounds from one trial to the next, and how many of them are left
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
        self._tried = -1  # the candidate of the present or last trial
        self._left = 0  # rounds left of the present trial
        # rounds of the last trial that the allowance has not paid yet: see `_begin`
        self._unpaid = 0

    @property
    def changed(self) -> float:
        """Return the standard deviation by which acceptance rates may have changed since they were observed."""
        return min(CHANGE * math.sqrt(self.unseen), MOST_CHANGE)

    def restart(self) -> None:
        """End the present trial, and wait as at the start: another candidate is the incumbent."""
        self._left = 0
        self.interval = self.wait = WAIT

    def inherit(self, former: Trials, rounds: int) -> None:
        """Go on from the trials before a push, which counts as `rounds` rounds without drafts.

        The wait gets shorter. The new `forecast` stays, and a trial that was running ends.
        """
        self.unseen = former.unseen + rounds
        self.allowance = former.allowance
        self.interval = max(former.interval // 4, WAIT)
        self.wait = min(former.wait, self.interval)

    def next(self, now: Situation) -> int:
        """Return the candidate to try in the next round; -1: run the incumbent. Call it once before every round."""
        self.allowance += SHARE
        self.wait -= 1
        if self._left == 0 and not self._begin(now):
            return -1
        if now.rates[self._tried] == 0:  # the batch has grown above the candidate's limit
            self._left = 0
            return -1
        self._left -= 1
        self._unpaid += 1
        return self._tried

    def _begin(self, now: Situation) -> bool:
        """Begin a trial if one is due and can be paid for. Returns whether it did.

        A candidate that the forecast calls better does not wait.
        """
        tried = self._foretold(now)
        foretold = tried >= 0
        if not foretold and self.wait > 0:
            return False
        # The last trial is paid only now: its rounds are timed by now, so its loss is estimated better. Before the
        # first trial `_unpaid` is 0, so it does not matter that `_tried` is -1.
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
            # The drafter must first read what it missed. A few requests suffice: DRAFTS of them over ROUNDS rounds, so
            # DRAFTS / ROUNDS in each, rounded up.
            if now.apart:
                requests = min(now.batch, -(-DRAFTS // ROUNDS))
            reading = now.catch_up_ms(requests) / now.ms[now.incumbent]
        loss = ROUNDS * self._loss(tried, now)
        if self._nothing_compared():
            # The cost model may be wrong about the loss. Without a trial that would stay unknown.
            loss = 0.0
        if loss + reading > self.allowance:
            return False  # `wait` is not set: the next round asks again, with a larger allowance
        self.allowance -= reading
        if foretold:
            # The forecast counts once. What was observed before is of other weights, so it may be off by the most.
            self.forecast = None
            self.unseen = max(self.unseen, round((MOST_CHANGE / CHANGE) ** 2))
        self._tried = tried
        self._left = ROUNDS
        if self._steps(tried) > self._steps(now.incumbent):
            self._left = max(ROUNDS, -(-DRAFTS // requests))  # DRAFTS / requests, rounded up
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
            observed = self.acceptance.totals[config.num_steps]
            # The candidate's rate, with the predicted tokens of a round in place of the observed ones. A candidate that
            # must not run has rate 0, so it never gains.
            gain = now.rates[i] / observed * tokens / now.rates[now.incumbent]
            if gain > most:
                best, most = i, gain
        return best

    def _most_promising(self, now: Situation) -> int:
        """Return the candidate that may gain most for what its trial loses; -1: none may gain.

        Plain decoding comes first if its time is not known. If other rounds were timed, but none of the incumbent near
        this batch size, there is no trial: nothing could be compared with it.
        """
        incumbent = now.incumbent
        errors = [0.0] * len(now.rates)
        must_compare = False  # whether a candidate is tried also without a promised gain
        if any(self.times.timings):
            if not self.times.knows(incumbent):
                return -1
            errors = self.times.errors(incumbent)
            must_compare = self._nothing_compared()
            if self._off not in (-1, incumbent):
                error = errors[self._off]
                ahead = math.log(now.rates[incumbent] / now.rates[self._off])
                # not if the incumbent is ahead by more than three standard deviations can explain
                if must_compare or (error > PLAIN_ERROR and ahead < 3 * error):
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
            if (gain > LEAST_GAIN or must_compare) and worth > most:
                best, most = i, worth
        return best

    def _nothing_compared(self) -> bool:
        """Return whether no two candidates were timed one after the other yet, so that their difference is unknown."""
        return not self.times.comparisons

    def _loss(self, tried: int, now: Situation) -> float:
        """Return the rounds of the incumbent that one round of a trial loses if it delivers no more drafts."""
        totals = self.acceptance.totals
        tokens = totals[self._steps(tried)] / totals[self._steps(now.incumbent)]
        return max(now.ms[tried] / now.ms[now.incumbent] - min(tokens, 1.0), 0.0)

    def _steps(self, candidate: int) -> int:
        return self.candidates[candidate].num_steps

    def to_json(self) -> dict[str, Any]:
        """Return what the rule of the next push goes on from, for `restore`. The present trial is not in it."""
        return {"allowance": self.allowance, "interval": self.interval, "wait": self.wait}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `to_json` returned."""
        self.allowance = float(state["allowance"])
        self.interval = int(state["interval"])
        self.wait = int(state["wait"])

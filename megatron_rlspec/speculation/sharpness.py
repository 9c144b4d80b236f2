"""Learn the sharpness of coupled drafts from rounds, in an engine that no trainer tells one.

A trial compares the best value so far with the next one of `types.SHARPNESS`: blocks of rounds draft with each in turn,
until one of them accepts more drafts by more than the error. If the other value wins, the one after it is tried; if
not, the one on the other side. The acceptance rises up to the best value and falls after it, so a value far from the
best one is never tried. When no value is left, the engine drafts with the best one, and repeats the trials later,
because texts and weights change. The sharpness changes no text, only how many drafts are accepted.

Everything follows from the rounds. So all tensor-parallel ranks, which see the same rounds, take the same value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rlspec.types import SHARPNESS, SpecConfig

BLOCK = 8  # drafting rounds with one value before the other one's turn
ERRORS = 2.5  # standard errors by which two values must differ before a trial ends
MOST = 4096  # requests that drafted with each value, over all rounds, at which a trial ends in any case
REST = 31  # rounds without a trial for each round of the trials before


class SharpnessChoice:
    """Chooses the sharpness of every round. Call `begin` before a round drafts, and `observe` when it is verified.

    value    of the present round
    best     what most drafts were accepted with, as far as known
    counted  what `observe` needs of the present round: its value; None if the round does not count, as the first one of
             a block: SGLang has chosen its first draft at the end of the round before

    first    value to begin with
    learns   False: draft with `first` until `fix` is called
    """

    def __init__(self, first: float = SHARPNESS[0], *, learns: bool = True) -> None:
        self.value = self.best = first
        self.counted: float | None = None
        self.learns = learns
        self._resting = 0  # drafting rounds that remain until the next trials
        self._start_trials()

    def fix(self, value: float | None) -> None:
        """Draft with `value` from now on, without trials; None: go on as before."""
        if value is None:
            return
        self.value = self.best = value
        self.counted = None
        self.learns = False

    def begin(self, config: SpecConfig) -> None:
        """Set `value` and `counted` for a round of `config`."""
        self.counted = None
        if not (self.learns and config.num_steps):
            return
        if self._resting:
            self._resting -= 1
            return
        if self._in_block == BLOCK:
            self._end_block()
        else:
            self.counted = self.value
        self._in_block += 1
        self._rounds += 1

    def observe(self, counted: float | None, config: SpecConfig, accepted: Sequence[int]) -> None:
        """Take the drafts that each request accepted in a round; `counted` as it was when the round began."""
        if counted is None or not accepted or not self.learns:
            return
        sums = self._sums.setdefault((config, counted), _Sums())
        sums.requests += len(accepted)
        sums.drafts += sum(accepted)
        sums.squares += sum(x * x for x in accepted)

    def _start_trials(self) -> None:
        values = sorted({*SHARPNESS, self.best})
        at = values.index(self.best)
        self._rivals = [values[at + 1 :], values[:at][::-1]]  # on each side of the best value, the next one first
        self._rounds = 0
        self._next_trial()

    def _next_trial(self) -> None:
        self._sums: dict[tuple[SpecConfig, float], _Sums] = {}
        self._in_block = 0
        self.value = self.best
        self._rivals = [side for side in self._rivals if side]
        if not self._rivals:
            self._resting = REST * self._rounds
            self._start_trials()

    def _end_block(self) -> None:
        """Give the other value its turn, or end the trial if it has said enough."""
        rival = self._rivals[-1][0]
        self._in_block = 0
        self.value = rival if self.value == self.best else self.best
        gain, error, requests = self._gain(rival)
        if requests < MOST and abs(gain) <= ERRORS * error:
            return
        if gain > 0:
            self.best = rival
            self._rivals = [self._rivals[-1][1:]]  # what lies behind the former best value is worse than that
        else:
            self._rivals.pop()
        self._next_trial()

    def _gain(self, rival: float) -> tuple[float, float, int]:
        """Return (accepted drafts a round with `rival` minus those with `best`, its standard error, requests of each).

        Rounds of one configuration are compared with each other. They weigh by the requests of the value with fewer.
        """
        total, gain, variance = 0, 0.0, 0.0
        for config in sorted({config for config, _ in self._sums}):
            pair = [self._sums.get((config, value), _Sums()) for value in (rival, self.best)]
            weight = min(one.requests for one in pair)
            if weight >= BLOCK:
                total += weight
                gain += weight * (pair[0].mean - pair[1].mean)
                variance += weight * weight * (pair[0].variance + pair[1].variance)
        return (gain / total, math.sqrt(variance) / total, total) if total else (0.0, math.inf, 0)


class _Sums:
    """Over rounds of one configuration with one value."""

    def __init__(self) -> None:
        self.requests = 0
        self.drafts = 0
        self.squares = 0

    @property
    def mean(self) -> float:
        return self.drafts / self.requests

    @property
    def variance(self) -> float:
        """Return that of the mean; of a few equal counts it is not 0."""
        return max(self.squares / self.requests - self.mean**2, 1 / self.requests) / self.requests

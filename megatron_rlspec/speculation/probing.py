"""Probes, and their budget. A probe is a round of a deeper configuration, run to observe how many drafts are accepted.

Before a probe, the budget is charged its whole cost, as if no draft would be accepted. Afterwards it gets back the
value of the accepted drafts. Probes therefore never lose more than `share` of the time so far. Times are in the unit of
the cost: ms with a table, passes with a roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_rlspec.speculation.acceptance import Acceptance, expected_tokens
from megatron_rlspec.types import SpecConfig

CatchUp = Callable[[int], float]  # n requests -> ms that the drafter needs to catch up on them

FIRST_PROBE = 32  # rounds before the first probe, and between two probes while they pay off
# most rounds between two probes while drafts are worth at least NEAR of what they cost
LAST_PROBE = 128
# below it the rounds between two probes double without end: most of them would be for nothing
NEAR = 0.5
LEAST_DRAWS = 4  # drafts that the budget must be able to pay for before a probe starts
PROBE_DRAWS = 16  # drafts of a probe, over all its rounds
MARGIN = 0.01  # share of a round's time that a switch must gain, and so a probed configuration
PROBE_SHARE = 0.01  # of the time that rounds may lose by trying other configurations
# part of `share` that each round adds to the budget; the rest covers errors of the cost
EARNED = 0.9


class ProbeBudget:
    """The ms that probes may still lose, and the time of the next probe. A new rule takes it over from the old one.

    share  part of all time that probes may lose, with the time of the drafter's catching up
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.left_ms = 0.0
        self.wait = FIRST_PROBE  # rounds until the next probe
        self.interval = FIRST_PROBE  # rounds between two probes
        self.rounds = 0  # rounds that were added to the budget
        self._probe_draws = 0  # requests that drafted in the rounds of the present probe, and
        # what their accepted drafts were worth, as a share of what they cost
        self._probe_value = 0.0
        self.unit = ""  # of the times: ms or passes; empty until a cost is known
        # For each probe round without observed acceptance yet: ms of one token, and the tokens at which it pays off.
        self.pending_charges: dict[SpecConfig, list[tuple[float, float]]] = {}

    def earn(self, ms: float) -> None:
        """Add a round's part of the budget; the round takes `ms`."""
        self.left_ms += EARNED * self.share * ms
        self.rounds += 1

    def due(self) -> bool:
        """Count one round, and return whether a probe is due."""
        self.wait -= 1
        return self.wait <= 0

    def started(self) -> None:
        """Note that a probe begins. The interval doubles with every probe; `refund` shortens it."""
        self.wait = self.interval
        self.interval *= 2
        self._probe_draws = 0
        self._probe_value = 0.0

    def charge(
        self, config: SpecConfig, lost_ms: float, ms_per_token: float, needed: float
    ) -> float:
        """Charge a probe round as if no draft would be accepted. Returns the ms charged to the budget.

        The current configuration takes `ms_per_token` for one token of each request. With `needed` tokens per request
        the probe round pays off.
        """
        self.left_ms -= lost_ms
        self.pending_charges.setdefault(config, []).append((ms_per_token, needed))
        return lost_ms

    def refund(self, config: SpecConfig, drafts: float, drafting: int, others: int) -> float:
        """Return the value of a probe round's accepted drafts to the budget. Returns the ms; 0 if no round is pending.

        `drafts` is the mean number of accepted drafts of the `drafting` requests that drafted; `others` did not. If the
        probe so far paid off, the next one is due soon; if it was near it, after at most LAST_PROBE rounds.
        """
        pending = self.pending_charges.get(config)
        if not pending:
            return 0.0
        ms_per_token, needed = pending.pop(0)
        refunded = ms_per_token * drafts * drafting / (drafting + others)
        self.left_ms += refunded
        self._probe_draws += drafting
        self._probe_value += drafting * drafts / max(needed - 1.0, 1e-9)
        if self._probe_draws >= PROBE_DRAWS:
            value = self._probe_value / self._probe_draws
            if value >= 1.0:
                self.interval = FIRST_PROBE
                self.wait = min(self.wait, LEAST_DRAWS)
            elif value >= NEAR:
                self.interval = min(self.interval, LAST_PROBE)
                self.wait = min(self.wait, LAST_PROBE)
        return refunded

    def restart(self) -> None:
        """Wait as at the start, because another configuration runs from now on."""
        self.interval = FIRST_PROBE
        self.wait = FIRST_PROBE

    def refresh(self) -> None:
        """Shorten the wait after new weights, because earlier probes say less about them. Rounds waited still count."""
        self.interval = max(self.interval // 4, FIRST_PROBE)
        self.wait = min(self.wait, self.interval)

    def set_unit(self, unit: str) -> None:
        """Count in this unit from now on. A budget in another unit is dropped."""
        if self.unit not in ("", unit):
            self.left_ms = 0.0
            self.pending_charges = {}
        self.unit = unit

    def take_up(self, former: ProbeBudget, foretold: bool) -> None:
        """Continue the budget of an earlier rule. Does nothing if that rule chose no round.

        `foretold`: a forecast says what the new weights accept, and wakes a probe where it is due. Otherwise `refresh`.
        """
        if not former.rounds:
            return
        unit = self.unit or former.unit
        for name in _STATE:
            setattr(self, name, getattr(former, name))
        self.pending_charges = former.pending_charges
        self.set_unit(unit)
        if not foretold:
            self.refresh()

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Set the state that `to_json` returned. Raises ValueError."""
        numbers = [value for name, value in data.items() if name != "unit"]
        if set(data) != set(_STATE) or not all(
            isinstance(x, int | float) and math.isfinite(x) for x in numbers
        ):
            raise ValueError(
                f"speculation rule: probing={dict(data)}, expected {', '.join(_STATE)}: a unit and finite numbers"
            )
        unit = self.unit or data["unit"]
        for name in _STATE:
            setattr(self, name, data[name])
        self.set_unit(unit)


_STATE = ("left_ms", "wait", "interval", "rounds", "unit")


class Prober:
    """Chooses the rounds that probe a deeper configuration.

    It probes if the deeper configuration would pay off with the acceptance rate of the depth above it. `ProbeBudget`
    bounds the loss. A configuration that pays off by the `forecast` is probed at once, and only once.

    forecast  rates a_1.. that no probe has tried yet; None: none
    requests  for which the present probe drafts
    timed     candidates of known duration; empty if none is told. A probe of another one takes two rounds, because
              catching up is part of the first
    """

    def __init__(
        self,
        candidates: Sequence[SpecConfig],
        acceptance: Acceptance,
        budget: ProbeBudget,
        forecast: Sequence[float] | None,
    ) -> None:
        self.candidates = candidates
        self.acceptance = acceptance
        self.budget = budget
        self.forecast = list(forecast) if forecast is not None else None
        self.requests = 0
        self.timed: Collection[int] = ()
        self._forecast_tokens = [
            expected_tokens(c, forecast) if forecast else 1.0 for c in candidates
        ]
        self._probe = -1  # index of the probed candidate
        self._left = 0  # rounds that remain of the probe

    @property
    def running(self) -> bool:
        return self._left > 0

    def stop(self) -> None:
        """End the present probe."""
        self._left = 0

    def next(
        self, now: int, batch: int, rate: float, ms: list[float], catch_up_ms: CatchUp, apart: bool
    ) -> tuple[int, float]:
        """Return the candidate of the next round, `now` or one to probe, and the ms charged to the budget for it.

        now    the present candidate, which yields `rate` tokens per ms and request
        ms     of a round of each candidate
        apart  whether a part of the requests can catch up
        """
        ms_per_token = 1.0 / rate
        if self._left == 0 and not self._start(now, batch, rate, ms, catch_up_ms, apart):
            return now, 0.0
        probe = self._probe
        # if no draft is accepted, the round emits one token per request
        lost = max(ms[probe] - ms_per_token, 0.0)
        if self.candidates[now].off:
            lost += catch_up_ms(min(self.requests, batch))
        if lost > self.budget.left_ms:
            self._left = 0
            return now, 0.0
        self._left -= 1
        needed = ms[probe] / ms_per_token
        return probe, self.budget.charge(self.candidates[probe], lost, ms_per_token, needed)

    def _start(
        self, now: int, batch: int, rate: float, ms: list[float], catch_up_ms: CatchUp, apart: bool
    ) -> bool:
        """Start a probe if one is due, it could pay off and the budget allows it. Returns whether one was started."""
        budget = self.budget
        by_forecast = self._best_by_forecast(now, rate, ms)
        due = budget.due()
        if by_forecast < 0 and not due:
            return False
        self._probe = by_forecast if by_forecast >= 0 else self._worth_probing(now, rate, ms)
        if self._probe < 0:
            budget.wait = budget.interval
            return False
        extra = max(ms[self._probe] - 1.0 / rate, 0.0)
        off = self.candidates[now].off
        self.requests = (
            self._requests_to_probe(batch, extra, catch_up_ms) if apart and off else batch
        )
        to_time = 2 if self.timed and self._probe not in self.timed else 1
        least_rounds = max(-(-LEAST_DRAWS // self.requests), to_time)
        if least_rounds * extra + catch_up_ms(self.requests) > budget.left_ms:
            return False
        if by_forecast >= 0:
            self.forecast = None
        self._left = max(-(-PROBE_DRAWS // self.requests), to_time)
        budget.started()
        return True

    def _best_by_forecast(self, now: int, rate: float, ms: list[float]) -> int:
        """Return the first deeper candidate that pays off by the forecast; -1 without one, or without a forecast."""
        if self.forecast is None:
            return -1
        depth = self.candidates[now].num_steps
        for i, config in enumerate(self.candidates):
            pays = self._forecast_tokens[i] > ms[i] * rate * (1 + MARGIN)
            if pays and config.num_steps > depth:
                return i
        return -1

    def _requests_to_probe(self, batch: int, extra: float, catch_up_ms: CatchUp) -> int:
        """Return how many requests a probe after `OFF` drafts for.

        Fewer requests catch up in less time, but need more rounds, each with `extra` ms, for the same number of drafts.
        The result is the cheapest number in total, or the largest one whose catching up costs nothing.
        """
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < batch] + [batch]
        catch_ups = [catch_up_ms(n) for n in sizes]
        totals = [-(-PROBE_DRAWS // n) * extra + ms for n, ms in zip(sizes, catch_ups, strict=True)]
        cheapest = totals.index(min(totals))
        free = [i for i, ms in enumerate(catch_ups) if ms == 0]
        return sizes[max([cheapest, *free])]

    def _worth_probing(self, now: int, rate: float, ms: list[float]) -> int:
        """Return the next deeper candidate if some deeper one would pay off at the rate of the depth above; else -1."""
        depth = self.candidates[now].num_steps
        known = self.acceptance.rates[:depth]
        optimistic = [*known, known[-1] if known else 1.0]
        deeper = [i for i, c in enumerate(self.candidates) if c.num_steps > depth]
        for i in deeper:
            tokens = expected_tokens(SpecConfig(self.candidates[i].num_steps), optimistic)
            if tokens > ms[i] * rate * (1 + MARGIN):
                return deeper[0]
        return -1

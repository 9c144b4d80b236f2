"""The budget of probes: rounds that run a deeper configuration only to learn what it accepts.

A probe is charged in advance as if it accepted nothing, and is refunded what it did accept. What probes lose therefore
never exceeds `share` of the time so far. Times are in the unit of the cost: ms of a table, passes of a roofline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rlspec.types import SpecConfig

FIRST_PROBE = 32  # rounds until the first probe, and between two while they find something
LAST_PROBE = 128  # most rounds between two; their number doubles after each probe that finds nothing
LEAST_DRAWS = 4  # drafts that the budget must be able to pay for before a probe starts
PROBE_DRAWS = 16  # drafts that a probe wants, over all its rounds
EARNED = 0.9  # of `share` that rounds earn; the rest covers errors of the cost


class ProbeBudget:
    """What probes may still lose, and when the next one is due. It outlives the rule that spends it.

    share           of all time that probes may lose
    catch_up_share  of the time of rounds that are off, which probes may spend on the drafter's catching up besides
    """

    def __init__(self, share: float, catch_up_share: float) -> None:
        self.share = share
        self.catch_up_share = catch_up_share
        self.left_ms = 0.0
        self.catch_up_left_ms = 0.0
        self.wait = FIRST_PROBE  # rounds until the next probe
        self.interval = FIRST_PROBE  # what `wait` starts from again
        self.rounds = 0  # that have earned anything
        self.unit = ""  # of the times: ms, passes; empty until a cost is known
        # Of each probe round whose acceptance is not known yet: ms of one token, and the tokens that make it pay.
        self.pending_charges: dict[SpecConfig, list[tuple[float, float]]] = {}

    def earn(self, ms: float) -> None:
        """Add what a round of `ms` earns."""
        self.left_ms += EARNED * self.share * ms
        self.rounds += 1

    def earn_catch_up(self, ms: float) -> None:
        """Add what a round of `ms` without drafts earns for catching up."""
        self.catch_up_left_ms += self.catch_up_share * ms

    def due(self) -> bool:
        """Count one round, and return whether a probe is due in it. The next one is then `interval` rounds away."""
        self.wait -= 1
        if self.wait > 0:
            return False
        self.wait = self.interval
        return True

    def started(self) -> None:
        """Note that a probe begins: the next ones come later and later, until one finds something."""
        self.wait = self.interval
        self.interval = min(2 * self.interval, LAST_PROBE)

    def affords(self, ms: float, catch_up_ms: float) -> bool:
        """Return whether a probe may lose `ms`, and spend `catch_up_ms` on catching up."""
        return ms + max(catch_up_ms - self.catch_up_left_ms, 0.0) <= self.left_ms

    def charge(
        self, config: SpecConfig, lost_ms: float, catch_up_ms: float, ms_per_token: float, needed: float
    ) -> float:
        """Charge a probe round as if it accepted nothing. Return the ms charged to the budget.

        `ms_per_token` is what one token of each request costs otherwise; `needed` tokens make the round pay.
        """
        earned = min(catch_up_ms, self.catch_up_left_ms)
        charged = lost_ms + catch_up_ms - earned
        self.left_ms -= charged
        self.catch_up_left_ms -= earned
        self.pending_charges.setdefault(config, []).append((ms_per_token, needed))
        return charged

    def refund(self, config: SpecConfig, drafts: float, share: float) -> float:
        """Give back what a probe round accepted. Return the ms given back, 0 if no such round is pending.

        `drafts` were accepted per request that took part, which the `share` of all did. If the round paid, the next
        probe comes soon.
        """
        pending = self.pending_charges.get(config)
        if not pending:
            return 0.0
        ms_per_token, needed = pending.pop(0)
        refunded = ms_per_token * drafts * share
        self.left_ms += refunded
        if 1.0 + drafts >= needed:
            self.interval = FIRST_PROBE
            self.wait = min(self.wait, LEAST_DRAWS)
        return refunded

    def postpone(self) -> None:
        """Ask again in the next round: a probe is due, but costs more than was earned so far."""
        self.wait = 1

    def restart(self) -> None:
        """Wait as at the start: another configuration runs from now on."""
        self.interval = self.wait = FIRST_PROBE

    def refresh(self) -> None:
        """Shorten the wait after new weights, as probes that found nothing say less. Rounds waited still count."""
        self.interval = FIRST_PROBE
        self.wait = min(self.wait, FIRST_PROBE)

    def set_unit(self, unit: str) -> None:
        """Count in this unit from now on. What was earned in another one is dropped."""
        if self.unit not in ("", unit):
            self.left_ms = self.catch_up_left_ms = 0.0
            self.pending_charges = {}
        self.unit = unit

    def take_up(self, former: ProbeBudget) -> None:
        """Go on where the budget of an earlier rule ended, as `refresh` does. Without effect if it never began."""
        if not former.rounds:
            return
        unit = self.unit or former.unit
        for name in _STATE:
            setattr(self, name, getattr(former, name))
        self.pending_charges = former.pending_charges
        self.set_unit(unit)
        self.refresh()

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take up what `to_json` returned. Raises ValueError."""
        numbers = [value for name, value in data.items() if name != "unit"]
        if set(data) != set(_STATE) or not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
            raise ValueError(
                f"speculation rule: probing={dict(data)}, expected {', '.join(_STATE)}: a unit and finite numbers"
            )
        unit = self.unit or data["unit"]
        for name in _STATE:
            setattr(self, name, data[name])
        self.set_unit(unit)


_STATE = ("left_ms", "catch_up_left_ms", "wait", "interval", "rounds", "unit")

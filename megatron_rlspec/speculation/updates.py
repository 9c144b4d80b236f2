"""When the drafter is trained: every N steps, when its forecast acceptance falls, or when that saves time.

    rule = update_rule("pays")
    update, why = rule.decide()                 before each step
    rule.observe(found)                         after it, with what was measured
    rule.state(), rule.restore(state)           for checkpoints

Standard library and numpy only. The rules decide; the trainer's loop acts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

Kind = Literal["every", "triggered", "pays"]
LONGEST = 32  # steps between two updates of the rules that may stop: so the effect of an update stays known
NEVER = 1e6  # an interval that ends in no run
MEMORY = 0.97  # factor on past changes, per step
FIRST_EFFECT = 0.025  # change of the log-odds of acceptance that one update makes, before any is known
FIRST_SHARE = 0.2  # of a training step's time that the drafter takes, before any step without it


@dataclass(frozen=True)
class Observed:
    """What one step has shown.

    updated        whether the drafter was updated in this step
    accept_length  predicted by the trainer for the drafter before the update, tokens per round; None if not predicted
    rounds         of the rollout that this step was trained on, of all engines
    rates          a_1.. forecast for the next rollout; empty: those of `rounds`
    seconds        that the step's training took
    added          seconds that the update added to the step; None if it ran inside the policy's step
    """

    updated: bool
    accept_length: float | None = None
    rounds: Sequence[RoundStats] = ()
    rates: Sequence[float] = ()
    seconds: float = 0.0
    added: float | None = None


class UpdateRule(Protocol):
    """Decides before each step whether the drafter is updated in it."""

    @property
    def stopped(self) -> bool:
        """Return whether updates only serve to know their effect."""

    def decide(self) -> tuple[bool, str]:
        """Return whether the next step updates the drafter, and why. Calls without `observe` repeat the answer."""

    def observe(self, found: Observed) -> dict[str, float]:
        """Learn from the step. Returns metrics."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""


def update_rule(kind: Kind, every: int = 1, drop: float = 0.02, table: CostTable | None = None) -> UpdateRule:
    """Return the rule. `every` is for kind every, `drop` for triggered, `table` for pays."""
    if kind == "every":
        return EverySteps(every)
    return Triggered(drop) if kind == "triggered" else WhenItPays(table)


class _Counted:
    """Keeps the numbers of a rule in its attributes; all of them are the state."""

    def __init__(self) -> None:
        self.since = 0  # steps since the last update
        self.updates = 0

    @property
    def stopped(self) -> bool:
        """Return whether updates only serve to know their effect."""
        return False

    def _count(self, updated: bool) -> None:
        self.since = 0 if updated else self.since + 1
        self.updates += updated

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {name: value for name, value in vars(self).items() if name in self._kept()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. A state of another rule is ignored."""
        if set(state) == set(self._kept()):
            vars(self).update(state)

    def _kept(self) -> tuple[str, ...]:
        return ("since", "updates")


class EverySteps(_Counted):
    """Updates in the first step and in every `every`-th after it."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def decide(self) -> tuple[bool, str]:
        due = not self.updates or self.since + 1 >= self.every
        return due, f"every {self.every} steps"

    def observe(self, found: Observed) -> dict[str, float]:
        self._count(found.updated)
        return {}


class Triggered(_Counted):
    """Updates when the predicted accept length is `drop` (a share) below the best since the last update.

    Without a prediction, and after LONGEST steps, it updates.
    """

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.best: float | None = None
        self.now: float | None = None

    def decide(self) -> tuple[bool, str]:
        if self.best is None or self.now is None:
            return True, "no acceptance was predicted since the last update"
        lost = 1 - self.now / self.best
        if self.since + 1 >= LONGEST:
            return True, f"{LONGEST} steps without an update"
        return lost >= self.drop, f"the predicted accept length lost {lost:.1%}"

    def observe(self, found: Observed) -> dict[str, float]:
        self._count(found.updated)
        self.now = found.accept_length
        if self.now is None:
            return {}
        # The prediction is of the drafter before the update; the next one is the first of the new drafter.
        self.best = self.now if found.updated or self.best is None else max(self.best, self.now)
        return {"drafter/predicted_drop": 1 - self.now / self.best}

    def _kept(self) -> tuple[str, ...]:
        return ("since", "updates", "best", "now")


class WhenItPays(_Counted):
    """Updates when that saves more time in the next rollouts than the update takes.

    Let c be the seconds that an update adds, and g the seconds that one rollout loses for each step that the drafter
    went without an update. With an update every I steps, a step costs c / I + g · I / 2, which is least at
    I = √(2 c / g) (the economic order quantity). So the rule updates when the losses since the last update, g · I² / 2,
    reach c. It measures both:

    c  the time that updates added; inside the policy's step, the difference between steps with and without update
    g  seconds of the last rollout with the forecast acceptance, and with acceptance lower by the effect of one update
       (`generation_seconds`, by the cost table if there is one)

    The effect is the mean change of acceptance (log-odds) over a step with an update, minus that over a step without.
    Both are shrunk to a first guess while the noise of sampling is larger than they are. If I exceeds LONGEST, training
    has stopped: an update every LONGEST steps keeps the effect known, and lets training start again.
    """

    def __init__(self, table: CostTable | None = None) -> None:
        super().__init__()
        self.table = table
        self.interval = 1.0
        self.losing: float | None = None  # seconds that a rollout loses per step without an update
        self.cost = 0.0
        self.changes = [[0.0, 0.0], [0.0, 0.0]]  # without and with an update: Σ information · change, Σ information
        self.before: list[list[float]] | None = None  # reached and accepted drafts by depth, in the last rollout
        self.after_update = False
        self.times: list[float | None] = [None, None]  # seconds of training without and with an update

    def decide(self) -> tuple[bool, str]:
        due = not self.updates or self.since + 1 >= min(self.interval, LONGEST)
        why = f"an update adds {self.cost:.3f} s; a step without one costs {self.losing or 0:.3f} s of the next rollout"
        return due, why

    @property
    def stopped(self) -> bool:
        """Return whether updates only serve to know their effect."""
        return self.interval > LONGEST

    def observe(self, found: Observed) -> dict[str, float]:
        self._count(found.updated)
        self._measure_cost(found)
        now = by_depth(found.rounds)
        if now and self.before is not None:
            change, information = change_of_log_odds(self.before, now)
            for sums in self.changes:
                sums[0] *= MEMORY
                sums[1] *= MEMORY
            self.changes[self.after_update][0] += information * change
            self.changes[self.after_update][1] += information
        if now:
            self.before = now
            self.after_update = found.updated
            rates = list(found.rates) or rates_of(now)
            here = generation_seconds(found.rounds, rates, self.table)
            self.losing = generation_seconds(found.rounds, shifted(rates, -self.effect()), self.table) - here
        self.interval = best_interval(self.cost, self.losing)
        return {
            "drafter/update_effect": self.effect(),
            "drafter/update_cost_seconds": self.cost,
            "drafter/update_saves_seconds": self.losing or 0.0,
            "drafter/update_interval": min(self.interval, float(LONGEST)),
        }

    def effect(self) -> float:
        """Return how much an update changes the log-odds of acceptance, against no update."""
        means = []
        for (total, information), guess in zip(self.changes, (-FIRST_EFFECT, 0.0), strict=True):
            prior = 1 / FIRST_EFFECT**2
            means.append((total + prior * guess) / (information + prior))
        return means[True] - means[False]

    def _measure_cost(self, found: Observed) -> None:
        if found.added is not None:
            if found.updated:
                self.cost = _smooth(self.cost or None, found.added)
            return
        self.times[found.updated] = _smooth(self.times[found.updated], found.seconds)
        without, with_update = self.times
        if with_update is not None:
            self.cost = max(with_update - without, 0.0) if without is not None else FIRST_SHARE * with_update

    def _kept(self) -> tuple[str, ...]:
        return ("since", "updates", "interval", "losing", "cost", "changes", "before", "after_update", "times")


def best_interval(cost: float, losing: float | None) -> float:
    """Return the steps between updates at which their cost and the loss between them are least, from 1 to NEVER."""
    if cost <= 0 or losing is None:
        return 1.0
    return min(max(1.0, math.sqrt(2 * cost / losing)), NEVER) if losing > 0 else NEVER


def by_depth(rounds: Sequence[RoundStats]) -> list[list[float]] | None:
    """Return [reached, accepted] drafts by depth; None if nothing was drafted."""
    deepest = max((found.config.num_steps for found in rounds), default=0)
    reached = np.zeros(deepest)
    accepted = np.zeros(deepest)
    for found in rounds:
        steps = found.config.num_steps
        histogram = np.zeros(steps + 1)
        histogram[: len(found.accepted)] = found.accepted
        at_least = histogram[::-1].cumsum()[::-1]
        reached[:steps] += at_least[:steps]
        accepted[:steps] += at_least[1:]
    return [reached.tolist(), accepted.tolist()] if deepest and reached[0] else None


def rates_of(drafts: Sequence[Sequence[float]]) -> list[float]:
    """Return a_1.. of `by_depth`'s counts, as if one draft more were half accepted."""
    return [(hit + 0.5) / (reached + 1) for reached, hit in zip(*drafts, strict=True)]


def change_of_log_odds(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean change over depths, and its information (1 / variance, from sampling)."""
    total = information = 0.0
    for reached0, hit0, reached1, hit1 in zip(*before, *after, strict=False):
        a = (hit0 + 0.5) / (reached0 + 1)
        b = (hit1 + 0.5) / (reached1 + 1)
        weight = 1 / (1 / ((reached0 + 1) * a * (1 - a)) + 1 / ((reached1 + 1) * b * (1 - b)))
        total += weight * (math.log(b / (1 - b)) - math.log(a / (1 - a)))
        information += weight
    return (total / information if information else 0.0), information


def shifted(rates: Sequence[float], by: float) -> list[float]:
    """Add to the log-odds of rates."""
    inside = np.clip(np.asarray(rates, float), 1e-6, 1 - 1e-6)
    odds = inside / (1 - inside) * math.exp(by)
    return [float(x) for x in odds / (1 + odds)]


def generation_seconds(rounds: Sequence[RoundStats], rates: Sequence[float], table: CostTable | None) -> float:
    """Return the seconds in which engines would emit the tokens of `rounds` with acceptance a_1.. = `rates`.

    With a cost table each batch runs the configuration that it says is fastest at these rates, among the measured
    chains and plain decoding, scaled to the time that the rounds really took. Without one each batch runs as it did,
    and a round takes as long.
    """
    total = 0.0
    for found in rounds:
        if not found.ms or not found.rounds:
            continue
        own = table is not None and found.config in table.configs()
        if table is None or not own:
            # The rounds' own tokens would need so many rounds at other rates.
            total += found.ms * _emitted(found) / (found.batch * found.rounds * expected_tokens(found.config, rates))
            continue
        size = max(found.batch, 1), max(found.context_tokens, 1)
        scale = found.ms / found.rounds / table.ms(found.config, *size)
        chains = [config for config in table.configs() if config.topk <= 1]
        fastest = min(table.ms(config, *size) / _tokens(config, rates) for config in chains)
        total += scale * fastest * _emitted(found) / found.batch
    return total / 1e3


def _tokens(config: SpecConfig, rates: Sequence[float]) -> float:
    return 1.0 if config == OFF else expected_tokens(config, rates)


def _emitted(found: RoundStats) -> float:
    """Return the tokens that the rounds emitted."""
    if not sum(found.accepted):
        return float(found.batch * found.rounds)
    return float(sum((1 + i) * n for i, n in enumerate(found.accepted)))


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else 0.8 * old + 0.2 * new

"""The push contract: what follows when an engine does not hold, or does not compute, what was pushed.

    examine ─► finding ─► hold speculation ─► push again ─► examine ─┬─► speculate
       └─► no finding ─► speculate                                   ├─► plain: the drafter is in doubt
                                                                     └─► drop: the target is in doubt

`health.py` drives it in our own loop, `integrations/slime/engines.py` after slime's weight updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.weights.detectors import Action, Finding, decide

logger = logging.getLogger(__name__)
Findings = Mapping[str, Sequence[Finding]]  # by engine; an engine without findings is sound
_REASON_CHARACTERS = 500


class HealthError(RuntimeError):
    """No engine may serve, or the configuration says to stop. The message lists the findings."""


@dataclass(frozen=True)
class Verdict:
    """What each engine may do. `records`: one for each engine that had a finding, for the log."""

    actions: Mapping[str, Action]
    records: tuple[dict[str, Any], ...]

    def engines(self, action: Action) -> tuple[str, ...]:
        """Names of the engines that `action` is for."""
        return tuple(name for name, decided in self.actions.items() if decided == action)


def enforce(
    version: int,
    first: Findings,
    push_again: Callable[[Sequence[str]], Findings] | None,
    hold: Callable[[str, Sequence[Finding]], object],
) -> Verdict:
    """Decide for every engine; push once more where there is a finding.

    first       findings after the push of `version`, for every engine
    push_again  pushes everything at least to the engines named, and examines: findings after the second push. None if
                the push cannot be repeated: then the first findings last
    hold        disables speculation of an engine: before the second push, and where it must stay off
    """
    doubted = [name for name, findings in first.items() if decide(findings, None) == "push_again"]
    second: Findings = {}
    if doubted:
        for name in doubted:
            hold(name, first[name])
        second = {name: first[name] for name in doubted} if push_again is None else push_again(doubted)
    actions: dict[str, Action] = {}
    records = []
    for name, findings in first.items():
        # A second push may reach engines that were sound after the first; what they hold now counts.
        actions[name] = decide(findings or second.get(name, ()), second.get(name))
        if findings or second.get(name):
            records.append(_record(version, name, findings, second[name], actions[name]))
        if actions[name] == "plain":
            hold(name, second[name])
    return Verdict(actions, tuple(records))


def lines(findings: Sequence[Finding]) -> list[str]:
    """Each finding as "detector: message"."""
    return [f"{finding.detector}: {finding.message}" for finding in findings]


def summary(record: Mapping[str, Any]) -> str:
    """A record in one line: engine, what was found, what followed."""
    outcomes = {"speculate": "healthy after a second push", "plain": "no speculation until a later push"}
    outcome = outcomes.get(record["action"], "may not serve")
    lasting = record["after_second_push"] or record["found"]
    return f"{record['engine']}, version {record['version']}: {outcome}: {'; '.join(lasting)}"


def hold(engine: RolloutEngine, findings: Sequence[Finding]) -> bool:
    """Disable speculation until `release`. False if the engine cannot be reached.

    Such an engine keeps speculating: more slowly with a stale drafter, but not wrongly, since the target verifies.
    """
    try:
        engine.hold("; ".join(finding.message for finding in findings)[:_REASON_CHARACTERS])
    except EngineError as error:
        logger.warning("speculation could not be turned off: %s", error)
        return False
    return True


def release(engine: RolloutEngine) -> bool:
    """Enable speculation again. False if the engine cannot be reached."""
    try:
        engine.release()
    except EngineError as error:
        logger.warning("speculation could not be turned on again: %s", error)
        return False
    return True


def _record(
    version: int, name: str, first: Sequence[Finding], second: Sequence[Finding], action: Action
) -> dict[str, Any]:
    return {
        "event": "health",
        "version": version,
        "engine": name,
        "found": lines(first),
        "after_second_push": lines(second),
        "action": action,
    }

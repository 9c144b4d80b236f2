"""The push contract: what to do if an engine holds wrong weights after a push, or computes wrong results.

    examine ─► finding ─► hold speculation ─► push again ─► examine ─┬─► speculate
       └─► no finding ─► speculate                                   ├─► plain: the drafter may be wrong
                                                                     └─► drop: the target may be wrong

`health.py` drives it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.push.detectors import Finding

logger = logging.getLogger(__name__)
Findings = Mapping[str, Sequence[Finding]]  # by engine; an engine without findings is sound
Action = Literal["speculate", "plain", "drop"]
_REASON_CHARACTERS = 500


class HealthError(RuntimeError):
    """No engine may serve. The message lists the findings."""

    exit_code = 1


@dataclass(frozen=True)
class Verdict:
    """The action for each engine. `records`: one for each engine with a finding, for the log."""

    actions: Mapping[str, Action]
    records: tuple[dict[str, Any], ...]

    def engines(self, action: Action) -> tuple[str, ...]:
        """Return the names of the engines with this action."""
        return tuple(name for name, decided in self.actions.items() if decided == action)

    def metrics(self) -> dict[str, float]:
        return {
            "health/incidents": float(len(self.records)),
            "health/plain_engines": float(len(self.engines("plain"))),
        }


def enforce(
    version: int,
    first: Findings,
    push_again: Callable[[Sequence[str]], Findings] | None,
    hold: Callable[[str, Sequence[Finding]], object],
) -> Verdict:
    """Choose an action for every engine. Pushes once more to engines with a finding.

    first       findings after the push of `version`, for every engine
    push_again  pushes all tensors at least to the engines named, and returns the findings after that. None if the push
                cannot be repeated: the first findings then count as those after the second push
    hold        disables speculation of an engine; called before the second push, and if speculation must stay off
    """
    doubted = [name for name, findings in first.items() if findings]
    second: Findings = {}
    if doubted:
        for name in doubted:
            hold(name, first[name])
        second = first if push_again is None else push_again(doubted)
    actions: dict[str, Action] = {}
    records = []
    for name, findings in first.items():
        # The second push may also reach engines without a finding after the first. Then its findings count.
        lasting = second.get(name, ())
        if not findings and not lasting:
            actions[name] = "speculate"
            continue
        action = decide(lasting)
        actions[name] = action
        records.append(_record(version, name, findings, lasting, action))
        if action == "plain":
            hold(name, lasting)
    return Verdict(actions, tuple(records))


def decide(findings: Sequence[Finding]) -> Action:
    """Return the action for one engine, from its findings after the second push."""
    if not findings:
        return "speculate"
    target_in_doubt = any(finding.target for finding in findings)
    return "drop" if target_in_doubt else "plain"


def lines(findings: Sequence[Finding]) -> list[str]:
    """Format each finding as "detector: message"."""
    return [f"{finding.detector}: {finding.message}" for finding in findings]


def summary(record: Mapping[str, Any]) -> str:
    """Format a record in one line: engine, version, action, findings."""
    outcomes = {
        "speculate": "healthy after a second push",
        "plain": "no speculation until a later push",
    }
    outcome = outcomes.get(record["action"], "may not serve")
    lasting = record["after_second_push"] or record["found"]
    return f"{record['engine']}, version {record['version']}: {outcome}: {'; '.join(lasting)}"


def hold(engine: RolloutEngine, findings: Sequence[Finding]) -> bool:
    """Disable speculation until `release`. Returns False if the engine cannot be reached.

    Such an engine keeps speculating. With a stale drafter it is slower, but its text is right, because the target
    verifies it.
    """
    try:
        engine.hold("; ".join(finding.message for finding in findings)[:_REASON_CHARACTERS])
    except EngineError as error:
        logger.warning("speculation could not be turned off: %s", error)
        return False
    return True


def release(engine: RolloutEngine) -> None:
    """Enable speculation again, if the engine can be reached."""
    try:
        engine.release()
    except EngineError as error:
        logger.warning("speculation could not be turned on again: %s", error)


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

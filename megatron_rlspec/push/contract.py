"""The push contract: what to do if an engine holds wrong weights after a push, or computes wrong results.

    examine ─► finding ─► hold speculation ─► push again ─► examine ─┬─► speculate
       └─► no finding ─► speculate                                   ├─► plain: the drafter may be wrong
                                                                     └─► drop: the target may be wrong

`health.py` drives it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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


def judged(version: int, first: Findings, second: Findings) -> Verdict:
    """Choose an action for every engine.

    first   findings after the push of `version`, for every engine
    second  findings after a second push of all tensors, to the engines with a finding at least
    """
    actions: dict[str, Action] = {}
    records = []
    for name, findings in first.items():
        # The second push may also reach engines without a finding after the first. Then its findings count.
        lasting = second.get(name, ())
        actions[name] = "speculate"
        if lasting:
            target_in_doubt = any(finding.target for finding in lasting)
            actions[name] = "drop" if target_in_doubt else "plain"
        if findings or lasting:
            records.append(
                {
                    "event": "health",
                    "version": version,
                    "engine": name,
                    "found": lines(findings),
                    "after_second_push": lines(lasting),
                    "action": actions[name],
                }
            )
    return Verdict(actions, tuple(records))


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

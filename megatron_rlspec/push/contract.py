"""The push contract: what to do if an engine holds wrong weights after a push, or computes wrong results.

    examine ─► finding ─► hold speculation ─► push again ─► examine ─┬─► speculate: no finding is left
       └─► no finding ─► speculate                                   ├─► plain: the drafter may be wrong
                                                                     └─► drop: the target may be wrong

This file decides (`judge`) and formats; `health.py` pushes, examines, and carries the decisions out. To "hold" an
engine means to disable its speculation until `release`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.push.detectors import Finding

logger = logging.getLogger(__name__)
# by the engine's name; an engine without findings has an empty sequence
Findings = Mapping[str, Sequence[Finding]]
# speculate: serve with drafts; plain: serve without drafts until a later push; drop: generate no samples
Action = Literal["speculate", "plain", "drop"]
# longest reason that an engine is given to store, which it reports as `EngineDescription.held`
_REASON_CHARACTERS = 500


class HealthError(RuntimeError):
    """No engine may serve. The message lists the findings."""

    exit_code = 1


@dataclass(frozen=True)
class Verdict:
    """The outcome of a push, as `judge` returns it.

    actions  by the engine's name, for every engine that was pushed to
    records  one for each engine with a finding after either push, for the log (`event` "health") and for `summary`;
             the keys are in `judge`
    """

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


def judge(version: int, first: Findings, second: Findings) -> Verdict:
    """Choose an action for every engine.

    first   findings after the push of `version`; the names of all engines, those without findings included
    second  findings after a second push of all tensors, which went to the engines with a finding, perhaps to others,
            too; {}: there was none

    Only `second` decides. An engine that is not in `second` speculates, so every engine with a finding in `first` must
    be in `second`, with an empty sequence if it is healthy now.
    """
    actions: dict[str, Action] = {}
    records = []
    for name, findings in first.items():
        # Inside slime the second push reaches all engines, also those without a finding after the first.
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
    """Format a record of `Verdict.records` in one line: engine, version, action, findings."""
    outcomes = {
        "speculate": "healthy after a second push",
        "plain": "no speculation until a later push",
    }
    outcome = outcomes.get(record["action"], "may not serve")
    lasting = record["after_second_push"] or record["found"]
    return f"{record['engine']}, version {record['version']}: {outcome}: {'; '.join(lasting)}"


def hold(engine: RolloutEngine, findings: Sequence[Finding]) -> bool:
    """Disable an engine's speculation until `release`. Returns False if the engine cannot be reached.

    findings  at least one: their messages are the reason, which may not be empty

    An engine that cannot be reached goes on speculating, and this is no error: with a stale drafter it is slower, but
    its text is right, because the target verifies every draft.
    """
    try:
        engine.hold("; ".join(finding.message for finding in findings)[:_REASON_CHARACTERS])
    except EngineError as error:
        logger.warning("speculation could not be turned off: %s", error)
        return False
    return True


def release(engine: RolloutEngine) -> None:
    """Enable speculation again. An engine that cannot be reached is logged, and nothing is raised."""
    try:
        engine.release()
    except EngineError as error:
        logger.warning("speculation could not be turned on again: %s", error)

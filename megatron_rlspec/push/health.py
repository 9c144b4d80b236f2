"""Health of the engines of our own loop: push, compare fingerprints, run the canary, act, watch until the next push.

`canary.py` sends prompts to the engines, `detectors.py` turns observations into findings, and `contract.py`, which has
the picture, turns findings into actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.push.canary import Canary, CanaryResult, canary_metrics
from megatron_rlspec.push.contract import HealthError, Verdict, enforce, hold, release
from megatron_rlspec.push.detectors import DriftWatch, Finding, HealthSettings, fingerprint_finding
from megatron_rlspec.push.push import Pusher, PushReport, Source
from megatron_rlspec.types import Prompt, RoundStats, Sampling, Scope, SpecConfig


@dataclass(frozen=True)
class HealthReport:
    """The result of `Health.push`.

    pushes   the first push, and the second one if there was one
    serving  names of the engines that may generate
    plain    names of the serving engines that must not speculate
    records  one per incident, for the log
    canaries  the last one of each engine that was asked
    """

    pushes: tuple[PushReport, ...]
    serving: tuple[str, ...]
    plain: tuple[str, ...]
    records: tuple[dict[str, Any], ...]
    canaries: Mapping[str, CanaryResult] = field(default_factory=dict)
    canary_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return `push/*` of the first push and `health/*`."""
        found = self.pushes[0].metrics()
        found["health/incidents"] = float(len(self.records))
        found["health/serving_engines"] = float(len(self.serving))
        found["health/plain_engines"] = float(len(self.plain))
        return found | canary_metrics(self.canaries.values(), self.canary_seconds)


class Health:
    """Pushes weights, checks the engines, and repairs them.

    is_drafter  returns whether a Hugging Face name is a tensor of the drafter. If only such tensors differ, the target
                is sound
    speculate   sets an engine to the run's own rule or schedule, after canaries and repairs: (name, engine). None in a
                run without speculation: the canary then checks version stamps only
    canary      prompts that every engine answers after a push, under the rollouts' `sampling`. Without prompts only
                fingerprints are compared
    incident    called with the record of every incident, before an error is raised because of it
    """

    def __init__(
        self,
        pusher: Pusher,
        is_drafter: Callable[[str], bool],
        speculate: Callable[[str, RolloutEngine], None] | None = None,
        canary: Sequence[Prompt] = (),
        sampling: Sampling | None = None,
        settings: HealthSettings | None = None,
        incident: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        self.pusher = pusher
        self.is_drafter = is_drafter
        self.speculate = speculate
        self.prompts = tuple(canary)
        self.sampling = sampling or Sampling()
        self.settings = settings or HealthSettings()
        self.incident = incident
        self._canary = Canary(self.settings)
        self._drift = DriftWatch(self.settings)
        self._held: set[str] = set()

    def push(
        self,
        version: int,
        source: Source,
        scope: Scope = "all",
        predicted: float | None = None,
    ) -> HealthReport:
        """Push one version and check every engine.

        `predicted` is the accept length under `settings.canary_steps` steps; see `Canary.run`. Raises HealthError if no
        engine may serve, and PushError as `Pusher.push` does.
        """
        seconds = self._canary.seconds
        results: dict[str, CanaryResult] = {}
        pushes = [self.pusher.push(version, source, scope)]
        self._held &= self.pusher.engines.keys()  # others have left
        due = self._canary.due() or bool(self._held)

        def push_again(names: Sequence[str]) -> dict[str, list[Finding]]:
            pushes.append(self.pusher.push(version, source, "all", only=names))
            return self._examine(pushes[-1], predicted, results, canary=True)

        first = self._examine(pushes[0], predicted, results, canary=due)
        verdict = enforce(version, first, push_again, self._hold)
        for record in verdict.records:
            self.incident(record)
        for name in verdict.actions:
            self._drift.begin(name)
        for name in verdict.engines("speculate"):
            self._resume(name, results.get(name))
        self._refuse(verdict)
        plain = verdict.engines("plain")
        serving = tuple(name for name, action in verdict.actions.items() if action != "drop")
        return HealthReport(
            tuple(pushes), serving, plain, verdict.records, results, self._canary.seconds - seconds
        )

    def join(self, name: str) -> None:
        """Take a new engine of this name into account. The next push runs its canary and sets its speculation."""
        self.pusher.forget(name)
        self._canary.forget(name)
        self._held.add(name)

    def watch(
        self, name: str, stats: Sequence[RoundStats], predicted: Mapping[SpecConfig, float]
    ) -> Finding | None:
        """Run one engine's drift test on the result of its `stats()`. A finding disables its speculation.

        A finding is returned once. The next push starts a new test.
        """
        finding = self._drift.observe(name, stats, predicted)
        if finding is not None:
            self._hold(name, [finding])
        return finding

    def _examine(
        self,
        report: PushReport,
        predicted: float | None,
        results: dict[str, CanaryResult],
        canary: bool,
    ) -> dict[str, list[Finding]]:
        """Return the findings of every engine. Adds the canaries' results to `results`."""
        findings: dict[str, list[Finding]] = {name: [] for name in report.engines}
        for name, engine in report.engines.items():
            if engine.error:
                findings[name].append(Finding("session", engine.error, target=True))
            elif found := fingerprint_finding(engine.difference, self.is_drafter):
                findings[name].append(found)
        if not (canary and self.prompts):
            return findings
        sound = {name: self.pusher.engines[name] for name, found in findings.items() if not found}
        versions = dict.fromkeys(sound, report.version)
        chain = SpecConfig(self.settings.canary_steps) if self.speculate is not None else None
        for name, result in self._canary.run(
            sound, versions, self.prompts, self.sampling, chain, predicted
        ).items():
            results[name] = result
            findings[name] += result.findings
            if result.error:
                findings[name].append(Finding("canary", result.error, target=True))
        return findings

    def _hold(self, name: str, findings: Sequence[Finding]) -> None:
        if self.speculate is None:
            return
        self._held.add(name)
        if not hold(self.pusher.engines[name], findings):
            self.pusher.forget(name)  # the weights of an engine that does not answer are unknown

    def _resume(self, name: str, canary: CanaryResult | None) -> None:
        """Set the run's speculation again if a canary or `hold` changed it."""
        if canary is not None:
            self._canary.remember(name, canary)
        engine = self.pusher.engines[name]
        if self.speculate is not None and (canary is not None or name in self._held):
            if name in self._held:
                release(engine)
            self.speculate(name, engine)
        self._held.discard(name)

    def _refuse(self, verdict: Verdict) -> None:
        """Raise HealthError if no engine is left."""
        lasting = [
            f"{r['engine']}: {found}" for r in verdict.records for found in r["after_second_push"]
        ]
        if all(action == "drop" for action in verdict.actions.values()):
            raise HealthError("no engine is left to serve: " + "; ".join(lasting))

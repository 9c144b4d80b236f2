"""Push, and check every engine: compare fingerprints, run the canary, repair or exclude engines.

`push.py` sends the weights and compares fingerprints, `canary.py` sends prompts to the engines, `detectors.py` turns
observations into findings, and `contract.py`, whose first lines draw the whole, turns findings into actions. This file
calls them in order. Our own loop (`run/engines.py`), `CoTrainer` and slime (`integrations/slime/engines.py`) have a
`Health`. Rank 0 alone uses it, and slime's rollout process after an update through the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.push.canary import Canary, CanaryResult, canary_metrics
from megatron_rlspec.push.contract import HealthError, Verdict, hold, judge, release
from megatron_rlspec.push.detectors import Finding, HealthSettings, fingerprint_finding
from megatron_rlspec.push.push import Pusher, PushReport, Source
from megatron_rlspec.types import Prompt, Sampling, Scope, SpecConfig


@dataclass(frozen=True)
class HealthReport:
    """The result of `Health.push`.

    pushes          the first push; behind it the second push, if an engine had a finding after the first
    verdict         what follows for each engine
    canaries        by the engine's name, the last canary of each engine that ran one
    canary_seconds  duration of all canaries of this call
    """

    pushes: tuple[PushReport, ...]
    verdict: Verdict
    canaries: Mapping[str, CanaryResult] = field(default_factory=dict)
    canary_seconds: float = 0.0

    @property
    def serving(self) -> tuple[str, ...]:
        """Return the names of the engines that may generate."""
        return tuple(name for name, action in self.verdict.actions.items() if action != "drop")

    def metrics(self) -> dict[str, float]:
        """Return `push/*` of the first push and `health/*`."""
        values = self.pushes[0].metrics() | self.verdict.metrics()
        values["health/serving_engines"] = float(len(self.serving))
        return values | canary_metrics(self.canaries.values(), self.canary_seconds)


class Health:
    """Pushes weights, checks the engines, and repairs them. Not thread-safe.

    An engine is held while its speculation is disabled (`contract.hold`).

    pusher      pushes and compares fingerprints. Another thread may remove engines from its `engines` during a push
    is_drafter  returns whether a Hugging Face name is a tensor of the drafter. If only such tensors differ, the target
                is sound
    speculate   called with (name, engine) after canaries and repairs: sets the run's own rule or configuration on the
                engine, because a canary replaces it. None in a run without speculation: the canary then checks version
                stamps only, and no engine is held
    canary      prompts that every engine answers after a push, under the rollouts' `sampling`. Without prompts no
                canary runs: only the push's own errors and the fingerprints count
    incident    called with each of `Verdict.records`, before `push` raises an error because of it
    """

    def __init__(
        self,
        pusher: Pusher,
        is_drafter: Callable[[str], bool],
        speculate: Callable[[str, RolloutEngine], object] | None = None,
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
        # Names of engines that must pass a canary, if there are prompts, before they speculate: those that were held,
        # and new engines (`join`).
        self._held: set[str] = set()

    def push(
        self,
        version: int,
        source: Source,
        scope: Scope = "all",
        predicted: float | None = None,
        suspicious: bool = False,
    ) -> HealthReport:
        """Push one version, check every engine, and push a second time to those with a finding.

        version     the version stamp of every token that is sampled under these weights
        source      as for `Pusher.push`; called again for a second push, so it must yield the same tensors twice
        predicted   accept length under `settings.canary_steps` steps, as `expected` of `Canary.run`
        suspicious  run a canary even if canaries have used up their share of the time

        Engines with the action "drop" are not removed here: the caller must give them no requests. Raises HealthError
        if no engine may serve, and PushError as `Pusher.push` does.
        """
        seconds_before = self._canary.seconds
        canaries: dict[str, CanaryResult] = {}
        pushes = [self.pusher.push(version, source, scope)]
        self._held &= self.pusher.engines.keys()  # forgets engines that have left

        first = self._compare(pushes[0])
        # An engine in `_held` must pass a canary first, so its canary runs even if none is due.
        if self._canary.due() or self._held or suspicious:
            self._ask(first, version, predicted, canaries)
        second: dict[str, list[Finding]] = {}
        doubted = [name for name, findings in first.items() if findings]
        if doubted:
            # Held before the second push: if that raises, these engines stay without drafts.
            for name in doubted:
                self._hold(name, first[name])
            # All tensors, also after a push of the drafter alone: any tensor may be wrong.
            pushes.append(self.pusher.push(version, source, "all", only=doubted))
            second = self._compare(pushes[-1])
            self._ask(second, version, predicted, canaries)
        verdict = judge(version, first, second)
        # Held a second time: the second canary released the engines that ran it. Engines to drop get no requests.
        for name in verdict.engines("plain"):
            self._hold(name, second[name])
        # The records are logged before `_refuse`, which may end the run.
        for record in verdict.records:
            self.incident(record)
        for name in verdict.engines("speculate"):
            self._resume(name, canaries.get(name))
        _refuse(verdict)
        seconds = self._canary.seconds - seconds_before
        return HealthReport(tuple(pushes), verdict, canaries, seconds)

    def join(self, name: str) -> None:
        """Say that a new engine has this name. The next push sends it all tensors, and every engine runs a canary.

        Not during a push. The caller must put the engine into `pusher.engines` before the next push, which otherwise
        forgets the name again.
        """
        self.pusher.forget(name)
        self._canary.forget(name)
        self._held.add(name)

    def _compare(self, report: PushReport) -> dict[str, list[Finding]]:
        """Return, by every engine's name, the findings of the push itself and of the fingerprints after it."""
        findings: dict[str, list[Finding]] = {}
        for name, engine in report.engines.items():
            if engine.error:
                # A push that failed leaves the weights of the target unknown.
                finding: Finding | None = Finding("session", engine.error, target=True)
            else:
                finding = fingerprint_finding(engine.difference, self.is_drafter)
            findings[name] = [] if finding is None else [finding]
        return findings

    def _ask(
        self,
        findings: dict[str, list[Finding]],
        version: int,
        predicted: float | None,
        canaries: dict[str, CanaryResult],
    ) -> None:
        """Run the canary of every engine in `findings` that has no finding.

        Changes both dictionaries: new findings are added to `findings`, results to `canaries`. Without prompts it does
        nothing.
        """
        if not self.prompts:
            return
        engines = dict(self.pusher.engines)  # a copy: another thread may remove an engine
        sound = {name: engines[name] for name in findings if name in engines and not findings[name]}
        results = self._canary.run(
            sound,
            dict.fromkeys(sound, version),
            self.prompts,
            self.sampling,
            SpecConfig(self.settings.canary_steps) if self.speculate is not None else None,
            predicted,
        )
        for name, result in results.items():
            findings[name] += result.findings
            if result.error:
                # An engine that does not answer cannot serve samples, whatever is wrong.
                findings[name].append(Finding("canary", result.error, target=True))
        canaries.update(results)

    def _hold(self, name: str, findings: Sequence[Finding]) -> None:
        """Disable the speculation of an engine, and remember its name, also if it cannot be reached."""
        engine = self.pusher.engines.get(name)
        # a run without speculation, or an engine that another thread has removed
        if self.speculate is None or engine is None:
            return
        self._held.add(name)
        if not hold(engine, findings):
            # The weights of an engine that does not answer are unknown: the next push sends it all tensors.
            self.pusher.forget(name)

    def _resume(self, name: str, canary: CanaryResult | None) -> None:
        """Let an engine speculate by the run's rule or configuration, which `speculate` sets.

        Called after every push for every engine with the action "speculate": a canary may have set a configuration of
        its own, the engine may be held, or the trainer may have a newer rule.

        canary  the engine's canary of this push, without findings; None: none ran
        """
        if canary is not None:
            self._canary.remember(name, canary)
        engine = self.pusher.engines.get(name)
        if self.speculate is not None and engine is not None:
            release(engine)
            self.speculate(name, engine)
        self._held.discard(name)


def _refuse(verdict: Verdict) -> None:
    """Raise HealthError, with all findings after the second push, if no engine has another action than "drop"."""
    if any(action != "drop" for action in verdict.actions.values()):
        return
    lasting = []
    for record in verdict.records:
        for finding in record["after_second_push"]:
            lasting.append(f"{record['engine']}: {finding}")
    raise HealthError("no engine is left to serve: " + "; ".join(lasting))

"""The contract that a drafter cannot go stale silently: what is checked after each push, and what follows.

The detectors of `detectors.py` turn observations into findings, and its `decide` turns findings into one action per
engine. `Health` carries the actions out.

    push ─► fingerprints ─► canary ─► speculate
               │ finding        │ finding
               └──► speculation off ─► push everything again ─► fingerprints ─► canary ─► speculate (one loud record)
                                                                  │ finding again
                                                                  └─► go on plain | out of rotation | stop

Fingerprints compare bits, so they cannot see that the *exporter* is wrong (a half-swap, a scale, shards in the wrong
order): the canary's acceptance and the log-prob gap can. Both read what the engine really computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.types import OFF, Prompt, Request, RoundStats, Sample, Sampling, Scope, SpecConfig, SpecSchedule
from megatron_rlspec.weights.detectors import (
    Action,
    Drift,
    Finding,
    HealthSettings,
    canary_finding,
    decide,
    stamp_finding,
)
from megatron_rlspec.weights.push import Pusher, PushReport, Source


class HealthError(RuntimeError):
    """No engine may serve, or the configuration says to stop. The message lists the findings."""


@dataclass(frozen=True)
class HealthReport:
    """`serving`: engines that may generate; `plain`: those of them that must not speculate; `records`: for the log."""

    pushes: tuple[PushReport, ...]
    serving: tuple[str, ...]
    plain: tuple[str, ...]
    records: tuple[dict[str, Any], ...]
    accept_lengths: Mapping[str, float] = field(default_factory=dict)
    canary_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        found = self.pushes[0].metrics()
        found["health/incidents"] = float(len(self.records))
        found["health/serving_engines"] = float(len(self.serving))
        found["health/plain_engines"] = float(len(self.plain))
        found["health/canary_seconds"] = self.canary_seconds
        if self.accept_lengths:
            found["health/canary_accept_length"] = float(np.mean(list(self.accept_lengths.values())))
        return found


class Health:
    """Pushes, checks, repairs. `is_drafter(hf_name)` tells which differing tensors leave the target sound.

    `speculate(engine)` sets an engine to the run's own speculation (its policy or schedule), after canaries and
    repairs; None in a run without speculation, whose canary then checks version stamps only.
    `canary`: prompts that every engine answers after each push, under the rollouts' `Sampling`; they cost about one
    short generation. Without them only what bits can show is seen.
    `incident(record)` is called for every record of an incident, before anything is raised because of it.
    """

    def __init__(
        self,
        pusher: Pusher,
        is_drafter: Callable[[str], bool],
        speculate: Callable[[RolloutEngine], None] | None = None,
        canary: Sequence[Prompt] = (),
        sampling: Sampling | None = None,
        settings: HealthSettings | None = None,
        incident: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        self.incident = incident
        self.pusher, self.is_drafter, self.speculate, self.canary = pusher, is_drafter, speculate, tuple(canary)
        self.settings = settings or HealthSettings()
        given = sampling or Sampling()
        self.sampling = replace(given, max_new_tokens=min(given.max_new_tokens, self.settings.canary_tokens))
        self.drift: dict[str, Drift] = {}
        self._last_accept_length: dict[str, float] = {}
        self._off: set[str] = set()
        self._canary_seconds = 0.0  # of this push
        self._spent, self._began = 0.0, time.perf_counter()  # on all canaries, since the first one

    def push(
        self,
        version: int,
        source: Source,
        scope: Scope = "all",
        predicted: float | None = None,
    ) -> HealthReport:
        """One push with everything that must hold before the next rollout is trained on.

        `predicted`: accept length under `settings.canary_steps` steps. The canary's floor comes from it or from the
        engine's last good canary, whichever is lower: answers begin harder, or easier, than they go on.
        Raises HealthError when nobody may serve, or on a finding that survives the second push if
        `settings.on_failure` is "stop".
        """
        self._canary_seconds = 0.0
        report = self.pusher.push(version, source, scope)
        pushes = [report]
        lengths: dict[str, float] = {}
        sing = self._due()
        first = self._examine(report, predicted, lengths, sing)
        again = [name for name, findings in first.items() if decide(findings, None) == "push_again"]
        second: dict[str, list[Finding]] = {}
        if again:
            for name in again:
                self._turn_off(name)
            repeat = self.pusher.push(version, source, "all", only=again)
            pushes.append(repeat)
            second = self._examine(repeat, predicted, lengths, sing=True)
        actions = {name: decide(first[name], second.get(name)) for name in first}
        records = tuple(
            {
                "event": "health",
                "version": version,
                "engine": name,
                "found": [f"{f.detector}: {f.message}" for f in first[name]],
                "after_second_push": [f"{f.detector}: {f.message}" for f in second[name]],
                "action": actions[name],
            }
            for name in again
        )
        for record in records:
            self.incident(record)
        self._conclude(actions, second, lengths, sing and bool(self.canary))
        serving = tuple(name for name, action in actions.items() if action != "drop")
        plain = tuple(name for name, action in actions.items() if action == "plain")
        return HealthReport(tuple(pushes), serving, plain, records, lengths, self._canary_seconds)

    def join(self, name: str, engine: RolloutEngine) -> None:
        """One more engine, or a new one of this name: it answers the next push's canary, then gets its speculation."""
        self.pusher.engines[name] = engine
        self.pusher.forget(name)
        self._last_accept_length.pop(name, None)
        self._off.add(name)

    def watch(self, name: str, stats: Sequence[RoundStats], predicted: Mapping[SpecConfig, float]) -> Finding | None:
        """Feed the drift test of one engine with what its `stats()` gave; on a finding its speculation is turned off.

        Until the next push, which starts a new test, the finding is raised once.
        """
        drift = self.drift.setdefault(name, Drift(self.settings, {}))
        drift.predicted.update(predicted)
        finding = drift.observe(stats)
        if finding is None or drift.alarmed:
            return None
        drift.alarmed = True
        self._turn_off(name)
        return finding

    def after_sleep(self, names: Sequence[str] | None = None) -> dict[str, Finding]:
        """Compare bits again after engines released and resumed their memory: engine -> finding, healthy ones left out.

        The next push sends the engines named everything.
        """
        differences = self.pusher.verify(names)
        return {name: self._bits(difference) for name, difference in differences.items() if not difference.empty}

    def _bits(self, difference: Any) -> Finding:
        return Finding("fingerprint", str(difference), target=not all(map(self.is_drafter, difference.names)))

    def _due(self) -> bool:
        """Whether a canary is affordable now, or needed."""
        allowed = self.settings.canary_share * (time.perf_counter() - self._began)
        return not self._spent or bool(self._off) or self._spent <= allowed

    def _examine(
        self, report: PushReport, predicted: float | None, lengths: dict[str, float], sing: bool
    ) -> dict[str, list[Finding]]:
        began = time.perf_counter()
        with ThreadPoolExecutor(max(1, len(report.engines))) as threads:
            found = threads.map(lambda name: self._findings(name, report, predicted, lengths, sing), report.engines)
            result = dict(zip(report.engines, found, strict=True))
        if not self._spent:
            self._began = began
        if sing and self.canary:
            self._canary_seconds += time.perf_counter() - began
            self._spent += time.perf_counter() - began
        return result

    def _findings(
        self, name: str, report: PushReport, predicted: float | None, lengths: dict[str, float], sing: bool
    ) -> list[Finding]:
        result = report.engines[name]
        if result.error:
            return [Finding("session", result.error, target=True)]
        if not result.difference.empty:
            return [self._bits(result.difference)]
        if not (sing and self.canary):
            return []
        try:
            samples = self._run_canary(name, report.version)
        except EngineError as error:
            return [Finding("canary", str(error), target=True)]
        found = [stamp_finding(samples, report.version, report.version)]
        if self.speculate is not None:
            accepted = np.zeros(self.settings.canary_steps + 1, dtype=np.int64)
            for sample in samples:
                counts = np.asarray(sample.accepted, dtype=np.int64)[: len(accepted)]
                accepted[: len(counts)] += counts
            known = [length for length in (predicted, self._last_accept_length.get(name)) if length is not None]
            floor_share, z = self.settings.floor_share, self.settings.z
            found.append(canary_finding(accepted.tolist(), min(known, default=None), floor_share, z))
            lengths[name] = 1 + float(accepted @ np.arange(len(accepted)) / max(1, accepted.sum()))
        return [finding for finding in found if finding]

    def _run_canary(self, name: str, version: int) -> list[Sample]:
        engine: RolloutEngine = self.pusher.engines[name]
        if self.speculate is not None:
            engine.set_schedule(SpecSchedule.fixed(SpecConfig(self.settings.canary_steps)))
        # No id may be a prefix of another, hence the fixed width; the seed varies with the version.
        requests = [
            Request(f"canary-{version:08d}-{i:04d}", prompt, seed=version * len(self.canary) + i)
            for i, prompt in enumerate(self.canary)
        ]
        return engine.generate(requests, self.sampling)

    def _conclude(
        self,
        actions: Mapping[str, Action],
        second: Mapping[str, list[Finding]],
        lengths: Mapping[str, float],
        sang: bool,
    ) -> None:
        for name, action in actions.items():
            self.drift[name] = Drift(self.settings, {})
            if action == "plain":
                self._turn_off(name)
            elif action == "speculate":
                if name in lengths:
                    self._last_accept_length[name] = lengths[name]
                # Where nothing touched the engine's own speculation there is nothing to restore.
                if self.speculate is not None and (sang or name in second or name in self._off):
                    self.speculate(self.pusher.engines[name])
                self._off.discard(name)
        lasting = [f"{name}: {f.detector}: {f.message}" for name, findings in second.items() for f in findings]
        if lasting and self.settings.on_failure == "stop":
            raise HealthError("unhealthy after a second push, and health.on_failure is stop: " + "; ".join(lasting))
        if all(action == "drop" for action in actions.values()):
            raise HealthError("no engine is left to serve: " + "; ".join(lasting))

    def _turn_off(self, name: str) -> None:
        if self.speculate is None:
            return
        self._off.add(name)
        try:
            self.pusher.engines[name].set_schedule(SpecSchedule.fixed(OFF))
        except EngineError:
            self.pusher.forget(name)  # an engine that does not answer holds nothing that is known

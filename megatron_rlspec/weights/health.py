"""The contract that a drafter cannot go stale silently: what is checked after each push, and what follows.

Pure part: the detectors (`fingerprint`, `stamp`, `canary`, `drift`, `logprobs`) turn observations into findings, and
`decide` turns findings into one action per engine. `Health` carries the actions out.

    push ─► fingerprints ─► canary ─► speculate
               │ finding        │ finding
               └──► speculation off ─► push everything again ─► fingerprints ─► canary ─► speculate (one loud record)
                                                                  │ finding again
                                                                  └─► go on plain | out of rotation | stop

Fingerprints compare bits, so they cannot see that the *exporter* is wrong (a half-swap, a scale, shards in the wrong
order): the canary's acceptance and the log-prob gap can. Both read what the engine really computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from megatron_rlspec.rollout.engine import EngineError, RolloutEngine
from megatron_rlspec.types import OFF, Prompt, Request, RoundStats, Sample, Sampling, Scope, SpecConfig, SpecSchedule
from megatron_rlspec.weights.push import Pusher, PushReport, Source

Detector = Literal["session", "fingerprint", "stamp", "canary", "drift", "logprobs"]
Action = Literal["speculate", "push_again", "plain", "drop"]


class HealthError(RuntimeError):
    """No engine may serve, or the configuration says to stop. The message lists the findings."""


@dataclass(frozen=True)
class Finding:
    """One detector's complaint about one engine. `target`: the target itself is in doubt, not only the drafter."""

    detector: Detector
    message: str
    target: bool


@dataclass(frozen=True)
class HealthSettings:
    """What counts as healthy, and what follows if even a second push does not help.

    `on_failure`          plain: go on without speculation, or without the engine; stop: raise HealthError
    `canary_steps`        drafts per round of the canary; the engine must be able to run such a chain
    `canary_tokens`       its longest answer; many prompts with short answers cost an engine less than the reverse
    `floor_share`         share of the predicted accepted drafts per round that canary and drift test must reach
    `z`                   how many standard errors below that the canary must lie to fail
    `false_alarm`         bound on the probability, per observation, that the drift test alarms above its floor
    `correlated_rounds`   rounds that count as one observation there: those of one request resemble each other
    """

    on_failure: Literal["plain", "stop"] = "plain"
    canary_steps: int = 3
    canary_tokens: int = 12
    floor_share: float = 0.5
    z: float = 4.0
    false_alarm: float = 1e-9
    correlated_rounds: int = 8


# ---- detectors --------------------------------------------------------------------------------------------------


def stamp_finding(samples: Sequence[Sample], oldest: int, newest: int) -> Finding | None:
    """Every response token must carry a version in [oldest, newest]. Check before training on the samples."""
    for sample in samples:
        spans = sorted(sample.policy_versions, key=lambda span: span[1])
        for version, first, end in spans:
            if not oldest <= version <= newest:
                allowed = str(newest) if oldest == newest else f"{oldest} to {newest}"
                message = f"{sample.request_id}: tokens {first} to {end} drawn by version {version}, expected {allowed}"
                return Finding("stamp", message, target=True)
        covered = sum(end - first for _, first, end in spans)
        if covered != len(sample.response):
            message = f"{sample.request_id}: versions cover {covered} of {len(sample.response)} response tokens"
            return Finding("stamp", message, target=True)
    return None


def canary_finding(accepted: Sequence[int], predicted: float | None, floor_share: float, z: float) -> Finding | None:
    """Does a histogram of accepted drafts per round (index = accepted) reach its floor?

    `predicted` is the expected accept length, tokens per round, the target's own included; None: unknown, then it is
    enough that speculation ran. The floor is `1 + floor_share (predicted - 1)`, and the canary fails when the observed
    mean lies `z` standard errors below it.
    """
    counts = np.asarray(accepted, dtype=np.float64)
    rounds = counts.sum()
    if rounds == 0:
        return Finding("canary", "speculation is on, but not one round was verified", target=False)
    if predicted is None:
        return None
    values = np.arange(len(counts))
    mean = float(counts @ values / rounds)
    # The sample's variance is 0 when nothing is accepted; the floor's own Bernoulli variance bounds it from below.
    floor = floor_share * (predicted - 1)
    variance = max(float(counts @ (values - mean) ** 2 / rounds), min(floor, 0.25))
    if mean + z * math.sqrt(variance / rounds) >= floor:
        return None
    message = (
        f"accept length {1 + mean:.2f} over {int(rounds)} rounds, but {predicted:.2f} was predicted "
        f"and at least {1 + floor:.2f} must be reached"
    )
    return Finding("canary", message, target=False)


def logprob_finding(samples: Sequence[Sample], recomputed: Sequence[np.ndarray], bound: float) -> Finding | None:
    """The engine's log-probs of its own tokens against the trainer's, `recomputed[i]` token-aligned as in `Sample`.

    Sees a target that was exported wrongly. `bound`: on the mean absolute difference over response tokens; it depends
    on dtype and kernels (float32 1e-3, bfloat16 about 0.05), so it is the caller's.
    """
    total, tokens = 0.0, 0
    for sample, values in zip(samples, recomputed, strict=True):
        response = slice(sample.prompt_len, len(sample.tokens))
        total += float(np.abs(sample.behaviour_logprobs[response] - np.asarray(values)[response]).sum())
        tokens += len(sample.response)
    gap = total / max(1, tokens)
    if gap <= bound:  # NaN is above every bound
        return None
    return Finding(
        "logprobs", f"engine and trainer differ by {gap:.4f} nats a token, allowed are {bound:g}", target=True
    )


@dataclass
class Drift:
    """A sequential test, while the engine runs, that the mean of accepted drafts per round is at least its floor.

    A betting martingale (Waudby-Smith and Ramdas, arXiv 2010.09686): each observation multiplies the evidence by
    1 + bet (floor - accepted), whose mean is at most 1 while the floor is reached. By Ville's inequality evidence that
    starts at any given moment ever exceeds 1 / false_alarm with at most that probability, however often one looks. It
    is restarted whenever it falls below 1, as in CUSUM, so that a good past does not delay the alarm; among n starts a
    false alarm has then at most the probability n × false_alarm. `correlated_rounds` rounds are averaged
    geometrically into one observation, which keeps this true for any dependence among them.
    """

    settings: HealthSettings
    predicted: dict[SpecConfig, float]
    log_evidence: float = 0.0
    rounds: int = 0
    accepted: int = 0
    alarmed: bool = False

    def observe(self, stats: Sequence[RoundStats]) -> Finding | None:
        """`predicted[config]` is the accept length expected under that config; other configs' rounds are not judged."""
        for round_stats in stats:
            predicted = self.predicted.get(round_stats.config)
            if predicted is None or round_stats.config.num_steps == 0 or predicted <= 1:
                continue
            floor = self.settings.floor_share * (predicted - 1)
            counts = np.asarray(round_stats.accepted, dtype=np.float64)
            values = np.arange(len(counts))
            # Half of the largest bet that cannot ruin: good against any alternative, and never far from the best one.
            bet = 0.5 / max(1.0, round_stats.config.num_steps - floor)
            gain = float(counts @ np.log1p(bet * (floor - values)))
            self.log_evidence = max(0.0, self.log_evidence) + gain / self.settings.correlated_rounds
            self.rounds += int(counts.sum())
            self.accepted += int(counts @ values)
        if self.log_evidence < -math.log(self.settings.false_alarm):
            return None
        mean = 1 + self.accepted / max(1, self.rounds)
        return Finding("drift", f"accept length {mean:.2f} over {self.rounds} rounds since the push", target=False)


def decide(first: Sequence[Finding], second: Sequence[Finding] | None) -> Action:
    """One engine's findings after the push, and after everything was pushed again -> what to do with it."""
    if not first:
        return "speculate"
    if second is None:
        return "push_again"
    if not second:
        return "speculate"
    return "drop" if any(finding.target for finding in second) else "plain"


# ---- actions ----------------------------------------------------------------------------------------------------


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
        self._canary_seconds = 0.0

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
        first = self._examine(report, predicted, lengths)
        again = [name for name, findings in first.items() if decide(findings, None) == "push_again"]
        second: dict[str, list[Finding]] = {}
        if again:
            for name in again:
                self._turn_off(name)
            repeat = self.pusher.push(version, source, "all", only=again)
            pushes.append(repeat)
            second = self._examine(repeat, predicted, lengths)
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
        self._conclude(actions, second, lengths)
        serving = tuple(name for name, action in actions.items() if action != "drop")
        plain = tuple(name for name, action in actions.items() if action == "plain")
        return HealthReport(tuple(pushes), serving, plain, records, lengths, self._canary_seconds)

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

    def _examine(
        self, report: PushReport, predicted: float | None, lengths: dict[str, float]
    ) -> dict[str, list[Finding]]:
        began = time.perf_counter()
        with ThreadPoolExecutor(max(1, len(report.engines))) as threads:
            found = threads.map(lambda name: self._findings(name, report, predicted, lengths), report.engines)
            result = dict(zip(report.engines, found, strict=True))
        self._canary_seconds += time.perf_counter() - began
        return result

    def _findings(
        self, name: str, report: PushReport, predicted: float | None, lengths: dict[str, float]
    ) -> list[Finding]:
        result = report.engines[name]
        if result.error:
            return [Finding("session", result.error, target=True)]
        if not result.difference.empty:
            return [self._bits(result.difference)]
        if not self.canary:
            return []
        try:
            samples = self._sing(name, report.version)
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

    def _sing(self, name: str, version: int) -> list[Sample]:
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
    ) -> None:
        for name, action in actions.items():
            self.drift[name] = Drift(self.settings, {})
            if action == "plain":
                self._turn_off(name)
            elif action == "speculate":
                if name in lengths:
                    self._last_accept_length[name] = lengths[name]
                # Where nothing touched the engine's own speculation there is nothing to restore.
                if self.speculate is not None and (self.canary or name in second or name in self._off):
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

"""Turn observations of engines into findings, and findings into one action per engine. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_rlspec.push.fingerprint import Difference
from megatron_rlspec.types import RoundStats, Sample, SpecConfig

Detector = Literal["session", "fingerprint", "stamp", "canary", "drift"]
Action = Literal["speculate", "push_again", "plain", "drop"]


@dataclass(frozen=True)
class Finding:
    """A problem of one engine. `target`: the target may be wrong, not only the drafter."""

    detector: Detector
    message: str
    target: bool


@dataclass(frozen=True)
class HealthSettings:
    """Thresholds of the checks.

    canary_steps       drafts per round of the canary; the engine must be able to run such a chain
    canary_tokens      the longest answer of a canary; many prompts with short answers take less time than few long ones
    canary_share       share of the time since the first canary that canaries may take. A push beyond it runs no canary,
                       unless an engine is held
    floor_share        share of the predicted accepted drafts per round that canary and drift test must reach
    z                  the canary fails if its mean is so many standard errors below the floor
    false_alarm        bound on the probability, per observation, of an alarm of the drift test above its floor
    correlated_rounds  rounds that the drift test counts as one observation, because rounds of a request are correlated
    """

    canary_steps: int = 3
    canary_tokens: int = 8
    canary_share: float = 0.02
    floor_share: float = 0.5
    z: float = 4.0
    false_alarm: float = 1e-9
    correlated_rounds: int = 8


def stamp_finding(samples: Sequence[Sample], oldest: int, newest: int) -> Finding | None:
    """Check that every response token carries a version in [oldest, newest], before training on the samples."""
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


def fingerprint_finding(
    difference: Difference, is_drafter: Callable[[str], bool]
) -> Finding | None:
    """Return the finding of an engine that does not hold what it was sent; None if it does.

    The target is sound if only tensors of the drafter differ.
    """
    if difference.empty:
        return None
    return Finding(
        "fingerprint", str(difference), target=not all(map(is_drafter, difference.names))
    )


def canary_finding(
    accepted: Sequence[int], predicted: float | None, floor_share: float, z: float
) -> Finding | None:
    """Check that a histogram of accepted drafts per round (index = accepted) reaches its floor.

    `predicted` is the expected accept length: tokens per round, with the target's own token. With None the canary only
    has to speculate. The floor is `1 + floor_share (predicted - 1)`. The canary fails if the observed mean is more than
    `z` standard errors below it.
    """
    counts = np.asarray(accepted, dtype=np.float64)
    rounds = counts.sum()
    if rounds == 0:
        return Finding("canary", "speculation is on, but no round was verified", target=False)
    if predicted is None:
        return None
    values = np.arange(len(counts))
    mean = float(counts @ values / rounds)
    # Without accepted drafts the sample's variance is 0. The Bernoulli variance of the floor is a lower bound.
    floor = floor_share * (predicted - 1)
    variance = max(float(counts @ (values - mean) ** 2 / rounds), min(floor, 0.25))
    if mean + z * math.sqrt(variance / rounds) >= floor:
        return None
    message = (
        f"accept length {1 + mean:.2f} over {int(rounds)} rounds, expected at least {1 + floor:.2f} "
        f"({predicted:.2f} was predicted)"
    )
    if mean == 0:
        message += "; no draft is accepted, as when an EAGLE-3 drafter reads other layers than it was trained on"
    return Finding("canary", message, target=False)


@dataclass
class Drift:
    """A sequential test, between pushes, that the mean of accepted drafts per round is at least its floor.

    It is a betting martingale (Waudby-Smith and Ramdas, arXiv 2010.09686). Each observation multiplies the evidence by
    1 + bet (floor - accepted). The mean of this factor is at most 1 while the floor is reached. By Ville's inequality,
    the evidence then exceeds 1 / false_alarm at any time with a probability of at most false_alarm.

    The evidence restarts at 1 whenever it falls below 1, as in CUSUM, so a good past does not delay the alarm. With n
    starts the probability of a false alarm is at most n × false_alarm. `correlated_rounds` rounds are averaged
    geometrically into one observation; the bound then holds for any dependence among them.
    """

    settings: HealthSettings
    predicted: dict[SpecConfig, float]
    log_evidence: float = 0.0
    rounds: int = 0
    accepted: int = 0
    alarmed: bool = False

    def observe(self, stats: Sequence[RoundStats]) -> Finding | None:
        """Add rounds to the test. Rounds of configurations without a `predicted` accept length are ignored."""
        for round_stats in stats:
            predicted = self.predicted.get(round_stats.config)
            if predicted is None or round_stats.config.num_steps == 0 or predicted <= 1:
                continue
            floor = self.settings.floor_share * (predicted - 1)
            counts = np.asarray(round_stats.accepted, dtype=np.float64)
            values = np.arange(len(counts))
            # Half of the largest bet that keeps the factor positive. It works against any lower mean.
            bet = 0.5 / max(1.0, round_stats.config.num_steps - floor)
            gain = float(counts @ np.log1p(bet * (floor - values)))
            self.log_evidence = max(0.0, self.log_evidence) + gain / self.settings.correlated_rounds
            self.rounds += int(counts.sum())
            self.accepted += int(counts @ values)
        if self.log_evidence < -math.log(self.settings.false_alarm):
            return None
        mean = 1 + self.accepted / max(1, self.rounds)
        return Finding(
            "drift",
            f"accept length {mean:.2f} over {self.rounds} rounds since the push",
            target=False,
        )


class DriftWatch:
    """One `Drift` test per engine and push. Each test returns its finding once."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._tests: dict[str, Drift] = {}

    def begin(self, name: str) -> None:
        """Start a new test for an engine with new weights."""
        self._tests[name] = Drift(self.settings, {})

    def observe(
        self, name: str, stats: Sequence[RoundStats], predicted: Mapping[SpecConfig, float]
    ) -> Finding | None:
        """Test an engine's rounds. `predicted` are accept lengths by configuration; later calls update them."""
        if name not in self._tests:
            self.begin(name)
        test = self._tests[name]
        test.predicted.update(predicted)
        finding = test.observe(stats)
        if finding is None or test.alarmed:
            return None
        test.alarmed = True
        return finding


def decide(first: Sequence[Finding], second: Sequence[Finding] | None) -> Action:
    """Return the action for one engine, from its findings after the push and, if there was one, the second push."""
    if not first:
        return "speculate"
    if second is None:
        return "push_again"
    if not second:
        return "speculate"
    return "drop" if any(finding.target for finding in second) else "plain"

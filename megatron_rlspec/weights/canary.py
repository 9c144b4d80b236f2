"""The canary: after a push every engine answers a few prompts, drafting a fixed chain.

Fingerprints compare bits, so they cannot see that the exporter is wrong (exchanged halves, a scale, shards in the
wrong order). The canary's acceptance can: it reads what the engine computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.types import Prompt, Request, Sampling, SpecConfig, SpecSchedule
from megatron_rlspec.weights.detectors import Finding, HealthSettings, canary_finding, stamp_finding


@dataclass(frozen=True)
class CanaryResult:
    """What one engine's canary showed.

    accepted  [num_steps + 1] rounds that accepted 0, 1, ... drafts; empty if the engine does not speculate or failed
    error     why the engine gave no answer; "" if it did
    """

    findings: tuple[Finding, ...] = ()
    accepted: tuple[int, ...] = ()
    error: str = ""

    @property
    def accept_length(self) -> float:
        """Tokens per round; NaN without rounds."""
        return accept_length(self.accepted)


class Canary:
    """Runs canaries within their share of the time, and remembers each engine's last good one."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.seconds = 0.0  # that all canaries took
        self._began = time.perf_counter()  # when the first one began
        self._accept_lengths: dict[str, float] = {}

    def due(self) -> bool:
        """Whether `canary_share` of the time since the first canary pays for another one. True before the first."""
        allowed = self.settings.canary_share * (time.perf_counter() - self._began)
        return not self.seconds or self.seconds <= allowed

    def run(
        self,
        engines: Mapping[str, RolloutEngine],
        versions: Mapping[str, int],
        prompts: Sequence[Prompt],
        sampling: Sampling,
        chain: SpecConfig | None,
        expected: float | None,
    ) -> dict[str, CanaryResult]:
        """Ask all `engines` at once, and judge their answers.

        versions  by engine, the version that every answer must be stamped with
        chain     drafted in every round; None in a run without speculation: then only the stamps are judged
        expected  accept length under `chain`. The floor comes from it or from the engine's last good canary, whichever
                  is lower: acceptance on the first tokens of answers differs from acceptance on the rest

        The schedule of `chain` stays in force, and the rounds stay in the engine's `stats`: the caller restores both.
        """
        if not engines:
            return {}
        began = time.perf_counter()
        if not self.seconds:
            self._began = began
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.settings.canary_tokens))
        with ThreadPoolExecutor(len(engines)) as threads:
            results = threads.map(
                lambda name: self._ask(name, engines[name], versions[name], prompts, sampling, chain, expected), engines
            )
            found = dict(zip(engines, results, strict=True))
        self.seconds += time.perf_counter() - began
        return found

    def remember(self, name: str, result: CanaryResult) -> None:
        """Take this result for the engine's last good one."""
        if not math.isnan(result.accept_length):
            self._accept_lengths[name] = result.accept_length

    def forget(self, name: str) -> None:
        """Forget the engine's last good canary: another engine has its name now."""
        self._accept_lengths.pop(name, None)

    def _ask(
        self,
        name: str,
        engine: RolloutEngine,
        version: int,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        chain: SpecConfig | None,
        expected: float | None,
    ) -> CanaryResult:
        # No id may be a prefix of another, hence the fixed width; the seed varies with the version.
        requests = [
            Request(f"canary-{version:08d}-{i:04d}", prompt, seed=version * len(prompts) + i)
            for i, prompt in enumerate(prompts)
        ]
        try:
            if chain is not None:
                engine.release()
                engine.set_schedule(SpecSchedule.fixed(chain))
            samples = engine.generate(requests, sampling)
        except EngineError as error:
            return CanaryResult(error=str(error))
        findings = [stamp_finding(samples, version, version)]
        accepted: tuple[int, ...] = ()
        if chain is not None:
            accepted = _histogram(pooled(sample.accepted for sample in samples), chain.num_steps)
            known = [length for length in (expected, self._accept_lengths.get(name)) if length is not None]
            floor_share, z = self.settings.floor_share, self.settings.z
            findings.append(canary_finding(accepted, min(known, default=None), floor_share, z))
        return CanaryResult(tuple(finding for finding in findings if finding), accepted)


def _histogram(counts: np.ndarray, num_steps: int) -> tuple[int, ...]:
    padded = np.zeros(num_steps + 1, dtype=np.int64)
    kept = counts[: num_steps + 1]
    padded[: len(kept)] = kept
    return tuple(padded.tolist())

"""The canary: after a push every engine answers a few prompts with a fixed chain of drafts.

Fingerprints compare bits. They cannot detect a wrong exporter (swapped halves, a wrong scale, shards in the wrong
order), because the engine then holds exactly what the exporter sent. The acceptance of the canary depends on what the
engine computes, and falls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.push.detectors import Finding, HealthSettings, canary_finding, stamp_finding
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.types import Prompt, Request, Sampling, SpecConfig, SpecSchedule


@dataclass(frozen=True)
class CanaryResult:
    """The result of one engine's canary.

    accepted  [num_steps + 1] rounds that accepted 0, 1, ... drafts; empty if the engine does not speculate or failed
    error     why the engine did not answer; "" if it did
    """

    findings: tuple[Finding, ...] = ()
    accepted: tuple[int, ...] = ()
    error: str = ""

    @property
    def accept_length(self) -> float:
        """Return tokens per round; NaN without rounds."""
        return accept_length(self.accepted)


def canary_metrics(results: Iterable[CanaryResult], seconds: float) -> dict[str, float]:
    """Return `health/canary_*`: tokens per round over all engines, if any has drafted, and the time that it took."""
    total = pooled(result.accepted for result in results)
    found = {"health/canary_accept_length": accept_length(total)} if any(total) else {}
    return found | {"health/canary_seconds": seconds}


class Canary:
    """Runs canaries within their share of the time. Keeps the accept length of each engine's last good canary."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self.seconds = 0.0  # duration of all canaries together
        self._began = time.perf_counter()  # when the first one began
        self._accept_lengths: dict[str, float] = {}

    def due(self) -> bool:
        """Return whether canaries took at most `canary_share` of the time since the first. True before the first."""
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
        """Run the canary on all `engines` at once, and check the answers.

        versions  by engine, the version stamp that every answer must carry
        chain     drafted in every round; None in a run without speculation: then only the stamps are checked
        expected  accept length under `chain`. The floor comes from the lower one of `expected` and the engine's last
                  good canary, because acceptance on the first tokens of answers differs from acceptance on the rest

        Afterwards the engine still runs the schedule of `chain`, and its `stats` hold the canary's rounds. The caller
        must restore both.
        """
        if not engines:
            return {}
        began = time.perf_counter()
        if not self.seconds:
            self._began = began
        sampling = replace(
            sampling, max_new_tokens=min(sampling.max_new_tokens, self.settings.canary_tokens)
        )
        with ThreadPoolExecutor(len(engines)) as threads:
            results = threads.map(
                lambda name: self._ask(
                    name, engines[name], versions[name], prompts, sampling, chain, expected
                ),
                engines,
            )
            found = dict(zip(engines, results, strict=True))
        self.seconds += time.perf_counter() - began
        return found

    def remember(self, name: str, result: CanaryResult) -> None:
        """Keep this result as the engine's last good one."""
        if not math.isnan(result.accept_length):
            self._accept_lengths[name] = result.accept_length

    def forget(self, name: str) -> None:
        """Drop the engine's last good canary, because another engine has its name now."""
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
        # Fixed widths, because no id may be a prefix of another. The seed varies with the version.
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
            known = [
                length
                for length in (expected, self._accept_lengths.get(name))
                if length is not None
            ]
            floor_share = self.settings.floor_share
            findings.append(
                canary_finding(accepted, min(known, default=None), floor_share, self.settings.z)
            )
        return CanaryResult(tuple(finding for finding in findings if finding), accepted)


def _histogram(counts: np.ndarray, num_steps: int) -> tuple[int, ...]:
    kept = counts[: num_steps + 1].astype(np.int64)
    return tuple(np.pad(kept, (0, num_steps + 1 - len(kept))).tolist())

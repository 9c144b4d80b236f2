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

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.push.detectors import Finding, HealthSettings, canary_finding, stamp_finding
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.types import Prompt, Request, Sample, Sampling, SpecConfig

CANARY_PROMPTS = 16


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
    metrics = {"health/canary_seconds": seconds}
    total = pooled(result.accepted for result in results)
    if any(total):
        metrics["health/canary_accept_length"] = accept_length(total)
    return metrics


class Canary:
    """Runs canaries within their share of the time. Keeps the accept length of each engine's last good canary."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._runs = 0
        self.seconds = 0.0  # duration of all canaries together
        self._began = time.perf_counter()  # when the first one began
        self._accept_lengths: dict[str, float] = {}

    def due(self) -> bool:
        """Return whether a canary is among the first, or all took at most `canary_share` of the time since then."""
        if self._runs < self.settings.canary_first:
            return True
        return self.seconds <= self.settings.canary_share * (time.perf_counter() - self._began)

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

        Afterwards the engine still runs `chain`, which the caller must replace.
        """
        if not engines:
            return {}
        began = time.perf_counter()
        if not self._runs:
            self._began = began
        self._runs += 1
        sampling = replace(
            sampling, max_new_tokens=min(sampling.max_new_tokens, self.settings.canary_tokens)
        )

        def ask(name: str) -> CanaryResult:
            engine = engines[name]
            try:
                samples = _generate(engine, versions[name], prompts, sampling, chain)
            except EngineError as error:
                return CanaryResult(error=str(error))
            return self._judge(name, samples, versions[name], chain, expected)

        with ThreadPoolExecutor(len(engines)) as threads:
            results = dict(zip(engines, threads.map(ask, engines), strict=True))
        self.seconds += time.perf_counter() - began
        return results

    def remember(self, name: str, result: CanaryResult) -> None:
        """Keep this result as the engine's last good one."""
        if not math.isnan(result.accept_length):
            self._accept_lengths[name] = result.accept_length

    def forget(self, name: str) -> None:
        """Drop the engine's last good canary, because another engine has its name now."""
        self._accept_lengths.pop(name, None)

    def _judge(
        self,
        name: str,
        samples: Sequence[Sample],
        version: int,
        chain: SpecConfig | None,
        expected: float | None,
    ) -> CanaryResult:
        findings = []
        if stamp := stamp_finding(samples, version, version):
            findings.append(stamp)
        if chain is None:
            return CanaryResult(tuple(findings))
        length = chain.num_steps + 1
        counts = pooled([[0] * length, *(sample.accepted for sample in samples)])
        accepted = tuple(counts[:length].tolist())
        last_good = self._accept_lengths.get(name)
        if expected is None:
            expected = last_good
        elif last_good is not None:
            expected = min(expected, last_good)
        if finding := canary_finding(accepted, expected):
            findings.append(finding)
        return CanaryResult(tuple(findings), accepted)


def _generate(
    engine: RolloutEngine,
    version: int,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    chain: SpecConfig | None,
) -> list[Sample]:
    requests = []
    for i, prompt in enumerate(prompts):
        # Fixed widths, because no id may be a prefix of another. The seed varies with the version.
        request_id = f"canary-{version:08d}-{i:04d}"
        requests.append(Request(request_id, prompt, seed=version * len(prompts) + i))
    if chain is not None:
        engine.release()
        engine.set_config(chain)
    samples = engine.generate(requests, sampling)
    engine.stats()  # these rounds are no rollout's
    return samples

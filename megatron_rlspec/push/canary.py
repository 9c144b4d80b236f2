"""The canary: after a push every engine answers a few prompts, with a fixed number of drafts per round.

Fingerprints compare bits. They cannot detect a wrong exporter (swapped halves, a wrong scale, shards in the wrong
order), because the engine then holds exactly what the exporter sent. But the engine then computes something else, so
it accepts fewer drafts.

A canary's accept length is compared with a floor: the threshold and the findings are in `detectors.py`. `health.py`
runs the canary for our own loop and `CoTrainer`, `integrations/slime/speculation.py` inside slime.
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

# how many prompts every engine answers; callers cut their list of prompts to it
CANARY_PROMPTS = 16


@dataclass(frozen=True)
class CanaryResult:
    """The result of one engine's canary.

    findings  () if the answers are good, or if there are none (then `error` says why)
    accepted  [num_steps + 1] rounds that accepted 0, 1, ... drafts; empty if the run does not speculate or the engine
              failed
    error     why the engine did not answer; "" if it did
    """

    findings: tuple[Finding, ...] = ()
    accepted: tuple[int, ...] = ()
    error: str = ""

    @property
    def accept_length(self) -> float:
        """Return tokens per round, the target's own token included; NaN without rounds or if `accepted` is empty."""
        return accept_length(self.accepted)


def canary_metrics(results: Iterable[CanaryResult], seconds: float) -> dict[str, float]:
    """Return `health/canary_*`: seconds that canaries took; and tokens per round over all engines, if there are rounds.

    seconds  of these canaries together, as a difference of `Canary.seconds`
    """
    metrics = {"health/canary_seconds": seconds}
    total = pooled(result.accepted for result in results)
    if any(total):
        metrics["health/canary_accept_length"] = accept_length(total)
    return metrics


class Canary:
    """Runs canaries on engines, says when one is due, and keeps the accept length of each engine's last good canary.

    seconds  duration of all calls of `run` together; callers take differences

    Not thread-safe: one thread calls `run`, which has threads of its own.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._runs = 0  # calls of `run` with engines
        self.seconds = 0.0
        self._began = time.perf_counter()  # when the first of them began
        # accept length of the last good canary, by the engine's name
        self._last_good: dict[str, float] = {}

    def due(self) -> bool:
        """Return whether a canary may run now, by `canary_first` or `canary_share` of `HealthSettings`.

        `run` does not ask this: its caller decides.
        """
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

        engines   by name
        versions  by the engine's name, the version stamp that every token of an answer must carry
        chain     drafted in every round; None in a run without speculation: then only the stamps are checked
        expected  accept length that the rounds of whole answers have under `chain`; None: unknown. The floor comes
                  from the lower one of `expected` and the engine's last good canary, because acceptance on the first
                  tokens of answers differs from acceptance on the rest
        prompts   not empty: with a `chain`, a canary without a verified round is a finding
        sampling  of the rollouts; answers are cut to `canary_tokens`

        With a `chain`, the engines still run it afterwards, and none of them is held. The caller must then set their
        rule, or hold them, again. An engine that fails has an `error` in its result; nothing is raised for it.
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
        """Keep this result as the engine's last good one. Call it for a result without findings only."""
        if not math.isnan(result.accept_length):
            self._last_good[name] = result.accept_length

    def forget(self, name: str) -> None:
        """Drop the engine's last good canary, because another engine has its name now."""
        self._last_good.pop(name, None)

    def _judge(
        self,
        name: str,
        samples: Sequence[Sample],
        version: int,
        chain: SpecConfig | None,
        expected: float | None,
    ) -> CanaryResult:
        """Turn an engine's answers into its result. Arguments as in `run`; called from a thread per engine."""
        findings = []
        if stamp := stamp_finding(samples, version, version):
            findings.append(stamp)
        if chain is None:
            return CanaryResult(tuple(findings))
        # The row of zeros makes the histogram at least `length` long, and the slice makes it no longer.
        length = chain.num_steps + 1
        counts = pooled([[0] * length, *(sample.accepted for sample in samples)])
        accepted = tuple(counts[:length].tolist())
        last_good = self._last_good.get(name)
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
    """Return one engine's answers to the prompts. Raises EngineError."""
    requests = []
    for i, prompt in enumerate(prompts):
        # Numbers of fixed width, because no id may be the prefix of another: SGLang aborts all requests whose id begins
        # with the given one. Seeds differ between versions, so that later pushes do not repeat the same texts. The
        # second canary of a push has the ids and seeds of the first one, which has ended.
        request_id = f"canary-{version:08d}-{i:04d}"
        requests.append(Request(request_id, prompt, seed=version * len(prompts) + i))
    if chain is not None:
        # before `set_config`: a held engine would only store the configuration, and draft nothing
        engine.release()
        engine.set_config(chain)
    samples = engine.generate(requests, sampling)
    # Drops the canary's rounds: the speculation rule must learn from rollouts only. Rounds of a rollout that are not
    # read yet are lost, too.
    engine.stats()
    return samples

"""What rollouts teach slime's engines about speculation: one `Speculation` where rollouts are driven.

    speculation = Speculation(learning, configs)
    speculation.expect(prediction)                    what training saw coming
    speculation.canary(urls, prompts, sampling)       if weights are new
    speculation.before_rollout(urls)                  tell every engine
    speculation.after_rollout(urls)                   learn, and tell every engine
    speculation.forget(urls)                          instead, after an evaluation

Each returns metrics. `urls` as in `engines.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rlspec.engine import EngineError
from megatron_rlspec.integrations.slime.engines import Engine, hold
from megatron_rlspec.speculation.forecast import Prediction
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.types import Prompt, Request, RoundStats, Sampling, SpecConfig, SpecSchedule
from megatron_rlspec.weights.detectors import Drift, HealthSettings, canary_finding

logger = logging.getLogger(__name__)


class Speculation:
    """What rollouts teach about speculation, and how engines hear of it: one object as long as rollouts are driven.

    `configs`: what the engines can run, by their own account; a canary drafts by one of them.
    """

    def __init__(
        self,
        learning: Learning,
        configs: Iterable[SpecConfig] = (),
        settings: HealthSettings | None = None,
        api_key: str = "",
    ) -> None:
        self.learning, self.configs, self.api_key = learning, frozenset(configs), api_key
        self.settings = settings or HealthSettings()
        self.drift: dict[str, Drift] = {}
        self.versions: dict[str, str] = {}  # under which each engine's drift test began
        self._canary_lengths: dict[str, float] = {}  # accept length of each engine's last good canary
        self._canary_versions: dict[str, str] = {}
        self._spent, self._began = 0.0, time.perf_counter()  # on canaries; since when

    def expect(self, prediction: Prediction | None) -> dict[str, float]:
        """Training's prediction of what the rollout that begins will accept, calibrated: `predict/next_tokens_k*`."""
        return _named(self.learning.expect(prediction))

    def before_rollout(self, urls: Sequence[str]) -> dict[str, float]:
        """Give every engine the rule that follows from what was expected. Returns `health/deaf_engines`."""
        engines, rule = [Engine(url, self.api_key) for url in urls], self.learning.rule()
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            heard = sum(threads.map(lambda engine: _tell(engine, rule), engines))
        return {"health/deaf_engines": float(len(engines) - heard)}

    def canary(self, urls: Sequence[str], prompts: Sequence[Sequence[int]], sampling: Sampling) -> dict[str, float]:
        """Before a rollout under new weights: a few tokens to `prompts` under a fixed chain.

        What bits cannot show, an exporter's mistake, costs acceptance: an engine whose accept length lies below its
        floor (`HealthSettings`) is held without speculation until the next push. Canaries keep to `canary_share` of the
        time. Returns `health/canary_*`; nothing where none was due.
        """
        began = time.perf_counter()
        steps = [c.num_steps for c in self.configs if 0 < c.num_steps <= self.settings.canary_steps]
        if not prompts or not steps or self._spent > self.settings.canary_share * (began - self._began):
            return {}
        chain = SpecConfig(max(steps))
        engines = {url: Engine(url, self.api_key) for url in urls}
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            counted = threads.map(lambda engine: self._run_canary(engine, chain, prompts, sampling), engines.values())
            accepted = {url: counts for url, counts in zip(engines, counted, strict=True) if counts}
        if not accepted:
            return {}
        expected = self.learning.accept_length(chain)
        failed = 0
        for url, counts in accepted.items():
            known = [length for length in (expected, self._canary_lengths.get(url)) if length is not None]
            finding = canary_finding(counts, min(known, default=None), self.settings.floor_share, self.settings.z)
            if finding is not None:
                failed += 1
                logger.error("rlspec: %s: no speculation until a later push: canary: %s", url, finding.message)
                hold(engines[url], [finding])
            elif sum(counts):
                self._canary_lengths[url] = _accept_length([counts])
        self._spent += time.perf_counter() - began
        return {
            "health/canary_accept_length": _accept_length(accepted.values()),
            "health/canary_failures": float(failed),
            "health/canary_seconds": time.perf_counter() - began,
        }

    def _run_canary(
        self, engine: Engine, chain: SpecConfig, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[int]:
        """How often an engine accepted 0, 1, … drafts; nothing if it is held, was heard under its version, or fails."""
        try:
            version = engine.version()
            if not version.isdigit():  # nothing was pushed yet: SGLang's own "default"
                return []
            if self._canary_versions.get(engine.url) == version or engine.describe()["held"]:
                return []
            engine.set_schedule(SpecSchedule.fixed(chain))
            sampling = replace(sampling, max_new_tokens=self.settings.canary_tokens)
            # No id may be a prefix of another, hence the fixed width.
            requests = [
                Request(f"canary-{version:>8}-{i:04d}", Prompt(i, np.asarray(prompt)), seed=i)
                for i, prompt in enumerate(prompts)
            ]
            samples = engine.generate(requests, sampling)
            engine.stats()  # what a canary shows is not the rollout's
            engine.set_spec_rule(self.learning.rule())
        except EngineError as error:
            logger.warning("rlspec: no canary: %s", error)
            return []
        self._canary_versions[engine.url] = version
        return [sum(s.accepted[i] for s in samples if i < len(s.accepted)) for i in range(chain.num_steps + 1)]

    def after_rollout(self, urls: Sequence[str]) -> dict[str, float]:
        """Gather every engine's rounds, learn from them together, and give every engine the rule that follows.

        Acceptance is learnt as a ratio of sums over all engines; times scale the cost table, if there is one. An engine
        whose drafts are accepted far less than expected is held without speculation until the next push. Returns
        `rollout/spec_*`, `predict/*` (the rollout's prediction against it) and `health/*`. An engine that does not
        answer is left out: to keep engines alive is slime's part.
        """
        engines = {url: Engine(url, self.api_key) for url in urls}
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            seen = dict(zip(engines, threads.map(_observations, engines.values()), strict=True))
            heard = {url: found for url, found in seen.items() if found is not None}
            held = [url for url, found in heard.items() if self._drifts(engines[url], *found)]
            stats = [s for rounds, _, _ in heard.values() for s in rounds]
            reports = [report for _, report, _ in heard.values()]
            values = self.learning.observe(stats, reports) if stats else {}
            rule = self.learning.rule()
            told = threads.map(lambda url: _tell(engines[url], rule), heard)
            deaf = len(seen) - sum(told)
        return _named(values) | {
            "health/drifting_engines": float(len(held)),
            "health/deaf_engines": float(deaf),
        }

    def forget(self, urls: Sequence[str]) -> None:
        """Drop all rounds since the last rollout: an evaluation samples otherwise than what training predicts."""
        with ThreadPoolExecutor(max(1, len(urls))) as threads:
            list(threads.map(lambda url: _observations(Engine(url, self.api_key)), urls))

    def _drifts(self, engine: Engine, stats: Sequence[RoundStats], _: Any, version: str) -> bool:
        if self.versions.get(engine.url) != version:
            self.versions[engine.url], self.drift[engine.url] = version, Drift(self.settings, {})
        drift = self.drift[engine.url]
        drift.predicted.update(self.learning.accept_lengths())
        finding = drift.observe(stats)
        if finding is None or drift.alarmed:
            return False
        drift.alarmed = True
        logger.error("rlspec: %s: no speculation until a later push: %s", engine.url, finding.message)
        hold(engine, [finding])
        return True


def _named(values: Mapping[str, float]) -> dict[str, float]:
    """`spec/x` of our own loop's records as `rollout/spec_x`, beside slime's."""
    return {
        f"rollout/{name.replace('/', '_', 1)}" if name.startswith("spec/") else name: value
        for name, value in values.items()
    }


def _accept_length(histograms: Iterable[Sequence[int]]) -> float:
    """Tokens per round over all of them: a ratio of sums."""
    histograms = list(histograms)
    rounds = sum(map(sum, histograms))
    return 1 + sum(i * n for counts in histograms for i, n in enumerate(counts)) / rounds if rounds else math.nan


def _observations(engine: Engine) -> tuple[list[RoundStats], dict[str, Any], str] | None:
    """(rounds, rule's report, version), or None of an engine that does not tell."""
    try:
        return engine.stats(), engine.spec_rule_report(), engine.version()
    except EngineError as error:
        logger.warning("rlspec: nothing is learnt of this engine's rounds: %s", error)
        return None


def _tell(engine: Engine, rule: Mapping[str, Any]) -> bool:
    try:
        engine.set_spec_rule(rule)
    except EngineError as error:
        logger.warning("rlspec: this engine's speculation stays as it is: %s", error)
        return False
    return True

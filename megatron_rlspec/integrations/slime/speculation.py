"""Learn about speculation from slime's rollouts and set the engines' rules, in the process that runs rollouts.

`rollout.py` makes one `SlimeDraftRule` a run and calls, in this order for each rollout:

    speculation = SlimeDraftRule(learning, configs)
    speculation.before_rollout(urls, prediction)      set every engine's rule
    speculation.canary(urls, prompts, sampling)       if weights are new
    speculation.after_rollout(urls, delivered)        learn
    speculation.forget(urls)                          instead of `after_rollout`, after an evaluation

All but `forget` return metrics. `urls` are those of slime's engines. An engine that does not answer is left out; slime
restarts engines itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_rlspec.cotrainer.speculation import AskEngines, DraftRule, ask_logged
from megatron_rlspec.integrations.slime.engines import SlimeEngine
from megatron_rlspec.push import contract
from megatron_rlspec.push.canary import Canary, canary_metrics
from megatron_rlspec.push.detectors import HealthSettings
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.types import Prompt, Sampling, SpecConfig

logger = logging.getLogger(__name__)


class SlimeDraftRule(DraftRule):
    """The rule of slime's engines. A run has one such object."""

    def __init__(
        self,
        learning: Learning,
        configs: Iterable[SpecConfig] = (),
        settings: HealthSettings | None = None,
    ) -> None:
        """`configs`: the configurations that the engines report they can run.

        A canary uses the one of these with most drafts, up to `settings.canary_steps`.
        """
        super().__init__(learning)
        settings = settings or HealthSettings()
        steps = [c.num_steps for c in configs if c.num_steps <= settings.canary_steps]
        # the configuration of canaries; with 0 drafts no canary runs
        self._chain = SpecConfig(max(steps, default=0))
        self._canary = Canary(settings)
        # URL -> version of the weights of the engine's latest canary
        self._canary_versions: dict[str, int] = {}

    def before_rollout(
        self, urls: Sequence[str], prediction: Prediction | None
    ) -> dict[str, float]:
        """Set every engine's rule, which follows from all earlier rollouts and from `prediction`.

        prediction  training's, of this rollout's acceptance (`state.read_prediction`); None: there is none

        Returns `predict/next_tokens_k*` and `health/unreachable_engines`.
        """
        metrics = _slime_names(self.learning.expect(prediction))
        answered = self._engines(urls)(self.set)
        return metrics | {"health/unreachable_engines": float(len(urls) - len(answered))}

    def canary(
        self, urls: Sequence[str], prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> dict[str, float]:
        """Generate a few tokens for each of `prompts` with a fixed chain, before a rollout under new weights.

        If an engine's accept length is below its floor (`HealthSettings`), its speculation is disabled until a later
        push. An engine answers at most one canary per version, and gets none while its speculation is disabled. Call it
        between `before_rollout` and the rollout: it sets the rule again. Returns `health/canary_*`; {} if no canary was
        due or none was answered.

        prompts   token ids
        sampling  of the rollouts
        """
        # `due`: later canaries may take a share of the run's time only (`HealthSettings.canary_share`)
        if not prompts or not self._chain.num_steps or not self._canary.due():
            return {}
        answered = self._engines(urls)(self._canary_version)
        versions = {url: version for url, version in answered.items() if version is not None}
        engines = {url: SlimeEngine(url) for url in versions}
        seconds_before = self._canary.seconds  # of all canaries so far
        results = self._canary.run(
            engines,
            versions,
            [Prompt(i, np.asarray(prompt)) for i, prompt in enumerate(prompts)],
            sampling,
            self._chain,
            self.learning.accept_length(self._chain),
        )
        # The canary has set its chain as the engines' configuration. The rollout needs the rule, after failures, too.
        ask_logged(engines, self.set)
        if all(result.error for result in results.values()):
            return {}
        failures = 0
        for url, result in results.items():
            if result.error:
                logger.warning("rlspec: no canary: %s", result.error)
                continue
            self._canary_versions[url] = versions[url]
            if result.findings:
                failures += 1
                reasons = "; ".join(contract.lines(result.findings))
                logger.error("rlspec: %s: no speculation until a later push: %s", url, reasons)
                contract.hold(engines[url], result.findings)
            else:
                self._canary.remember(url, result)
        metrics = canary_metrics(results.values(), self._canary.seconds - seconds_before)
        return metrics | {"health/canary_failures": float(failures)}

    def after_rollout(self, urls: Sequence[str], delivered: float = math.nan) -> dict[str, float]:
        """Gather every engine's rounds, and learn from all of them. `before_rollout` sets the rule that results.

        Returns `rollout/spec_*` and `predict/*`, the prediction compared with this rollout; {} without any round.

        delivered  tokens that a round delivered to a sample, on average; NaN: not known
        """
        rounds, reports = self.gather(self._engines(urls))
        if not any(of_engine for _, of_engine in rounds):
            return {}
        return _slime_names(self.observe(rounds, reports, delivered))

    def forget(self, urls: Sequence[str]) -> None:
        """Drop all rounds since the last rollout. An evaluation samples differently, so predictions are not for it."""
        self.gather(self._engines(urls))  # asking engines for their rounds also resets them

    def _engines(self, urls: Collection[str]) -> AskEngines:
        """Return a function that asks the engines at `urls` at once, and leaves out those that do not answer."""
        return partial(ask_logged, {url: SlimeEngine(url) for url in urls})

    def _canary_version(self, engine: Any) -> int | None:
        """Return the version of an engine's weights if a canary is to run for it; None if it ran, or must not run."""
        version = engine.version()
        if not version.isdigit():  # nothing was pushed yet: SGLang's own "default"
            return None
        if self._canary_versions.get(engine.url) == int(version) or engine.describe()["held"]:
            return None
        return int(version)


def _slime_names(values: Mapping[str, float]) -> dict[str, float]:
    """Rename `spec/x` of our own loop's records to `rollout/spec_x`, as slime names its metrics."""
    renamed = {}
    for name, value in values.items():
        if name.startswith("spec/"):
            name = "rollout/spec_" + name.removeprefix("spec/")
        renamed[name] = value
    return renamed

"""The engines of a run, on rank 0: pushes with their checks, restarts, and the rule that their rounds teach."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_rlspec import files
from megatron_rlspec.config import Config
from megatron_rlspec.cotrainer.speculation import DraftRule, Reports, Rounds
from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.push import contract
from megatron_rlspec.push.canary import CANARY_PROMPTS
from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.push.detectors import HealthSettings
from megatron_rlspec.push.health import Health
from megatron_rlspec.push.push import Pusher, Source
from megatron_rlspec.records.recorder import Recorder
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.restart import Restarts
from megatron_rlspec.rollout.start import StartingEngines
from megatron_rlspec.run.extension import Migration
from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.types import Prompt, Scope

Named = Mapping[str, RolloutEngine]


class RunDraftRule(DraftRule):
    """The rule or configuration of a run's engines.

    drafts  whether engines speculate
    chain   draft steps of a canary
    """

    def __init__(self, config: Config, learning: Learning) -> None:
        options = config.spec
        adaptive = options.mode == "adaptive"
        super().__init__(learning, None if adaptive else options.config())
        self.chain = options.num_steps or (max(options.candidate_steps) if adaptive else 0)
        self.drafts = options.mode != "off" and self.chain > 0
        self._rule_file = Path(config.train.run_dir) / "spec_rule.json"

    def learn(
        self, rounds: Rounds, reports: Reports, prediction: Prediction | None, delivered: float
    ) -> dict[str, float]:
        """Learn from the rounds and rule reports of a rollout, and take the trainer's `prediction` of the next one.

        The rounds also score the prediction of the step before. `delivered` is the tokens that a round delivered to a
        sample, on average. Writes the present rule to the run directory. Returns metrics.
        """
        metrics = self.observe(rounds, reports, delivered) | self.learning.expect(prediction)
        files.write(self._rule_file, json.dumps(self.learning.rule()))
        return metrics


class Engines:
    """Keeps the engines of a run at work: weights, speculation, restarts.

    pool    generates; it has the engines that serve, by name
    health  pushes to these engines, and checks them
    """

    def __init__(
        self,
        config: Config,
        named: Named,
        starting: StartingEngines,
        speculation: RunDraftRule,
        recorder: Recorder,
        *,
        drafter: frozenset[str] = frozenset(),
        canary: Sequence[Prompt] = (),
        migration: Migration | None = None,
    ) -> None:
        """Take over engines that have started.

        starting   starts lost engines again, at most `rollout.restarts` times
        drafter    names of the drafter's tensors
        canary     prompts, of which every engine answers the first ones after a push
        migration  an extension that moves running samples; None: samples stay where they began
        """
        rollout = config.rollout
        # A single engine in this process has a queue of its own. The round in which a sample begins then does not
        # depend on threads, nor does what unfinished samples have when a batch is full.
        alone = rollout.engine == "embedded"
        in_flight = 0 if alone else rollout.max_running_requests
        self.pool = EnginePool(named, in_flight, self.restart, continues=alone or config.keyed)
        self.health = Health(
            Pusher(self.pool.engines, frozen=() if config.drafter.train else drafter),
            drafter.__contains__,
            self.speculate if speculation.drafts else None,
            canary[:CANARY_PROMPTS],
            rollout.sampling,
            HealthSettings(speculation.chain),
            lambda record: recorder.event("health", contract.summary(record), **record),
        )
        self._starting = starting
        self._speculation = speculation
        self._recorder = recorder
        self._restarts = Restarts(starting.again, rollout.restarts)
        self._migration = migration
        # engine that has no event yet -> number of its restart
        self._restarting: dict[str, int] = {}
        self._restarted = 0  # engines, since the last `restarted`
        self._asleep = False

    def close(self) -> None:
        """End the engines, which ends a running rollout."""
        self._restarts.close()
        self._starting.close()

    # ---- speculation ------------------------------------------------------------------------------------------------

    def speculate(self, name: str, engine: RolloutEngine) -> None:
        """Set the run's speculation rule or configuration on an engine. Drops the engine if it does not answer."""
        try:
            self._speculation.set(engine)
        except EngineError as error:
            self.pool.drop(name, error)

    def rounds(self) -> tuple[Rounds, Reports]:
        """Return each engine's rounds since the last call, and the engines' reports of an adaptive rule."""
        rounds, reports = self._speculation.gather(self.pool.everywhere)
        if self._migration is not None:
            self._migration.observe(rounds)
        return rounds, reports

    # ---- weights ----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Let every engine release its memory. The next push wakes them, and sends them all tensors.

        Waits for engines that are starting, and adds them. Raises EngineError if no engine is left then.
        """
        if self._asleep:  # a warm start takes several steps before a push
            return
        if self._restarts.pending:
            # Engines that are starting would take the step's memory.
            self._restarts.settle()
            self.record_losses()
            self._add_restarted()
        self.pool.everywhere(lambda engine: engine.sleep())
        self._asleep = True

    def wake(self) -> None:
        """Let engines that sleep take their memory back."""
        if not self._asleep:
            return
        self._asleep = False  # before an engine may fail: one that replaces it is awake
        for name in self.pool.engines:
            self.health.pusher.forget(name)
        self.pool.everywhere(lambda engine: engine.wake())

    def push(
        self, version: int, source: Source, hot_tokens: np.ndarray | None, scope: Scope
    ) -> dict[str, float]:
        """Send the tensors of `source` to every engine and check the engines. Returns metrics.

        hot_tokens  the ids that drafts are chosen from, from now on; None: no change
        scope       "drafter" if the policy is as the engines have it. Engines that never got it are sent all tensors

        Raises HealthError if weights stay wrong, and EngineError if no engine is left and none can be restarted.
        """
        self.record_losses()
        self._add_restarted()
        if hot_tokens is not None:
            self.pool.everywhere(lambda engine: engine.set_draft_vocabulary(hot_tokens))
        try:
            report = self._speculation.push(self.health, version, source, scope)
        except HealthError:
            for name, engine in list(self.pool.engines.items()):
                if not engine.alive:
                    self.pool.drop(name, EngineError(f"{engine}: it ended during a push"))
            raise
        for name in report.verdict.engines("drop"):
            self.pool.drop(name, EngineError("its weights stayed wrong"))
        self.record_losses()
        return report.metrics()

    # ---- lost engines -----------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> bool:
        """Return whether no engine is left, but one is restarting."""
        return not self.pool.engines and self._restarts.pending

    def restarted(self) -> int:
        """Return how many engines were restarted since the last call."""
        number, self._restarted = self._restarted, 0
        return number

    def record_losses(self) -> None:
        """Write one event for each engine that the pool has dropped."""
        failures = self.pool.take_failures()
        remaining = len(self.pool.engines) + len(failures)
        for name, reason in failures.items():
            remaining -= 1
            message = f"{name}: left out, {remaining} remain: {reason}"
            number = self._restarting.pop(name, 0)
            if number:
                message += f"; restart {number} of {self._restarts.most} begins"
            self._recorder.event("engine", message, engine=name)

    def restart(self, name: str) -> None:
        """Restart an engine that the pool has dropped, if this run started it. The pool's `lost` calls this."""
        if name in self._starting.own:
            self._restarting[name] = self._restarts.lost(name)

    def _add_restarted(self) -> None:
        """Add restarted engines that answer. Waits for one if no other is left. Raises EngineError."""
        for name, engine in self._restarts.back(block=not self.pool.engines).items():
            if isinstance(engine, EngineError):
                self._recorder.event("engine", f"{name}: not started again: {engine}", engine=name)
                continue
            self.pool.add(name, engine)
            self.health.join(name)
            self._restarted += 1
            self._recorder.event(
                "engine", f"{name}: started again, {len(self.pool.engines)} serve", engine=name
            )
        if not self.pool.engines:
            raise EngineError("no engine is left, and none could be restarted")

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
    """The speculation rule or fixed configuration of a run's engines.

    speculates     whether engines speculate
    canary_drafts  drafts per round of a canary, if engines speculate; else of no meaning
    """

    def __init__(self, config: Config, learning: Learning) -> None:
        options = config.spec
        adaptive = options.mode == "adaptive"
        super().__init__(learning, None if adaptive else options.config())
        most_candidate = max(options.candidate_steps) if adaptive else 0
        # Under mode=adaptive num_steps may be 0: a canary that tests the drafter needs drafts.
        self.canary_drafts = options.num_steps or most_candidate
        self.speculates = options.mode != "off" and self.canary_drafts > 0
        self._rule_file = Path(config.train.run_dir) / "spec_rule.json"

    def learn(
        self, rounds: Rounds, reports: Reports, prediction: Prediction | None, delivered: float
    ) -> dict[str, float]:
        """Learn from the rounds and rule reports of a rollout, and take the trainer's `prediction` of the next one.

        The rounds also score the prediction of the step before. Writes the present rule to `run_dir/spec_rule.json`.
        Returns metrics. Call it once a rollout.

        delivered  tokens that a verify round delivered to a sample, on average; NaN: not known
        """
        # In this order: `observe` compares the rounds with the old prediction and drops it, `expect` sets the new one.
        metrics = self.observe(rounds, reports, delivered) | self.learning.expect(prediction)
        files.write(self._rule_file, json.dumps(self.learning.rule()))
        return metrics


class Engines:
    """Keeps the engines of a run at work: weights, speculation, restarts.

    pool    generates; it has the engines that serve, by name
    health  pushes to these engines, and checks them

    Any thread that sees an engine fail calls `restart`. The run's main thread calls the other methods, or during a
    rollout the thread that generates it (`Rollouts`).
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

        named      the engines by name
        starting   starts lost engines again, together at most `rollout.restarts` times
        drafter    Hugging Face names of the drafter's tensors
        canary     prompts, of which every engine answers the first `CANARY_PROMPTS` after a push
        migration  an extension that moves running samples; None: samples stay where they began
        """
        rollout = config.rollout
        # The embedded engine has a queue of its own, so it gets all requests at once (0: no limit). Then the round in
        # which a sample begins does not depend on threads, nor do the tokens that unfinished samples have when a batch
        # is full.
        embedded = rollout.engine == "embedded"
        max_in_flight = 0 if embedded else rollout.max_running_requests
        # Only keyed noise lets an SGLang engine continue a sample.
        can_continue = embedded or config.keyed
        self.pool = EnginePool(named, max_in_flight, self.restart, can_continue=can_continue)
        self.health = Health(
            # Without training the trainer has no drafter to send: its tensors count as frozen, and engines keep those
            # that they started with.
            Pusher(self.pool.engines, frozen=() if config.drafter.train else drafter),
            drafter.__contains__,  # whether a tensor of this name is the drafter's
            self.set_speculation if speculation.speculates else None,
            canary[:CANARY_PROMPTS],
            rollout.sampling,
            HealthSettings(speculation.canary_drafts),
            lambda record: recorder.event("health", contract.summary(record), **record),
        )
        self._starting = starting
        self._speculation = speculation
        self._recorder = recorder
        self._restarts = Restarts(starting.again, rollout.restarts)
        self._migration = migration
        # by lost engine, the number of its restart (0: none is left), until `record_losses` has written its event
        self._restarting: dict[str, int] = {}
        self._restarted = 0  # engines, since the last `take_restarted`
        self._asleep = False  # between `sleep` and `wake`

    def close(self) -> None:
        """End the engines that this run started, which ends a running rollout."""
        self._restarts.close()  # first: no engine may start any more
        self._starting.close()

    # ---- speculation ------------------------------------------------------------------------------------------------

    def set_speculation(self, name: str, engine: RolloutEngine) -> None:
        """Set the run's speculation rule or configuration on an engine. Drops the engine if it does not answer."""
        try:
            self._speculation.set(engine)
        except EngineError as error:
            self.pool.drop(name, error)

    def rounds(self) -> tuple[Rounds, Reports]:
        """Return each engine's rounds since the last call, and the reports of their rules. Engines forget both."""
        rounds, reports = self._speculation.gather(self.pool.call_all)
        if self._migration is not None:
            self._migration.observe(rounds)
        return rounds, reports

    # ---- weights ----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Let every engine release its memory. After `wake` the next push sends them all tensors.

        Waits for engines that are starting, and adds them. Raises EngineError if no engine is left then.
        """
        if self._asleep:  # a warm start takes several steps before a push
            return
        if self._restarts.pending:
            # Engines that are starting would take the step's memory, and cannot sleep before they answer.
            self._restarts.settle()
            self.record_losses()
            self._add_restarted()
        self.pool.call_all(lambda engine: engine.sleep())
        self._asleep = True

    def wake(self) -> None:
        """Let engines that sleep take their memory back. They have lost their weights: a push must follow."""
        if not self._asleep:
            return
        # Before a call that can fail: an engine that is started in place of a failed one is awake.
        self._asleep = False
        for name in list(self.pool.engines):
            self.health.pusher.forget(name)  # so that the next push sends it all tensors
        self.pool.call_all(lambda engine: engine.wake())

    def push(
        self, version: int, source: Source, hot_tokens: np.ndarray | None, scope: Scope
    ) -> dict[str, float]:
        """Send the tensors of `source` to every engine and check the engines. Returns metrics.

        hot_tokens  the ids that drafts are chosen from, from now on; None: no change
        scope       "drafter" if the policy has not changed since the last push, else "all". If an engine does not have
                    that policy, all engines are sent all tensors

        Raises HealthError if the weights of all engines stay wrong, EngineError if no engine is left, and PushError as
        `Pusher.push`. After an EngineError `awaited` says whether another call can help.
        """
        self.record_losses()
        self._add_restarted()  # before the weights, which these engines need, too
        # Before the weights, whose update renews the head over these tokens.
        if hot_tokens is not None:
            self.pool.call_all(lambda engine: engine.set_draft_vocabulary(hot_tokens))
        try:
            report = self._speculation.push(self.health, version, source, scope)
        except HealthError:
            # An engine that ended is dropped, which starts it again. `drop` raises EngineError for the last engine,
            # and then the run waits for the restart (`Rank0.attempt`). Otherwise the HealthError ends the run.
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
        """Return whether no engine is left, but one is starting again: then `push` waits for it."""
        return not self.pool.engines and self._restarts.pending

    def take_restarted(self) -> int:
        """Return how many engines were restarted since the last call, and begin to count anew."""
        number, self._restarted = self._restarted, 0
        return number

    def record_losses(self) -> None:
        """Write one event for each engine that the pool has dropped."""
        failures = self.pool.take_failures()
        # Each event says how many engines were left after that loss.
        remaining = len(self.pool.engines) + len(failures)
        for name, reason in failures.items():
            remaining -= 1
            message = f"{name}: left out, {remaining} remain: {reason}"
            number = self._restarting.pop(name, 0)
            if number:
                message += f"; restart {number} of {self._restarts.max_starts} begins"
            self._recorder.event("engine", message, engine=name)

    def restart(self, name: str) -> None:
        """Start an engine that the pool has dropped again, if this run had started it.

        The pool calls this, from any thread, once for each engine that it drops.
        """
        if name in self._starting.restartable:
            self._restarting[name] = self._restarts.lost(name)

    def _add_restarted(self) -> None:
        """Add restarted engines that answer. Waits for one if no other is left.

        Raises EngineError if then no engine is left. A push must follow: new engines have the weights of model.path.
        """
        for name, engine in self._restarts.take_restarted(block=not self.pool.engines).items():
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

"""Rank 0's part of a run: the rollout of each step, by engines, with rewards, and with the speculation they learn.

With `rollout.staleness` the next step's rollout runs in a thread while this step trains. The run waits for it before a
push (`settle`), so weights change only between rollouts, and the version that generates a sample does not depend on
timing.

    generation.py   prompts ──► requests ──► engines ──► samples ──► rewards ──► groups
    engines.py      pushes and their checks, lost and restarted engines; rounds of a rollout ──► the rule of the next
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rlspec.config import Config
from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.push.detectors import stamp_finding
from megatron_rlspec.records.recorder import Recorder
from megatron_rlspec.rollout.start import StartingEngines
from megatron_rlspec.run.engines import Engines, RunDraftRule
from megatron_rlspec.run.extension import Migration
from megatron_rlspec.run.generation import Generation
from megatron_rlspec.run.state_file import Drawn, State
from megatron_rlspec.run.summaries import rollout_metrics
from megatron_rlspec.speculation.acceptance import Prediction, accept_length, pooled
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.tasks.data import Prompts
from megatron_rlspec.tasks.rewards import Scorer
from megatron_rlspec.types import Group, Sample, samples_of


@dataclass(frozen=True)
class StartingRollouts:
    """The parts of `Rollouts` that exist before the trainer is built. Its reward workers are running.

    learning   follows acceptance and round times, and makes the engines' speculation rule
    engines    of the run; their `launch` starts processes in the background
    migration  an extension that moves running samples; None: they stay
    scorer     reward workers
    """

    learning: Learning
    engines: StartingEngines
    migration: Migration | None
    scorer: Scorer

    def close(self) -> None:
        """End engines and reward workers."""
        self.engines.close()
        self.scorer.close()


class Rollout(NamedTuple):
    """The rollout of a step.

    groups   scored
    seconds  to generate and score them; NaN if a checkpoint had them
    figures  numbers for the step's record, which become `rollout/NAME`. Read only: the default is one dict for all
    """

    groups: list[Group]
    seconds: float
    figures: dict[str, float] = {}


@dataclass(eq=False)
class Rollouts:
    """The rollouts of a run. `loading.build_rollouts` makes it on rank 0; call `start` first, and `close` last.

    The main thread calls the public methods (`session.py`). `_generate` runs there or in `_thread`.

    generation   generates and scores
    engines      pool, health, pushes, restarts
    speculation  learns from rollouts how to speculate
    prompts      of the training steps; None: only evaluations are generated
    migration    as in `StartingRollouts`
    newest       the rollout that `collect` returned last; before that one without groups
    _step        the step whose rollout runs, or ran last
    _ahead       the rollout that no `collect` has returned yet: running in `_thread`, ended, or from a checkpoint
    """

    generation: Generation
    engines: Engines
    speculation: RunDraftRule
    recorder: Recorder
    prompts: Prompts | None
    migration: Migration | None
    config: Config
    _step: int = 0
    _ahead: Future[Rollout] | None = None

    def __post_init__(self) -> None:
        self.newest = Rollout([], math.nan)
        self._thread = ThreadPoolExecutor(1, "rollout")

    def start(self, resumed: Mapping[str, Any], drawn: Drawn) -> None:
        """Continue from what `state` returned for a checkpoint (empty without one), and set the engines' rules.

        Call it once, before everything else, when the engines answer.
        """
        if self.migration is not None:
            self.migration.attach(self.engines.pool, self._record_moves)
        if drawn.ahead:
            ahead = Rollout(list(drawn.ahead), math.nan, dict(resumed.get("ahead", {})))
            self._ahead = Future()
            self._ahead.set_result(ahead)
        self.generation.start()
        if lost := self.speculation.learning.restore(resumed):
            self.recorder.event("resume", lost)
        self.generation.restore(drawn.begun)
        if self.config.drafter.fresh and not resumed:
            self.speculation.learning.start_without_acceptance()
        # Last: the rule is made of what was restored. A fixed configuration comes with the first push.
        if self.speculation.fixed is None:
            self.engines.pool.call_all(self.speculation.set)

    def close(self) -> None:
        """End engines and reward workers. Also after an error, while a rollout runs."""
        self.engines.close()  # first: it ends a running rollout, for which `_thread` would wait
        if self._ahead is not None and not self._ahead.done():
            # `engines.close` ends only engines that this run started. Others could go on with the rollout.
            self.engines.pool.close()
        self._thread.shutdown()  # waits for the rollout, which needs the reward workers until then
        self.generation.close()

    def state(self, replay: Sequence[Group]) -> State:
        """Return the state for a checkpoint, with the drafter's stored rollouts `replay`. `start` reads it.

        Waits for the rollout that runs ahead, and includes it: a resumed run could not generate it again, because it
        has the weights after the step, and this rollout has those before it. If that rollout failed, its error is
        raised here.
        """
        ahead = Rollout([], math.nan) if self._ahead is None else self._ahead.result()
        values = self.speculation.learning.state() | {"ahead": ahead.figures}
        return State(values, Drawn(ahead.groups, replay, self.generation.begun))

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Group]:
        """Return the scored groups of one step. With `rollout.staleness`, start the next step's rollout.

        Raises EngineError if no engine is left, HealthError for samples of a version that may not be trained on, and
        RewardError if all rewards of `train.max_bad_steps` steps in a row failed.
        """
        # Cleared before its result is read: if it failed, the next `collect` generates again.
        ahead, self._ahead = self._ahead, None
        self.newest = ahead.result() if ahead is not None else self._generate(step)
        groups = self.newest.groups
        current = step + 1  # the version that trains in this step
        options = self.config.rollout
        oldest = max(1, current - options.max_lag)
        samples = samples_of(groups)
        finding = stamp_finding(samples, oldest, current)
        if finding is not None:
            raise HealthError(finding.message)
        # Here, before the step trains: the engines hold the version that this step begins with.
        if options.staleness and step + 1 < self.config.train.steps:
            self.begin(step + 1)
        return groups

    def begin(self, step: int) -> None:
        """Start the rollout of a step in a thread, unless there is one already; `collect` waits for it.

        There is one if it runs or has ended, or if a checkpoint had it. `step` must be that of the next `collect`.
        """
        if self._ahead is None:
            self._ahead = self._thread.submit(self._generate, step)

    def settle(self) -> None:
        """Wait for the rollout that runs ahead. If it failed, raises its error; the next `collect` generates anew."""
        if self._ahead is not None and self._ahead.exception() is not None:  # `exception` waits
            # Cleared: else the next `collect` would raise the error again.
            failed, self._ahead = self._ahead, None
            failed.result()  # raises

    def _generate(self, step: int) -> Rollout:
        """Generate and score the rollout of a step. After an error the order of prompts is as before the call.

        So a second try, or a checkpoint after the error, takes the same prompts.
        """
        self._step = step
        prompts = self.prompts
        assert prompts is not None, "without prompts only evaluations are generated"
        order = prompts.order.state()
        began = time.perf_counter()
        pool = self.engines.pool
        continued_before = pool.continued_tokens
        figures = {"reward_seconds_waited": 0.0}
        try:
            groups = self.generation.rollout(step, prompts, figures)
        except BaseException:
            prompts.order.restore(order)
            raise
        # `rollout` has counted the tokens that partial rollouts continued. Add those of samples that went on when
        # their engine was lost.
        figures["continued_tokens"] += pool.continued_tokens - continued_before
        return Rollout(groups, time.perf_counter() - began, figures)

    def _record_moves(self, record: Mapping[str, Any]) -> None:
        self.recorder.moves(self._step, record)

    def step_metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return `rollout/*` of the newest rollout, whose samples are given, and `engine/restarts` since the last call.

        Call it once in a step. `samples` are those of `collect`, at least one.

        `records/metric_names.toml` lists the names.
        """
        values = rollout_metrics(samples)
        # NaN if `seconds` is
        values["tokens_per_second"] = values["response_tokens"] / self.newest.seconds
        values |= self.newest.figures
        metrics = {f"rollout/{name}": value for name, value in values.items()}
        metrics["engine/restarts"] = float(self.engines.take_restarted())
        return metrics

    # ---- weights and speculation ------------------------------------------------------------------------------------

    def adapt(self, prediction: Prediction | None) -> dict[str, float]:
        """Learn from the rounds of the last rollout. Returns metrics.

        Call it once in a step, because engines forget what was read, and before the push: otherwise the rounds of the
        canary, under another configuration, would be among those of the rollout.

        prediction  the trainer's, of the next rollout's acceptance
        """
        rounds, reports = self.engines.rounds()
        # The engines' rounds are those of the rollout that ended last: with staleness the one ahead.
        rollout = self.newest if self._ahead is None else self._ahead.result()
        samples = samples_of(rollout.groups)
        delivered = accept_length(pooled(sample.accepted for sample in samples))
        return self.speculation.learn(rounds, reports, prediction, delivered)

"""Rank 0's part of a run: engines, rewards, and the learning of speculation from rollouts.

Sampling seeds are made from (run seed, step, place in the step), so a resumed run draws the same samples as an
uninterrupted one, and a prompt that comes twice in a step gets other samples the second time. With `rollout.staleness`
the next step's rollout runs in a thread while this step trains. Weights change only between rollouts, so the version
that draws a sample does not depend on timing.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_rlspec import custom, files, texts
from megatron_rlspec.config import Config
from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.extensions.migration.builders import MigratableEngines, rebalancer, sizes_planner
from megatron_rlspec.extensions.migration.plans.tp_planner import SwitchCosts
from megatron_rlspec.extensions.migration.wiring import Tail
from megatron_rlspec.losses import grpo
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.names import name_table
from megatron_rlspec.records.metrics import Recorder
from megatron_rlspec.rollout.conversation import Conversations
from megatron_rlspec.rollout.open import Kind, learning
from megatron_rlspec.rollout.partial import Drawing, mask_continued
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.restart import Restarts
from megatron_rlspec.run.checkpoints import Drawn
from megatron_rlspec.speculation.acceptance import Prediction, accept_length, pooled
from megatron_rlspec.sync import contract
from megatron_rlspec.sync.contract import HealthError
from megatron_rlspec.sync.detectors import HealthSettings, stamp_finding
from megatron_rlspec.sync.health import Health
from megatron_rlspec.sync.push import Pusher, Source
from megatron_rlspec.tasks import data, rewards
from megatron_rlspec.types import (
    Group,
    OpenGroup,
    Prompt,
    Request,
    RoundStats,
    Sample,
    Sampling,
    Scope,
    SpecConfig,
    SpecSchedule,
)

SHOWN = 40  # characters of a text's begin, and of its end, in an event
Failures = list[str]  # one line per sample without a reward


class _Rollout(NamedTuple):
    groups: list[Group]
    seconds: float
    counts: dict[str, float] = {}


EVALUATION = 1 << 30  # replaces the step number in the seeds of evaluations, so all evaluations use the same seeds


class RolloutCancelledError(RuntimeError):
    """A signal ended the run during a rollout. The order of prompts is as before the rollout."""


class StartingRollouts:
    """The parts of `Rollouts` that exist before the trainer is built. The constructor starts reward workers, and
    `launch` engines.

    held_out    prompts of evaluations; empty without `data.eval_path`
    learning    the learning of speculation
    planner     decides on moves of running samples between engines; None: none move
    scorer      reward workers
    starting    engines
    """

    def __init__(
        self,
        config: Config,
        hf_config: Mapping[str, Any],
        tokenizer: Any,
        run_dir: Path,
        kind: Kind,
        layout: GpuLayout | None = None,
    ) -> None:
        """`kind`: of the engines. Raises DataError, CostTableError and ConfigError before any engine starts."""
        self.config = config
        self.hf_config = hf_config
        self.tokenizer = tokenizer
        self.run_dir = run_dir
        path = config.data.eval_path
        self.held_out = data.Prompts(path, tokenizer, config).rows if path else []
        self.learning = learning(config, hf_config)
        self.planner = rebalancer(config, hf_config)
        ranks = config.rollout.engines * config.placement.tensor
        self.sizes = sizes_planner(config, SwitchCosts(0.0), ranks) if config.second else None
        self.scorer = rewards.Scorer(config.reward)
        self.starting = kind.start(config, run_dir, layout or GpuLayout())

    def launch(self) -> None:
        """Start the engines in the background."""
        self.starting.launch()

    def wait(self) -> Mapping[str, RolloutEngine]:
        """Wait until every engine answers and return the engines by name. Raises EngineError."""
        return self.starting.wait()

    def close(self) -> None:
        """End engines and reward workers."""
        self.starting.close()
        self.scorer.close()


class Rollouts:
    """Draws and scores samples, pushes weights, and learns how to speculate. Rank 0 holds it; end it with `close`."""

    def __init__(
        self,
        started: StartingRollouts,
        engines: Mapping[str, RolloutEngine],
        recorder: Recorder,
        prompts: data.Prompts | None,
        resumed: Mapping[str, Any],
        drawn: Drawn,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Set up the engines.

        engines             the result of `started.wait()`
        prompts             the prompts of `collect`; None: only evaluations are drawn
        resumed, drawn      what `state`, `pending` and `begun` were at a checkpoint; empty for a new run
        cancelled           when it is set, rollouts end with RolloutCancelledError

        Raises EngineError if no engine is left.
        """
        config = started.config
        self.config = config
        self.tokenizer = started.tokenizer
        self.run_dir = started.run_dir
        self.held_out = started.held_out
        self.learning = started.learning
        self.scorer = started.scorer
        self.starting = started.starting
        self.recorder = recorder
        self.prompts = prompts
        self.cancelled = cancelled or threading.Event()
        rollout = config.rollout
        self.sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens)
        self.seconds = math.nan  # of the newest rollout, rewards included
        self.counts: dict[str, float] = {}  # of the newest rollout
        self.begun = list(drawn.begun)  # groups that go on in the next rollout
        # tokens and number of the responses to a prompt: they decide which requests engines get first
        self._lengths: dict[int, tuple[int, int]] = {row: (t, n) for row, t, n in resumed.get("lengths", ())}
        self.rounds: list[RoundStats] = []  # of the newest rollout, as `adapt` read them
        self.failed_steps = rewards.FailedSteps(config.reward.max_failed_steps)
        self._drawing: Collection[str] = ()  # ids of the running requests
        self._closed = threading.Event()
        self.thread = ThreadPoolExecutor(1, "rollout")
        self.ahead: Future[_Rollout] | None = None
        if drawn.ahead:
            self.ahead = Future()
            self.ahead.set_result(_Rollout(list(drawn.ahead), math.nan, dict(resumed.get("ahead", {}))))
        self.restarts = Restarts(self.starting.again, rollout.restarts)
        self.asleep = False
        self.restarted = 0  # engines that were restarted since the last record
        self._begun: dict[str, int] = {}  # engine that is restarting, without an event yet -> number of the restart
        # A single engine in this process has a queue of its own. The round in which a sample begins then does not
        # depend on threads, nor does what unfinished samples have when a batch is full.
        alone = rollout.engine == "embedded"
        in_flight = rollout.in_flight or (0 if alone else rollout.max_running_requests)
        continues = rollout.engine == "embedded" or config.spec.verifier == "position_keyed"
        self.engines = EnginePool(engines, in_flight, self._start_again, continues, self.starting.spare)
        self._rolling = 0  # the step whose rollout runs
        self.conversations = None
        if rollout.function:
            function = custom.load("rollout.function", rollout.function)
            self.conversations = Conversations(function, self.engines, self.tokenizer, rollout.function_seconds)
        self.health = self._health(_drafter_names(config, started.hf_config))
        turns = None
        sizes: Mapping[str, int] = {}
        if isinstance(self.starting, MigratableEngines):
            turns = self.starting.turns(started.sizes, self.engines, self.health)
            sizes = self.starting.sizes
        self.tail = Tail(config, started.planner, self.engines, sizes, self._record_moves, turns)
        threading.Thread(target=self._abort_when_cancelled, name="cancel", daemon=True).start()
        if lost := self.learning.restore(resumed):
            recorder.event("resume", lost)
        if self.begun and not rollout.partial:
            recorder.event("resume", f"rollout.partial=false: {len(self.begun)} begun groups are not gone on with")
            self.begun = []
        if config.spec.mode == "adaptive":
            self.engines.everywhere(lambda engine: engine.set_spec_rule(self.learning.rule()))

    def _health(self, drafter_names: Collection[str]) -> Health:
        options = self.config.health
        spec = self.config.spec
        chain = spec.num_steps or max(spec.candidate_steps)
        rows = self.held_out or (self.prompts.rows if self.prompts else [])
        return Health(
            Pusher(self.engines.engines, frozen=() if self.config.drafter.train else drafter_names),
            drafter_names.__contains__,
            self._speculate if spec.mode != "off" and chain else None,
            rows[: options.canary_prompts],
            self.sampling,
            HealthSettings(options.on_failure, chain),
            lambda record: self.recorder.event("health", contract.summary(record), **record),
        )

    def _speculate(self, name: str, engine: RolloutEngine) -> None:
        """Set the run's speculation rule or schedule on an engine. Drops the engine if it does not answer."""
        try:
            if self.config.spec.mode == "adaptive":
                engine.set_spec_rule(self.learning.rule())
            else:
                engine.set_schedule(SpecSchedule.fixed(self.config.spec.config()))
        except EngineError as error:
            self.engines.drop(name, error)

    def close(self) -> None:
        """End engines and reward workers. Engines come first, which ends a running rollout."""
        self._closed.set()
        self.restarts.close()
        self.starting.close()
        if self.ahead is not None and not self.ahead.done():
            self.engines.close()
        self.thread.shutdown()
        self.scorer.close()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON, without the groups of `pending` and `begun`."""
        ahead = self.ahead.result().counts if self.ahead is not None else {}
        lengths = [(row, tokens, number) for row, (tokens, number) in self._lengths.items()]
        return self.learning.state() | {"ahead": ahead, "lengths": lengths}

    def pending(self) -> list[Group]:
        """Return the rollout that was drawn ahead. A checkpoint keeps it, because a resumed run lacks its weights."""
        return self.ahead.result().groups if self.ahead is not None else []

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Group]:
        """Return the scored groups of one step. With `rollout.staleness`, start drawing the next step's.

        Raises EngineError if no engine is left, HealthError for samples of a version that may not be trained on, and
        RewardsFailedError if all rewards of `reward.max_failed_steps` steps in a row failed.
        """
        ahead = self.ahead
        self.ahead = None
        groups, self.seconds, self.counts = ahead.result() if ahead is not None else self._draw(step)
        newest = step + 1
        oldest = max(1, newest - self.config.rollout.oldest)
        finding = stamp_finding([s for g in groups for s in g.samples], oldest, newest)
        if finding is not None:
            raise HealthError(finding.message)
        if self.config.rollout.staleness and step + 1 < self.config.train.steps:
            self.ahead = self.thread.submit(self._draw, step + 1)
        return groups

    def begin(self, step: int) -> None:
        """Start to draw the rollout of a step in a thread; `collect` waits for it."""
        if self.ahead is None:
            self.ahead = self.thread.submit(self._draw, step)

    def settle(self) -> None:
        """Wait for the rollout that runs ahead. Raises its error, as `collect`; the next `collect` then draws again."""
        if self.ahead is not None and self.ahead.exception() is not None:
            failed = self.ahead
            self.ahead = None
            failed.result()

    def _draw(self, step: int) -> _Rollout:
        """Return scored groups and the seconds they took. On failure the order of prompts is restored."""
        self._rolling = step
        prompts = self.prompts
        assert prompts is not None, "without prompts only evaluations are drawn"
        order = prompts.state()
        began = time.perf_counter()
        before = self.tail.counts()
        counts = {"reward_seconds_hidden": 0.0, "reward_seconds_waited": 0.0}
        try:
            groups = self._fill(step, prompts, counts)
        except BaseException:
            prompts.restore(order)
            raise
        for name, count in self.tail.counts().items():
            counts[name] = counts.get(name, 0.0) + count - before[name]
        return _Rollout(groups, time.perf_counter() - began, counts)

    def _fill(self, step: int, source: data.Prompts, counts: dict[str, float]) -> list[Group]:
        """Draw prompts until `rollout.prompts_per_step` groups are kept; dynamic sampling drops groups.

        With `rollout.partial` more groups are begun, and those that are not kept go on in the next rollout. Adds to
        `counts`.
        """
        options = self.config.rollout
        keep_all = not self.config.algorithm.dynamic_sampling
        drawing = Drawing(
            self.begun, options.prompts_per_step, step + 2 - options.oldest, lambda g: keep_all or _has_signal(g)
        )
        failures: Failures = []
        drawn = places = 0
        begun = [r.partial for group in self.begun for r in group.requests if r.partial is not None]
        counts["continued_tokens"] = float(sum(len(partial.response) for partial in begun))
        while True:
            # One prompt at least, so that every rollout draws.
            missing = max(options.begun_prompts - len(drawing.groups), 0 if drawing.requests() else 1)
            prompts = source.take(missing, [group.requests[0].prompt for group in drawing.groups])
            drawing.begin(self._requests(f"t{step:06d}", prompts, options.samples_per_prompt, step, places))
            places += len(prompts)
            ended, failed = self._generate(drawing, counts)
            failures += failed
            drawn += ended
            # Every refill counts as a step. Otherwise dynamic sampling without any reward would refill for ever.
            self.failed_steps.observe(f"step {step}", ended, failed)
            drawing.drop_unusable()
            if drawing.full:
                break
        kept, self.begun = drawing.batch()
        if options.partial:
            counts["over_drawn"] = float(sum(len(group.requests) for group in self.begun))
        if options.mask_offpolicy:
            mask_continued([sample for group in kept for sample in group.samples])
        self._learn_lengths(kept)
        self._record_failures(f"step {step}", drawn, failures)
        known = rewards.known([sample for group in kept for sample in group.samples])
        reward = float(np.mean(known)) if known else -math.inf
        if source.raise_level(reward):
            self._lengths.clear()  # ids name other prompts now
            self.recorder.event(
                "curriculum", f"step {step}: mean reward {reward:.3f}, level {source.level} from here on"
            )
        return kept

    def _learn_lengths(self, groups: Sequence[Group]) -> None:
        for group in groups:
            tokens, number = self._lengths.get(group.prompt.id, (0, 0))
            tokens += sum(len(sample.response) for sample in group.samples)
            self._lengths[group.prompt.id] = (tokens, number + len(group.samples))

    def _record_failures(self, name: str, samples: int, failures: Failures) -> None:
        if failures:
            message = f"{name}: {len(failures)} of {samples} rewards failed; the first: {failures[0]}"
            self.recorder.event("reward", message, failed=len(failures), samples=samples)

    def _requests(
        self, name: str, prompts: Sequence[Prompt], samples: int, salt: int, places: int = 0
    ) -> list[OpenGroup]:
        """Return `samples` requests for each prompt.

        Request ids have a fixed width, because no id may be a prefix of another. `salt` makes the seeds of one step, in
        which `places` prompts have begun before.
        """
        groups = []
        for place, prompt in enumerate(prompts, places):
            seeds = [_seed(self.config.train.seed, salt, place, i) for i in range(samples)]
            groups.append(
                OpenGroup([Request(f"{name}-p{place:07d}-n{i:07d}", prompt, seed) for i, seed in enumerate(seeds)])
            )
        return groups

    def _generate(self, drawing: Drawing, counts: dict[str, float] | None = None) -> tuple[int, Failures]:
        """Draw and score what has not ended until the batch is full.

        Returns the number of samples that ended, and one line per failed reward. `counts` is given for training.
        """
        scoring = rewards.Scoring(self.scorer)
        predicted = {} if counts is None else {name: tokens / n for name, (tokens, n) in self._lengths.items()}
        try:
            drawn = self._answer(drawing.requests(), lambda sample: self._ended(sample, drawing, scoring), predicted)
            ended = [sample for sample in drawn if sample.status != "aborted"]
            for sample in ended:
                sample.text = self.decode(sample.response)
            failures = scoring.finish([sample for sample in ended if "own_reward" not in sample.metadata])
        except BaseException:
            scoring.cancel()
            raise
        self._check_cancelled()
        for sample in ended:
            drawing.add(sample)
        if self.engines.continues:
            drawing.keep(sample for sample in drawn if sample.status == "aborted")
        if counts is not None:
            counts["reward_seconds_hidden"] += scoring.hidden
            counts["reward_seconds_waited"] += scoring.waited
        return len(ended), failures

    def _ended(self, sample: Sample, drawing: Drawing, scoring: rewards.Scoring) -> None:
        """Begin to compute the reward of a sample that has just ended. A full batch aborts the others."""
        if sample.status == "aborted":
            return

        def add(scored: object) -> None:
            if drawing.add(sample) and (left := [request.id for request in drawing.requests()]):
                self.engines.abort(left)

        sample.text = self.decode(sample.response)
        if "own_reward" in sample.metadata:
            add(sample)
        elif self.config.algorithm.dynamic_sampling:  # whether a group counts depends on its rewards
            scoring.add(sample).add_done_callback(lambda future: None if future.cancelled() else add(future))
        else:
            scoring.add(sample)
            add(sample)

    def _answer(
        self, requests: Sequence[Request], ended: Callable[[Sample], None], predicted: Mapping[int, float]
    ) -> list[Sample]:
        """Draw one sample per request, in one reply each or by the user's function. `ended` is called with each."""
        self._check_cancelled()
        try:
            if self.conversations is None:
                self._drawing = [request.id for request in requests]
                drawn = self.engines.generate(requests, self.sampling, ended, predicted)
            else:
                self._drawing = self.conversations.running
                drawn = self.conversations.draw(requests, self.sampling, ended)
        finally:
            self._drawing = ()
        self._check_cancelled()
        self._record_losses()
        return drawn

    def _record_moves(self, record: Mapping[str, Any]) -> None:
        self.recorder.moves(self._rolling, record)

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise RolloutCancelledError("a signal ended the run")

    def _abort_when_cancelled(self) -> None:
        """Abort the requests of a cancelled rollout every 0.2 s, because some may not have reached their engine yet."""
        while not self._closed.wait(0.2):
            if self.cancelled.is_set():
                self.scorer.interrupt()
                if self._drawing:
                    self.engines.abort(list(self._drawing))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def evaluate(self, name: str, prompts: int | None = None) -> dict[str, float]:
        """Draw one response to each of the first held-out prompts, always with the same seeds. {} without prompts."""
        if not self.held_out:
            return {}
        chosen = self.held_out[: prompts or self.config.train.eval_prompts]
        drawing = Drawing(self._requests(f"e-{name}", chosen, 1, EVALUATION), len(chosen), math.inf)
        _, failures = self._generate(drawing)
        samples = [group.samples[0] for group in drawing.batch()[0]]
        self._record_failures(f"evaluation {name}", len(samples), failures)
        result = rollout_metrics(samples) | {"prompts": float(len(samples))}
        self.recorder.event(
            "evaluation",
            f"{name}: reward {result.get('reward', math.nan):.3f} on {len(samples)} held-out prompts, "
            f"accept length {result['accept_length']:.2f}",
            name=name,
            **result,
        )
        return result

    def step_metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return `rollout/*` of the samples of the newest rollout, and the engines that were restarted since."""
        found = rollout_metrics(samples)
        found["tokens_per_second"] = found["response_tokens"] / self.seconds
        found |= self.counts
        restarted, self.restarted = self.restarted, 0
        return {f"rollout/{name}": value for name, value in found.items()} | {"engine/restarts": float(restarted)}

    # ---- weights and speculation ------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Let every engine release its memory. The next push wakes them, and sends them all tensors."""
        if not self.asleep:  # a warm start takes several steps before a push
            self.engines.everywhere(lambda engine: engine.sleep())
            self.asleep = True

    def wake(self) -> None:
        """Let engines that sleep take their memory back."""
        if self.asleep:
            self.asleep = False  # before an engine may fail: one that replaces it is awake
            for name in self.engines.engines:
                self.health.pusher.forget(name)
            self.engines.everywhere(lambda engine: engine.wake())

    def push(
        self, version: int, source: Source, words: np.ndarray | None = None, scope: Scope = "all"
    ) -> dict[str, float]:
        """Send the tensors of `source` to every engine and check the engines. Returns metrics.

        scope  "drafter" if the policy is as the engines have it. Engines that never got it are sent all tensors
        words  the ids that drafts are chosen from, from now on; None: no change

        Raises HealthError if weights stay wrong, and EngineError if no engine is left and none can be restarted.
        """
        self._record_losses()
        self._add_restarted()
        if words is not None:
            self.engines.everywhere(lambda engine: engine.set_draft_vocabulary(words))
        try:
            copied = self.tail.copied(version, source, words)
            report = self.health.push(version, copied, scope, predicted=self._expected_of_canary())
        except HealthError:
            for name, engine in list(self.engines.engines.items()):
                if not engine.alive:
                    self.engines.drop(name, EngineError(f"{engine}: it ended during a push"))
            raise
        for name in set(report.pushes[0].engines) - set(report.serving):
            self.engines.drop(name, EngineError("its weights stayed wrong"))
        if self.learning.renews:
            for name in self.engines.engines.keys() & (set(report.serving) - set(report.plain)):
                self._speculate(name, self.engines.engines[name])
        self.engines.stats()  # drop the canary's rounds, which are not part of a rollout
        self._record_losses()
        return report.metrics()

    def _expected_of_canary(self) -> float | None:
        """Return the accept length that the trainer predicted, else the one that engines observed, else None."""
        return self.learning.accept_length(SpecConfig(self.health.settings.canary_steps))

    def _record_losses(self) -> None:
        """Write one event for each engine that the pool has dropped."""
        failures = self.engines.take_failures()
        remaining = len(self.engines.engines) + len(failures)
        for name, reason in failures.items():
            remaining -= 1
            again = self._begun.pop(name, 0)
            restart = f"; restart {again} of {self.restarts.most} begins" if again else ""
            self.recorder.event("engine", f"{name}: left out, {remaining} remain: {reason}{restart}", engine=name)

    def _start_again(self, name: str) -> None:
        """Restart an engine that the pool has dropped, if this run started it."""
        if self.tail.turns:
            self.tail.turns.lost(name)
        if name in self.starting.own:
            self._begun[name] = self.restarts.lost(name)

    @property
    def awaited(self) -> bool:
        """Return whether no engine is left, but one is restarting."""
        return not self.engines.engines and self.restarts.pending

    def _add_restarted(self) -> None:
        """Add restarted engines that answer. Waits for one if no other is left. Raises EngineError."""
        for name, engine in self.restarts.back(block=not self.engines.engines).items():
            if isinstance(engine, EngineError):
                self.recorder.event("engine", f"{name}: not started again: {engine}", engine=name)
                continue
            self.engines.add(name, engine, spare=name in self.starting.spare)
            self.health.join(name)
            if self.tail.turns:
                self.tail.turns.replace(name, engine)
            self.restarted += 1
            self.recorder.event("engine", f"{name}: started again, {len(self.engines.engines)} serve", engine=name)
        if not self.engines.engines:
            raise EngineError("no engine is left, and none could be restarted")

    def adapt(self, prediction: Prediction | None) -> dict[str, float]:
        """Learn from the rounds of the last rollout, and run the drift tests. Returns metrics.

        `prediction` is the trainer's, of the next rollout's acceptance. The rounds also score the prediction of the
        step before. Call this before the push, because the canary runs under another configuration.
        """
        adaptive = self.config.spec.mode == "adaptive"
        reports = list(self.engines.everywhere(lambda engine: engine.spec_rule_report()).values()) if adaptive else []
        expected = self.learning.accept_lengths()
        seen: list[RoundStats] = []
        rounds, more = self.tail.rounds()
        reports += more
        for name, stats in rounds:
            seen += stats
            if name not in self.engines.engines:  # of a fleet that sleeps again
                continue
            if finding := self.health.watch(name, stats, expected):
                message = f"{name}: no speculation until the next push: {finding.message}"
                self.recorder.event("health", message, engine=name, found=[finding.detector])
        self.rounds = seen
        found = self.learning.observe(seen, reports) | self.learning.expect(prediction)
        files.write(self.run_dir / "spec_rule.json", json.dumps(self.learning.rule()))
        return found


def _drafter_names(config: Config, hf_config: Mapping[str, Any]) -> frozenset[str]:
    """Return the Hugging Face names of the drafter's tensors."""
    layers = 1 if config.drafter.repeated_layer else config.drafter.depth
    layers = 0 if DRAFTER in hf_config else layers
    return frozenset(name_table({**hf_config, "num_nextn_predict_layers": layers}).drafter_names)


def _has_signal(group: Group) -> bool:
    known = [not rewards.failed(sample) for sample in group.samples]
    return grpo.has_signal([sample.reward for sample in group.samples], known=known)


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Summarise reward, length and speculation of samples. The accept length is a ratio of sums over all rounds.

    A reward that failed enters no mean. If all did, there is no `reward`.
    """
    lengths = [len(s.response) for s in samples]
    known = rewards.known(samples)
    return {
        "samples": float(len(samples)),
        **({"reward": float(np.mean(known)), "reward_std": float(np.std(known))} if known else {}),
        "failed_rewards": float(sum(rewards.failed(s) for s in samples)),
        "accept_length": accept_length(pooled(s.accepted for s in samples)),
        "response_tokens": float(sum(lengths)),
        "response_length": float(np.mean(lengths)),
        "median_response": float(np.median(lengths)),
        "p90_response": float(np.percentile(lengths, 90)),
        "longest_response": float(max(lengths)),
        "truncated": float(np.mean([s.status == "truncated" for s in samples])),
        **reward_by_length(samples),
    }


def without_advantage(samples: Sequence[Sample]) -> str:
    """Say that no group of a step has an advantage. The example is the first of its samples whose reward is known."""
    one = next(sample for sample in samples if not rewards.failed(sample))
    return (
        "no group has an advantage, as if all its samples were equally good, so the policy learns nothing. An example: "
        f"prompt {_ends(one.prompt.text)}, response {_ends(one.text)}, label {_ends(one.prompt.label)}, "
        f"reward {one.reward:g}"
    )


def _ends(text: str) -> str:
    """Return begin and end of a text, quoted."""
    return texts.shown(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}...{text[-SHOWN:]}")


def reward_by_length(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean reward of each quarter of the samples, from the shortest responses to the longest."""
    by_length = sorted(samples, key=lambda sample: len(sample.response))
    found = {}
    for quarter in range(4 if len(samples) >= 4 else 0):
        part = by_length[quarter * len(samples) // 4 : (quarter + 1) * len(samples) // 4]
        if known := rewards.known(part):
            found[f"reward_quarter_{quarter + 1}"] = float(np.mean(known))
    return found


def _seed(*parts: int) -> int:
    """Return a sampling seed below 2³¹, made from non-negative integers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) & 0x7FFF_FFFF

"""The steps of a run, which `loop.py` calls in order on every rank.

            rank 0                                          every rank
    prompts ──► engines generate, rewards score ──► groups, broadcast as MessagePack
                   ▲          │                          │
                   │          │ rounds, acceptance       ├──► micro-batches: advantages, packing     (batches.py)
                   │          ▼                          ├──► what the drafter learns from   (drafter_training.py)
                   │   speculation's rule                ▼
                   │          │                   optimizer steps of policy, and of drafter          (train/step.py)
                   │          ▼                          │
                   └── push: weights of both, checked ◄──┤
                                                         └──► record, checkpoint, evaluation

Every rank holds the trainer and the data. Only rank 0 has engines and rewards (rollouts.py) and writes records; the
other ranks wait meanwhile (rank0.py). With embedded engines on several ranks they generate, too, in a thread.

All ranks call the same public methods in the same order, because most of them are collective. A step calls each of
them at most once, in the order of `loop.py`:

    push                 before the first `collect`, and after each `train_step`: engines generate with the weights of
                         the last push
    pack                 before `train_step`; takes at least one group, the same on every rank. A second call in a step
                         would count the tokens for the draft vocabulary again (`Drafting.observe`), and a schedule of
                         the drafter would store the rollouts again
    settle               before `adapt` and `push`: weights and rule must not change during a rollout
    adapt                before `push`, which sets the new rule; else the canary's rounds would be among those of the
                         rollout. Engines forget what was read
    record               after `train_step`, with its metrics; before `checkpoint`, which stops the run by the number of
                         bad steps that `record` has counted
    evaluate_warm_start  in a warm start, after each step; each call that measures adds to the measurements
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_rlspec.config import Command, Config
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.host import ranks
from megatron_rlspec.host.interruption import Interruption
from megatron_rlspec.push.push import exporting
from megatron_rlspec.records.clock import Clock
from megatron_rlspec.run.batches import advantages, micro_batches, mini_batches
from megatron_rlspec.run.checkpoints import Saver
from megatron_rlspec.run.drafter_training import Drafting
from megatron_rlspec.run.evaluation import Evaluation
from megatron_rlspec.run.extension import Extensions
from megatron_rlspec.run.loading import (
    build_rollouts,
    build_trainer,
    load,
    start_rollouts,
)
from megatron_rlspec.run.rank0 import Rank0
from megatron_rlspec.run.recording import Records
from megatron_rlspec.run.result import keep_best, write_result
from megatron_rlspec.run.rollouts import Rollouts, StartingRollouts
from megatron_rlspec.run.state_file import Drawn, State
from megatron_rlspec.run.trajectory import TrajectoryRecording
from megatron_rlspec.train import runtime
from megatron_rlspec.train.checkpoint import SaveError
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.train.updates import train_rollout
from megatron_rlspec.types import Group, PackedBatch, Scope, samples_of

# samples of a step on which `Reference.drift` compares the policy with model.path
DRIFT_SAMPLES = 16


class RunStopped(RuntimeError):
    """The run ended early. The message is one line: the reason, and the path of the checkpoint or why there is none."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Session:
    """A run, as a context manager. Its exit ends the engines and closes the records, also after an error.

    done        steps trained so far; the version of the present parameters, in samples and pushes, is done + 1
    generates   whether the run has engines
    loaded      model, tokenizer, data, and the recorded run of a replay
    trainer     policy and drafter on this rank
    drafting    what the drafter learns from, and when
    rank0       guards calls to engines
    rollouts    engines and rewards; None on ranks above 0, and in runs without engines
    records     metrics, events and texts
    recording   the trajectory, with `train.record_gib`
    evaluation  held-out prompts and answers
    saver       checkpoints

    Raises ConfigError, DataError or CheckpointError, before it writes a record, if the run cannot work, and EngineError
    if its engines do not start. Engines that were launched by then have written logs.
    """

    def __init__(
        self,
        config: Config,
        command: Command = "train",
        interruption: Interruption | None = None,
        extensions: Extensions | None = None,
    ) -> None:
        """Open the run of a command."""
        self.config = config
        self.supervised = command == "sft"  # a warm start, which trains on demonstrations
        self.interruption = interruption or Interruption()
        self.clock = Clock()
        # By the launcher's variable: torch.distributed is initialised later, by the trainer.
        self.is_rank0 = os.environ.get("RANK", "0") == "0"
        self.done = 0
        self.generates = config.generates(command)
        # metrics and rollouts of the newest step: `_stop` records them if the run ends before `record`
        self._newest: tuple[Mapping[str, float], Sequence[Group]] = ({}, ())
        # whether the policy may have changed since the last push; before the first push no engine has our policy
        self._policy_changed = True
        self._engine_metrics: dict[str, float] = {}  # of the newest step's `adapt` and `push`
        with ExitStack() as closing:
            self._open(closing, command, extensions or Extensions())
            # Only if nothing failed; else `closing` ends what was opened.
            self._closing = closing.pop_all()
        # From here on a signal ends the run between two steps (`checkpoint`), with a checkpoint.
        self.interruption.defer()

    def _open(self, closing: ExitStack, command: Command, extensions: Extensions) -> None:
        """Open the parts of the run. Their order must stay; `closing` ends them in the opposite one.

        Whatever can be refused is refused before `_open_records`, which writes the first records.
        """
        config = self.config
        self.loaded = load(config, command)
        # Before the trainer, which is built while engines on GPUs of their own start.
        starting = self._start_rollouts(closing, extensions)
        self.trainer = build_trainer(config, self.loaded, self.supervised)
        self.saver = Saver(self.trainer, self.loaded.identity)
        # After the trainer, into which it loads the checkpoint; before the engines that share GPUs with it.
        state, drawn = self._load_newest()
        self.drafting = Drafting(
            self.trainer, self.loaded, extensions.drafter, state, drawn.replay, self.supervised
        )
        engines = self._await_engines(closing, starting, extensions)
        self._open_records(closing, state)
        self.rollouts: Rollouts | None = None
        if starting is not None:
            assert self.records.recorder is not None
            self.rollouts = build_rollouts(
                config,
                self.loaded,
                starting,
                engines,
                self.records.recorder,
                self.interruption.end_requested,
            )
            closing.callback(self.rollouts.close)
            self.rollouts.start(state, drawn)
        self.rank0 = Rank0(self.is_rank0, self.rollouts, self.interruption, self._stop)
        self.evaluation = Evaluation(
            self.trainer, self.rank0, self.records, self.push, state.get("accept_lengths", [])
        )

    def _start_rollouts(
        self, closing: ExitStack, extensions: Extensions
    ) -> StartingRollouts | None:
        """Start reward workers, and engines that have GPUs of their own. None on ranks above 0 and without engines."""
        if not (self.is_rank0 and self.generates):
            return None
        starting = start_rollouts(self.config, self.loaded, extensions)
        closing.callback(starting.close)
        if not self.loaded.layout.colocated:
            starting.engines.launch()
        return starting

    def _load_newest(self) -> State:
        """Continue from the newest checkpoint with `train.resume`. Returns its state, empty without one."""
        state = State({}, Drawn())
        if self.config.train.resume:
            last = self.config.sft.steps if self.supervised else self.config.train.steps
            state = self.saver.load_newest(last)
        self.done = state.values.get("step", 0)
        if state.values and self.loaded.data is not None:
            self.loaded.data.order.restore(state.values["data"])
        return state

    def _await_engines(
        self, closing: ExitStack, starting: StartingRollouts | None, extensions: Extensions
    ) -> Mapping[str, RolloutEngine]:
        """Start engines that share the ranks' GPUs, now that the trainer has its memory, and wait for all engines."""
        if self.loaded.layout.colocated:
            _free_memory(self.trainer)
            if starting is not None:
                starting.engines.launch()
        follow = extensions.kind(self.config.rollout.engine).follow
        if not self.is_rank0 and self.generates and follow is not None:
            # This rank has a part of the engines. Making it is collective: rank 0 does so in `wait`, below.
            closing.callback(follow(self.config))
        return starting.engines.wait() if starting is not None else {}

    def _open_records(self, closing: ExitStack, state: Mapping[str, Any]) -> None:
        """Open the records and the trajectory that is recorded. This writes to the run directory."""
        self.records = Records(self.config, self.clock, self.done, self.is_rank0)
        closing.callback(self.records.close)
        self.records.logprob_gap.restore(state.get("logprob_gaps", []))
        if self.loaded.data is not None:
            self.records.event("data", self.loaded.data.summary)
        self.recording: TrajectoryRecording | None = None
        if self.config.train.record_gib and not self.supervised:
            self.recording = TrajectoryRecording(self.trainer, self.records, self.done)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Group]:
        """Return the scored groups of one step, the same on every rank. `push` must have sent the present weights.

        A drafter's schedule may update the drafter from earlier rollouts while engines generate.
        """
        # A schedule that updates the drafter meanwhile calls `begin`: then the loop below only waits for the rollout.
        begin = partial(self.rank0.ask, lambda rollouts: rollouts.begin(step))
        self.drafting.schedule.during_rollout(self.done, begin)
        while not self.rank0.ask(lambda rollouts: rollouts.collect(step)):
            # All engines were lost, and one is starting again: `push` waits for it, and sends it the weights.
            self.push()
        groups = self.rollouts.newest.groups if self.rollouts else []
        if dist.get_world_size() > 1:
            groups = ranks.job().tell(groups)  # rank 0's; the others have []
        self._newest = ({}, groups)
        return groups

    def load_recorded(self, step: int) -> list[Group]:
        """Load the policy that a recorded run had before `step`, and return that step's rollouts. Collective."""
        replay = self.loaded.replay
        assert replay is not None
        replay.load(self.trainer, step)
        # After the load: an update during a rollout takes its hidden states from the policy that generates.
        self.drafting.schedule.during_rollout(self.done, lambda: None)
        return replay.recorded.groups(step)

    def demonstrations(self) -> list[Group]:
        """Return the next demonstrations; every rank reads the same rows. Each call moves on in their order."""
        rows = self.loaded.demonstrations
        assert rows is not None
        return [Group(row.prompt, [row]) for row in rows.take(self.config.sft.samples_per_step)]

    def record_trajectory(self, groups: Sequence[Group] = ()) -> None:
        """With `train.record_gib`, write the present policy and the rollouts of the next step. Collective."""
        if self.recording is not None:
            self.recording.record(self.done, groups)

    def settle(self) -> None:
        """Wait for the rollout that runs ahead, if any. If its engines are lost, the next `collect` repeats it."""
        self.rank0.ask(Rollouts.settle)

    # ---- learning ---------------------------------------------------------------------------------------------------

    def pack(self, groups: Sequence[Group]) -> list[list[PackedBatch]]:
        """Return this rank's micro-batches of each optimizer step. Advantages are of each group. Once in a step."""
        samples = samples_of(groups)
        longest = self.config.rollout.max_new_tokens
        by_group = [advantages(self.config.algorithm, longest, group) for group in groups]
        # In the order of `samples`.
        by_sample = [value for of_group in by_group for value in of_group]
        if self.loaded.prompts is not None and self.loaded.replay is None:
            self.records.observe_advantages(self.done, samples, by_group)
        # `observe` sets the draft vocabulary of this step, and tells the schedule of the rollouts.
        self.drafting.observe(groups)
        weights = self.drafting.weights(self.done, samples)
        updates = 1 if self.supervised else self.config.train.updates_per_rollout
        packed = []
        for part in mini_batches(groups, updates):
            weights_of_part = None if weights is None else weights[part]
            batches = micro_batches(
                self.trainer,
                samples[part],
                by_sample[part],
                version=self.done + 1,
                drafter_weights=weights_of_part,
                supervised=self.supervised,
            )
            packed.append(batches)
        return packed

    def train_step(self, packed: list[list[PackedBatch]], **options: Any) -> dict[str, float]:
        """Update policy and drafter on each mini-batch, and count the step. Returns the metrics of `train_rollout`.

        `packed` is the result of `pack`. `options` are arguments of `Trainer.train_step`, `objective` among them.
        Engines on the ranks' GPUs sleep from here until the next push.
        """
        if self.loaded.layout.colocated:
            # First: the step needs their memory.
            self.rank0.ask(lambda rollouts: rollouts.engines.sleep())
        trains_policy = options.get("train_policy", True)
        learns = options["objective"] == "grpo" and trains_policy
        if self.config.algorithm.kl_coef and learns:
            assert self.trainer.reference is not None
            # the same micro-batches with the reference's log-probs, which the KL penalty compares with
            packed = [self.trainer.reference.with_logprobs(batches) for batches in packed]
        options["logprob_gap"] = self.records.logprob_gap.limit
        train = partial(train_rollout, self.trainer, packed, **options)
        rollout_seconds = self.rollouts.newest.seconds if self.rollouts is not None else None
        groups = self._newest[1]  # of `collect`; empty in runs without engines
        metrics = self.drafting.train_step(self.done, train, rollout_seconds)
        self.done += 1
        if learns and self.due(self.config.train.drift_every):
            metrics |= self._drift(groups)
        # After a skipped step the policy is sent as well: the step may have been skipped because an engine has wrong
        # weights. In a replay another policy may have been loaded.
        self._policy_changed |= trains_policy or self.loaded.replay is not None
        self._newest = (metrics, groups)
        self._engine_metrics = {}  # `adapt` and `push` of this step fill it
        return metrics

    def _drift(self, groups: Sequence[Group]) -> dict[str, float]:
        """Compare the policy with model.path on a few samples, evenly spaced. The same samples on every rank."""
        samples = samples_of(groups)
        distance = max(1, len(samples) // DRIFT_SAMPLES)
        chosen = samples[::distance][:DRIFT_SAMPLES]
        assert self.trainer.reference is not None
        return self.trainer.reference.drift(
            micro_batches(self.trainer, chosen, version=self.done + 1)
        )

    # ---- weights and speculation -------------------------------------------------------------------------------------

    def push(self) -> None:
        """Send target and drafter to every engine as one version, and check every engine. Collective.

        Restarted engines join here. If no other engine is left, this waits for one that is starting.
        """
        if self.loaded.layout.colocated:
            _free_memory(self.trainer)  # first: an engine that wakes takes what is free
            self.rank0.ask(lambda rollouts: rollouts.engines.wake())
        while not self.rank0.attempt(self._push_once):
            pass  # no engine was left; `_push_once` waits for one that starts again

    def _push_once(self) -> None:
        """Gather full tensors from all ranks while rank 0 sends them. Collective."""
        with exporting(partial(self.trainer.export, live=True)) as source:
            if source is not None:
                assert self.rollouts is not None
                hot_tokens = None
                if self.config.spec.mode != "off":
                    hot_tokens = self.drafting.hot_tokens()
                scope: Scope = "all" if self._policy_changed else "drafter"
                self._engine_metrics |= self.rollouts.engines.push(
                    self.done + 1, source, hot_tokens, scope
                )
        # Not if the push raised: the next one must send the policy, too.
        self._policy_changed = False

    def adapt(self) -> None:
        """Read the engines' acceptance and round times, and update the speculation rule. Collective; once in a step."""

        def learn(rollouts: Rollouts) -> None:
            self._engine_metrics |= rollouts.adapt(self.trainer.prediction)

        self.rank0.ask(learn)

    # ---- evaluation, records and checkpoints ------------------------------------------------------------------------

    def due(self, every: int) -> bool:
        """Return whether the number of steps done, also 0, is a multiple of `every`. With `every` = 0: never."""
        return every > 0 and self.done % every == 0

    def evaluate(self, name: str) -> None:
        """Evaluate on held-out prompts, if any. Collective. With `train.save_best` keep the best trained model."""
        reward = self.evaluation.evaluate(name, self.done)
        if not self.config.train.save_best or self.done == 0:
            return
        if keep_best(self.loaded, self.trainer, self.records, reward):
            message = f"{name}: reward {reward:.3f} is the highest so far; kept in hf-best"
            self.records.event("best", message)

    def evaluate_warm_start(self) -> bool:
        """Evaluate every `sft.eval_every` steps. Returns whether the warm start may end, the same on every rank.

        It may if only the drafter learns, and its accept length on held-out answers has stopped rising.
        """
        rows = self.loaded.demonstrations
        assert rows is not None
        options = self.config.sft
        if not self.due(options.eval_every):
            return False
        stopped_rising = False
        if options.held_out:
            tokens = self.drafting.tokens
            stopped_rising = self.evaluation.measure_drafter(self.done, tokens, rows.held_out)
        if self.generates:
            with self.clock("push"):
                self.push()
            with self.clock("generate"):
                self.evaluation.evaluate(f"step-{self.done:06d}", self.done)
        return options.drafter_only and stopped_rising

    def record(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Write one line to `metrics.jsonl` and a few texts to `samples.jsonl`, on rank 0. Counts bad steps in a row.

        `step` counts from 0. `groups` are what `collect` returned; none in runs without engines.
        """
        samples = samples_of(groups)
        if self.rollouts is None or not samples:
            self.records.write(step, metrics)
            return
        values = dict(metrics) | self.rollouts.step_metrics(samples) | self._engine_metrics
        self.records.write(step, values, samples, self.rollouts.generation.decode)

    def checkpoint(self) -> None:
        """Write a checkpoint every `train.save_every` steps, and a model every `train.export_every`. Collective.

        Writes a checkpoint and raises RunStopped after `train.max_bad_steps` bad steps in a row, and if any rank
        received a signal to end.
        """
        options = self.config.train
        bad_steps = self.records.bad_steps
        if 0 < options.max_bad_steps <= bad_steps:
            self._stop(
                f"step {self.done}: {self.records.why_bad}; {bad_steps} steps in a row were skipped "
                f"(train.max_bad_steps={options.max_bad_steps})"
            )
        # Collective: a signal may have reached some ranks only, and all must stop at the same step.
        if reason := runtime.first_message(self.interruption.reason):
            self._stop(reason)
        if self.due(options.save_every):
            self._save()
        if self.due(options.export_every):
            self._load_followed_policy()  # `_save` may not have run in this step
            write_result(self.loaded, self.trainer, self.records, f"hf-step-{self.done:06d}")

    def _stop(self, reason: str) -> NoReturn:
        """Write a checkpoint, and the record of the last step if it has none, then raise RunStopped. Collective."""
        if self.done > self.records.recorded:
            self.record(self.done - 1, *self._newest)
        code = self.interruption.exit_code
        if self.done == 0:
            raise RunStopped(f"{reason}; no step was trained, so there is no checkpoint", code)
        try:
            path = self._save()
        except SaveError as error:
            raise RunStopped(
                f"{reason}; no checkpoint of step {self.done} could be written: {error}", code
            ) from None
        raise RunStopped(f"{reason}; the last good parameters are in {path}", code)

    def _save(self) -> Path:
        """Write a checkpoint, and return its path. Collective. Raises SaveError on every rank."""
        self._load_followed_policy()
        return self.saver.save(self.done, self._state)

    def _load_followed_policy(self) -> None:
        """In a replay that follows a run, load the policy that the run had after `done` steps.

        A checkpoint or result must not hold the policy from before the step, which the replay has trained with.
        """
        if self.loaded.followed is not None:
            self.loaded.followed.load(self.trainer, self.done)

    def _state(self) -> State:
        """Return the state of all parts for a checkpoint, on rank 0. `_open` and what it calls read the same keys."""
        state, drafter_rollouts = self.drafting.state()
        state["accept_lengths"] = self.evaluation.accept_lengths
        state["logprob_gaps"] = self.records.logprob_gap.seen
        if self.loaded.data is not None:
            state["data"] = self.loaded.data.order.state()
        if self.rollouts is None:
            return State(state, Drawn(replay=drafter_rollouts))
        rollout_values, drawn = self.rollouts.state(drafter_rollouts)
        return State(state | rollout_values, drawn)

    def finish(self) -> None:
        """Write the last checkpoint, and policy and drafter as a Hugging Face model to `run_dir/hf`. Collective."""
        self._save()  # first: in a replay it also loads the policy that belongs into the result
        write_result(self.loaded, self.trainer, self.records)
        self.records.summarise()


def _free_memory(trainer: Trainer) -> None:
    """Give back the GPU memory that this rank does not use now, and wait until all ranks have. Collective.

    An engine that starts or wakes after it takes its share of what is free on its GPU.
    """
    for learner in trainer.learners().values():
        learner.release_memory()
    torch.cuda.empty_cache()
    ranks.job().barrier()  # rank 0 then starts or wakes the engines on the GPUs of all ranks

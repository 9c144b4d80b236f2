"""Generate samples of prompts and score them, on rank 0: for the rollouts of steps (`rollouts.py`) and for evaluations.

Sampling seeds are made from (run seed, step, place of the prompt in the step, number of the sample). So a resumed run
generates the same samples as an uninterrupted one, and a prompt that comes twice in a step gets other samples the
second time.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rlspec import custom
from megatron_rlspec.config import Config
from megatron_rlspec.files import tell
from megatron_rlspec.losses import grpo
from megatron_rlspec.noise import seed_of
from megatron_rlspec.records.recorder import Recorder
from megatron_rlspec.rollout.conversation import Conversations
from megatron_rlspec.rollout.partial import Drawing, mask_continued
from megatron_rlspec.run.engines import Engines
from megatron_rlspec.run.failed_steps import FailedSteps
from megatron_rlspec.run.summaries import best_of, rollout_metrics, scored
from megatron_rlspec.tasks import data, rewards
from megatron_rlspec.types import Group, OpenGroup, Prompt, Request, Sample, Sampling, samples_of

# In place of the step's number in the seeds of evaluations: all evaluations use the same seeds, and no step has them.
EVALUATION = 1 << 30
CANCEL_AGAIN = 0.2  # seconds between two aborts of a cancelled rollout
Failures = list[str]  # one line per sample without a reward


class RolloutCancelledError(RuntimeError):
    """A signal ended the run during a rollout. `Rollouts._generate` restores the order of prompts after it."""


class Generation:
    """Takes prompts, has engines generate samples of them, and has rewards score these.

    Threads: `evaluate` runs in the caller's, and `rollout` in the caller's or in the background thread of `Rollouts`,
    but never both at once. `_on_ended` and `_add_to_batch` run in threads of engines and reward workers; `Drawing` has
    a lock for them. `_abort_when_cancelled` has a thread of its own.

    begun      groups that have begun and go on in the next rollout (`rollout.partial`)
    held_out   prompts of evaluations by the name of their set
    cancelled  when it is set, rollouts end with RolloutCancelledError
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        engines: Engines,
        scorer: rewards.Scorer,
        recorder: Recorder,
        held_out: Mapping[str, Sequence[Prompt]],
        cancelled: threading.Event,
    ) -> None:
        rollout = config.rollout
        train = config.train
        self.sampling = rollout.sampling
        self._eval_sampling = self.sampling
        if train.eval_temperature >= 0:
            self._eval_sampling = replace(self.sampling, temperature=train.eval_temperature)
        self.begun: list[OpenGroup] = []
        self.held_out = held_out
        self._rollout = rollout
        self._train = train
        self._dynamic = config.algorithm.dynamic_sampling
        self._tokenizer = tokenizer
        self._engines = engines
        self._scorer = scorer
        self._recorder = recorder
        self._cancelled = cancelled
        self._failed_steps = FailedSteps(train.max_bad_steps)
        self._shown = False  # whether the run has shown a scored sample
        # ids of the requests that engines may have; for `_abort_when_cancelled`, in another thread
        self._running_ids: Collection[str] = ()
        self._closed = threading.Event()
        self._conversations: Conversations | None = None
        if rollout.function:
            self._conversations = Conversations(
                custom.load("rollout.function", rollout.function),
                engines.pool,
                tokenizer,
                rollout.timeout_seconds,
                config.keyed,
            )

    def start(self) -> None:
        """Start the thread that ends a rollout when it is cancelled. Call it once, before the first rollout."""
        threading.Thread(target=self._abort_when_cancelled, name="cancel", daemon=True).start()

    def close(self) -> None:
        """End the thread of `start`, and the reward workers. No rollout may run."""
        self._closed.set()
        self._scorer.close()

    def restore(self, begun: Sequence[OpenGroup]) -> None:
        """Continue with a checkpoint's begun groups. Without `rollout.partial` they are dropped; an event says so.

        Call it before the first rollout.
        """
        self.begun = list(begun)
        if self.begun and not self._rollout.partial:
            message = f"rollout.partial=0: {len(self.begun)} begun groups are not continued"
            self._recorder.event("resume", message)
            self.begun = []

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def rollout(self, step: int, source: data.Prompts, figures: dict[str, float]) -> list[Group]:
        """Return `rollout.prompts_per_step` complete groups, of prompts from `source`.

        Dynamic sampling drops groups, and more prompts are taken then. With `rollout.partial` more groups are begun,
        and those that are not in the batch go on in the next rollout.

        figures  numbers for the step's record. This adds to `reward_seconds_waited`, which must be there, and sets
                 `continued_tokens` and, with `rollout.partial`, `over_drawn`

        Raises EngineError if no engine is left, RewardError, and RolloutCancelledError.
        """
        options = self._rollout

        def usable(group: Group) -> bool:
            return not self._dynamic or _has_signal(group)

        # The next step trains version step + 2, on tokens that are at most `max_lag` versions older.
        drawing = Drawing(self.begun, options.prompts_per_step, step + 2 - options.max_lag, usable)
        figures["continued_tokens"] = float(_tokens_of_partials(self.begun))
        failures: Failures = []
        ended = 0  # samples
        taken = 0  # prompts of `source`: the place of the next one, from which its seeds are made
        while True:
            # One prompt at least, so that every rollout generates something.
            least = 0 if drawing.requests() else 1
            missing = max(options.begun_prompts - len(drawing.groups), least)
            prompts_of_step = [group.requests[0].prompt for group in drawing.groups]
            # other prompts than those of the step, as long as there are some
            prompts = source.take(missing, prompts_of_step)
            drawing.begin(
                self._requests(f"t{step:06d}", prompts, options.samples_per_prompt, step, taken)
            )
            taken += len(prompts)
            ended_now, failed_now = self._generate(drawing, figures)
            failures += failed_now
            ended += ended_now
            # Every refill counts as a step. Otherwise dynamic sampling without any reward would refill for ever.
            self._failed_steps.observe(f"step {step + 1}", ended_now, failed_now)
            drawing.drop_unusable()
            if drawing.full:
                break
        groups, self.begun = drawing.batch()
        if options.partial:
            figures["over_drawn"] = float(sum(len(group.requests) for group in self.begun))
        if options.mask_offpolicy:
            mask_continued(samples_of(groups))
        if step == 0:
            self._show("step 1", groups[0].samples[0])
        self._record_failures(f"step {step + 1}", ended, failures)
        return groups

    def _record_failures(self, name: str, samples: int, failures: Failures) -> None:
        """Write an event if rewards failed. `samples`: how many were scored."""
        if failures:
            message = (
                f"{name}: {len(failures)} of {samples} rewards failed; the first: {failures[0]}"
            )
            self._recorder.event("reward", message, failed=len(failures), samples=samples)

    def _show(self, name: str, sample: Sample) -> None:
        """Show a run's first scored sample, so that a user sees what the reward gets before the run has trained."""
        if not self._shown:
            self._recorder.event("sample", f"{name}: {scored(sample)}")
        self._shown = True

    def evaluate(self, name: str, done: int) -> dict[str, dict[str, float]]:
        """Generate and score responses to the first prompts of every held-out set, with the same seeds each time.

        name  of the evaluation, in its events and its requests' ids
        done  steps that the policy has had, for the events

        Call it while no rollout runs, and after `Rollouts.adapt`: it drops rounds that `adapt` has not read.

        Returns the figures of the events by the name of the set; "" is data.eval_path. Raises EngineError if no engine
        is left, RewardError, and RolloutCancelledError.
        """
        return {which: self._evaluate(name, done, which) for which in self.held_out}

    def _evaluate(self, name: str, done: int, which: str) -> dict[str, float]:
        """Evaluate on the held-out set of the name `which`. Returns the figures of its event."""
        chosen = self.held_out[which][: self._train.eval_prompts]
        tell(f"evaluating {len(chosen)} prompts", sys.stdout)
        requests = self._requests(f"e-{name}", chosen, self._train.eval_samples, EVALUATION)
        # math.inf: no next step may train on these tokens, so all groups must end.
        drawing = Drawing(requests, len(chosen), math.inf)
        _, failures = self._generate(drawing)
        groups, _ = drawing.batch()
        samples = samples_of(groups)
        # Read and drop the evaluation's rounds: the speculation rule learns from rollouts only, because an evaluation
        # may have another temperature.
        self._engines.rounds()
        if name == "first":  # the evaluation before the first step (`loop.py`)
            self._show("the first of the evaluation", samples[0])
        shown = f"{name}, {which}" if which else name
        self._failed_steps.observe_evaluation(f"evaluation {shown}", len(samples), failures)
        self._record_failures(f"evaluation {shown}", len(samples), failures)
        passed = best_of(groups)
        result = rollout_metrics(samples) | {"prompts": float(len(groups))}
        text = f"{shown}: reward {result.get('reward', math.nan):.3f}"
        for k, value in passed.items():
            result[f"pass_{k}"] = value
            text += f", pass@{k} {value:.3f}"
        text += f" on {len(groups)} held-out prompts"
        if not math.isnan(result["accept_length"]):
            text += f", accept length {result['accept_length']:.2f}"
        fields: dict[str, Any] = {"name": name, "step": done}
        if which:
            fields["set"] = which
        self._recorder.event("evaluation", text, **fields, **result)
        return result

    # ---- samples ----------------------------------------------------------------------------------------------------

    def _requests(
        self, name: str, prompts: Sequence[Prompt], samples: int, salt: int, places: int = 0
    ) -> list[OpenGroup]:
        """Return a group of `samples` requests for each prompt.

        name    begins the requests' ids. The rest has a fixed width: SGLang aborts by prefix, so no id may be a prefix
                of another
        salt    the step's number, or EVALUATION, for the seeds
        places  prompts that this step has taken before
        """
        groups = []
        for place, prompt in enumerate(prompts, places):
            requests = []
            for i in range(samples):
                seed = seed_of(self._train.seed, salt, place, i)
                requests.append(Request(f"{name}-p{place:07d}-n{i:07d}", prompt, seed))
            groups.append(OpenGroup(requests))
        return groups

    def _generate(
        self, drawing: Drawing, figures: dict[str, float] | None = None
    ) -> tuple[int, Failures]:
        """Generate and score what has not ended until the batch is full.

        figures  as in `rollout`; None: this is an evaluation

        Returns the number of samples that ended, and one line per failed reward.
        """
        scoring = rewards.Scoring(self._scorer)
        sampling = self._eval_sampling if figures is None else self.sampling
        try:
            samples = self._run_requests(
                drawing.requests(),
                sampling,
                lambda sample: self._on_ended(sample, drawing, scoring),
            )
            ended = [sample for sample in samples if sample.status != "aborted"]
            # `own_reward`: the user's function has set the reward (rollout/conversation.py)
            failures = scoring.finish(
                [sample for sample in ended if "own_reward" not in sample.metadata]
            )
        except BaseException:
            scoring.cancel()
            raise
        # Before any sample is used: rewards that an interruption stopped look like failed ones.
        self._check_cancelled()
        # Under dynamic sampling a callback of the reward may still be running. `add` ignores what is there already.
        for sample in ended:
            drawing.add(sample)
        # Engines that cannot continue samples begin the aborted ones anew.
        if self._engines.pool.can_continue:
            drawing.store_partials(sample for sample in samples if sample.status == "aborted")
        if figures is not None:
            figures["reward_seconds_waited"] += scoring.waited
        return len(ended), failures

    def _on_ended(self, sample: Sample, drawing: Drawing, scoring: rewards.Scoring) -> None:
        """Begin to compute the reward of a sample that has just ended. A full batch aborts the others. Any thread."""
        if sample.status == "aborted":
            return
        sample.text = self.decode(sample.response)
        if "own_reward" in sample.metadata:
            self._add_to_batch(sample, drawing)
            return
        future = scoring.add(sample)
        if not self._dynamic:
            self._add_to_batch(sample, drawing)
            return

        def add_scored(future: Future[Any]) -> None:
            if not future.cancelled():
                self._add_to_batch(sample, drawing)

        # Dynamic sampling counts a group by its rewards, so the sample must have its reward before `_add_to_batch`.
        future.add_done_callback(add_scored)

    def _add_to_batch(self, sample: Sample, drawing: Drawing) -> None:
        """Add a sample to the batch. A full batch aborts the requests that are left."""
        if not drawing.add(sample):
            return
        left = [request.id for request in drawing.requests()]
        if left:
            self._engines.pool.abort(left)

    def _run_requests(
        self, requests: Sequence[Request], sampling: Sampling, on_ended: Callable[[Sample], None]
    ) -> list[Sample]:
        """Generate one sample per request, in one reply each or by the user's function (`rollout.function`).

        `on_ended` is called with each sample, from any thread.
        """
        self._check_cancelled()
        try:
            if self._conversations is None:
                self._running_ids = [request.id for request in requests]
                samples = self._engines.pool.generate(requests, sampling, on_ended)
            else:
                # Ids of turns, which come and go: the attribute, and no copy, is read at each abort.
                self._running_ids = self._conversations.running
                samples = self._conversations.draw(requests, sampling, on_ended)
        finally:
            self._running_ids = ()
        self._check_cancelled()
        self._engines.record_losses()
        return samples

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise RolloutCancelledError("a signal ended the run")

    def _abort_when_cancelled(self) -> None:
        """Abort the requests of a cancelled rollout again and again: a request may reach its engine after an abort."""
        while not self._closed.wait(CANCEL_AGAIN):
            if self._cancelled.is_set():
                self._scorer.interrupt()
                if self._running_ids:
                    self._engines.pool.abort(list(self._running_ids))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def _has_signal(group: Group) -> bool:
    """Return whether a group's rewards differ, so that its samples have advantages."""
    values = [sample.reward for sample in group.samples]
    succeeded = [not rewards.failed(sample) for sample in group.samples]
    return grpo.has_signal(values, known=succeeded)


def _tokens_of_partials(groups: Sequence[OpenGroup]) -> int:
    """Return the response tokens that the requests of these groups have already."""
    tokens = 0
    for group in groups:
        for request in group.requests:
            if request.partial is not None:
                tokens += len(request.partial.response)
    return tokens

"""Update the drafter from chosen rollouts, with weights by reward, and not in every step (ReSpec, section 5.3).

An update is either part of the policy's step, on the same rollouts and hidden states, or a pass of its own over stored
rollouts (`DrafterConfig.separate`), whose hidden states the present policy computes. Such a pass runs after the
policy's step, or with `drafter.overlap` while engines generate the next rollout. In every case the drafter reads
detached hidden states, and its loss changes only its own parameters. So for given rollouts none of these options
changes the policy's update.

`commands/training.py` takes this schedule for separate updates, for `drafter.update_every` above 1, and for
`drafter.reward_weight`. `run/drafter_training.py` calls it.

Every rank holds one schedule. Which steps update, and from what, follows from options, checkpoint and rollouts, which
are equal on all ranks: updates are collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.extensions.drafter_schedules.replay import ReplayBuffer
from megatron_rlspec.run.batches import micro_batches
from megatron_rlspec.run.extension import DrafterSchedule
from megatron_rlspec.tasks.rewards import failed
from megatron_rlspec.train.drafter_updates import EverySteps, reward_weights
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, Sample, samples_of


class OnlineLearner(DrafterSchedule):
    """Chooses rollouts, weights and steps by the options of `drafter`.

    load_policy     loads the policy that a recorded run had before a step; None: the run trains its own
    every_steps     decides which steps update (`drafter.update_every`)
    buffer          stored rollouts, for separate updates
    last_update     the step that updated the drafter last; -1: none
    update_seconds  duration of the last separate update that had rollouts. Not in `state()`: 0 after a resume
    updates         number of separate updates so far; seeds the next draw from the buffer
    """

    def __init__(
        self,
        trainer: Trainer,
        load_policy: Callable[[int], None] | None,
        state: Mapping[str, Any],
        groups: Sequence[Group],
    ) -> None:
        """Begin, or continue from a checkpoint. `state` and `groups` are what `state()` returned, or empty."""
        self.config = trainer.config
        options = self.config.drafter
        self.trainer = trainer
        self.load_policy = load_policy
        self.every_steps = EverySteps(options.update_every)
        self.buffer = ReplayBuffer(options.replay_tokens)
        self.last_update = -1
        self.update_seconds = 0.0
        self.updates = 0
        # metrics of an update that ran during a rollout; `train_step` puts them into the record of that step
        self._metrics_during_rollout: dict[str, float] = {}
        # A checkpoint of another schedule has no "rule", the key of `every_steps`: options may change between runs.
        if "rule" in state:
            self.every_steps.restore(state["rule"])
            self.updates = int(state["updates"])
            self.last_update = int(state["last_update"])
        self.buffer.restore(groups)

    def weights(self, samples: Sequence[Sample]) -> np.ndarray | None:
        """Return the drafter's weight of every sample, for `pack`; None if all are 1."""
        if self.config.drafter.reward_weight == "none":
            return None
        rewards = [sample.reward for sample in samples]
        # A failed reward is 0 and means nothing.
        succeeded = [not failed(sample) for sample in samples]
        return reward_weights(rewards, succeeded)

    def observe(self, groups: Sequence[Group]) -> None:
        """Store a step's rollouts, if updates are separate.

        Once in a step: after `during_rollout`, before `train_step`.
        """
        options = self.config.drafter
        if options.separate:
            if options.replay == "none":
                # with overlap: the next update learns from this rollout only
                self.buffer.clear()
            self.buffer.add(samples_of(groups))

    def during_rollout(self, step: int, begin: Callable[[], object]) -> None:
        """Update the drafter from earlier rollouts while engines generate that of `step`. Collective.

        `begin` starts the rollout in the background. The update is left out if the checkpoint has it already: a run
        can stop between this update and the policy's step, and `last_update` is then `step`.
        """
        if not self.config.drafter.overlap:
            return
        begin()
        if self.every_steps.due and self.last_update < step:
            self._metrics_during_rollout = self._update(step)

    def train_step(
        self, step: int, train: Callable[[bool], dict[str, float]], rollout_seconds: float | None
    ) -> dict[str, float]:
        """Train the policy by `train`, and the drafter if an update is due. Collective. Returns metrics of both."""
        options = self.config.drafter
        due = self.every_steps.due
        metrics = train(due and not options.separate)
        if options.overlap:
            # `during_rollout` has updated the drafter, if that was due.
            metrics |= self._metrics_during_rollout
            self._metrics_during_rollout = {}
            if rollout_seconds is not None:  # on rank 0, which writes the record
                # The update ran beside the rollout: only its seconds beyond the rollout's cost the run time.
                spent = self.update_seconds if self.last_update == step else 0.0
                # NaN: a checkpoint had the rollout, so no rollout ran during the update.
                beside = rollout_seconds if rollout_seconds >= 0 else 0.0
                hidden_seconds = min(spent, beside)
                metrics |= {
                    "drafter/seconds_hidden": hidden_seconds,
                    "drafter/seconds_added": spent - hidden_seconds,
                }
        elif due and not options.separate:
            self.last_update = step
        elif due:
            metrics |= self._update_after(step)
        updated = self.last_update == step
        self.every_steps.count_step(updated)
        return metrics | {"drafter/updated": float(updated)}

    def _update_after(self, step: int) -> dict[str, float]:
        """Update the drafter after the policy's step, with hidden states of the policy as it is then."""
        # The policy's step has set `trainer.prediction`, of the next rollout's acceptance; to None if the drafter did
        # not run in it.
        prediction = self.trainer.prediction
        if self.load_policy is not None:
            # in a replay: the recorded policy after this step
            self.load_policy(step + 1)
        metrics = self._update(step)
        metrics["drafter/seconds_added"] = self.update_seconds if self.last_update == step else 0.0
        # `_update` has overwritten `trainer.prediction` with the acceptance on the rollouts that it drew. The rule of
        # the next rollout reads it (`Learning.expect`): keep that of the policy's step. If that step made none, take
        # the update's, but only if it drew the newest rollouts.
        if prediction is None and self.config.drafter.replay == "newest":
            prediction = self.trainer.prediction
        self.trainer.prediction = prediction
        return metrics

    def _update(self, step: int) -> dict[str, float]:
        """Update the drafter from stored rollouts. Collective. Returns the drafter's metrics, {} without rollouts."""
        options = self.config.drafter
        # replay=none comes here with overlap only, and then the buffer holds the newest rollout only (`observe`).
        by = "newest" if options.replay == "none" else options.replay
        samples = self.buffer.draw(by, (self.config.train.seed, self.updates))
        if not samples:
            return {}
        began = time.perf_counter()
        batches = micro_batches(self.trainer, samples, drafter_weights=self.weights(samples))
        metrics = self.trainer.train_step(batches, objective="grpo", train_policy=False)
        self.update_seconds = time.perf_counter() - began
        self.updates += 1
        self.last_update = step
        metrics["drafter/update_tokens"] = float(sum(len(sample.tokens) for sample in samples))
        metrics["drafter/replay_tokens"] = float(self.buffer.tokens)
        return metrics

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        """Return the state for a checkpoint, and the buffer's rollouts. `__init__` reads both."""
        state = {
            "rule": self.every_steps.state(),
            "updates": self.updates,
            "last_update": self.last_update,
        }
        return state, self.buffer.groups()

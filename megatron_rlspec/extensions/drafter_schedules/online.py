"""Update the drafter not in every step, or while engines draw (ReSpec, section 5.3).

An update is either part of the policy's step, on the same rollouts and hidden states, or with `drafter.overlap` a pass
of its own over the last step's rollouts, whose hidden states the present policy computes, while engines draw the next
ones. In both cases only the drafter's own parameters change, so the policy and its texts are the same.

A buffer of earlier rollouts and weights by reward ended behind this (docs/staleness.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rlspec.config import Config
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.train import runtime
from megatron_rlspec.train.drafter_updates import EverySteps
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group


class OnlineLearner:
    """A `run.extension.DrafterSchedule`, by the options of `drafter`.

    last_update  the step that updated the drafter last; -1: none
    """

    def __init__(self, config: Config, trainer: Trainer, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Take up `state` and `groups`, which a checkpoint has of `state()`; see `DrafterScheduleBuilder`."""
        self.config = config
        self.trainer = trainer
        self.rule = EverySteps(config.drafter.update_every)
        self.last_update = -1
        self.seconds = 0.0  # of the newest update beside a rollout
        self._groups = list(groups)  # of the last step
        self._learned: dict[str, float] = {}  # metrics of an update beside a rollout, for the record of its step
        if state:
            self.rule.restore(state["rule"])
            self.last_update = int(state["last_update"])
            if min(self.rule.since, self.rule.updates, self.last_update + 1) < 0:
                raise ValueError("the drafter's updates are counted by a negative number")

    def observe(self, groups: Sequence[Group]) -> None:
        """Keep the rollouts of a step, if the next update learns from them."""
        if self.config.drafter.overlap:
            self._groups = list(groups)

    def during_rollout(self, step: int, begin: Callable[[], object]) -> None:
        """Update the drafter from the last rollouts, unless a resumed run has done so before it stopped. Collective."""
        if not self.config.drafter.overlap:
            return
        begin()
        if self._groups and self.rule.due and self.last_update < step:
            self._learned = self._update(step)

    def train_step(
        self, step: int, train: Callable[[bool], dict[str, float]], rollout_seconds: float | None
    ) -> dict[str, float]:
        """Take a step in which the drafter learns when, and from what, the options say. Collective."""
        overlap = self.config.drafter.overlap
        due = self.rule.due
        metrics = train(due and not overlap)
        if overlap:
            metrics |= self._learned
            self._learned = {}
            if rollout_seconds is not None:
                spent = self.seconds if self.last_update == step else 0.0
                hidden = min(spent, rollout_seconds)
                metrics |= {"drafter/seconds_hidden": hidden, "drafter/seconds_added": spent - hidden}
        elif due:
            self.last_update = step
        updated = self.last_update == step
        self.rule.observe(updated)
        return metrics | {"drafter/updated": float(updated)}

    def _update(self, step: int) -> dict[str, float]:
        """Update the drafter from the last step's rollouts. Returns the drafter's metrics."""
        began = time.perf_counter()
        parallel = self.config.parallel
        batches = pack(
            [sample for group in self._groups for sample in group.samples],
            depth=self.config.drafter.depth,
            tokens_per_micro_batch=self.config.train.tokens_per_micro_batch,
            **runtime.placement(),
            multiple=parallel.tensor if parallel.sequence else 1,
        )
        metrics = self.trainer.train_step(batches, objective="grpo", train_policy=False)
        self.seconds = time.perf_counter() - began
        self.last_update = step
        return metrics

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        """Return the state for a checkpoint: a JSON object, and the last step's rollouts."""
        return {"rule": self.rule.state(), "last_update": self.last_update}, self._groups

"""What the drafter learns from, and when; and the tokens that drafts are chosen from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.run.extension import DrafterSchedule
from megatron_rlspec.speculation.vocabulary import DraftVocabulary
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, PackedBatch, Sample


class Drafting:
    """The drafter's side of every step. Every rank holds one, and all see the same rollouts.

    schedule     an extension that decides on updates; None: the drafter learns in every step
    records      whether steps record if the drafter was updated: not in a warm start, nor without a trained drafter
    tokens       that trained the drafter at depth 1 so far
    last_update  the step that trained it last; -1: none in this process
    """

    def __init__(
        self, trainer: Trainer, vocabulary: DraftVocabulary | None, schedule: DrafterSchedule | None, records: bool
    ) -> None:
        self.schedule = schedule
        self.tokens = 0
        self.last_update = -1
        self._trainer = trainer
        self._vocabulary = vocabulary
        self._records = records

    def weights(self, samples: Sequence[Sample]) -> list[np.ndarray] | None:
        """Return the drafter's weight of every position, `[L]` for each sample; None if all are 1."""
        return None if self.schedule is None else self.schedule.weights(samples)

    def observe(self, groups: Sequence[Group]) -> None:
        """Take the rollouts, or demonstrations, of the next step."""
        if self.schedule is not None:
            self.schedule.observe(groups)
        if self._vocabulary is not None:
            self._vocabulary.observe(sample.response for group in groups for sample in group.samples)
            self._trainer.set_draft_vocabulary(self._vocabulary.ids())

    def during_rollout(self, step: int, begin: Callable[[], object]) -> None:
        """Let a schedule update the drafter while engines generate; see `DrafterSchedule.during_rollout`."""
        if self.schedule is not None:
            self.schedule.during_rollout(step, begin)

    def train_step(
        self, step: int, batches: Sequence[PackedBatch], options: Mapping[str, Any], rollout_seconds: float | None
    ) -> dict[str, float]:
        """Take the step of the policy and of the drafter; `options` as `Trainer.train_step`. Returns the metrics."""

        def train(train_drafter: bool) -> dict[str, float]:
            return self._trainer.train_step(batches, train_drafter=train_drafter, **options)

        if self.schedule is not None:
            metrics = self.schedule.train_step(step, train, rollout_seconds)
        else:
            # One pass trains both: the drafter learns from the hidden states that the policy's loss computes.
            metrics = train(True)
            if self._records:
                metrics["drafter/updated"] = 1.0
        if metrics.get("drafter/updated"):
            self.last_update = step
        self.tokens += int(metrics.get("drafter/tokens_1", 0))
        return metrics

    def hot_tokens(self) -> np.ndarray | None:
        """Return the ids that drafts are chosen from, ascending; None if drafts are chosen from all."""
        return None if self._vocabulary is None else self._vocabulary.ids()

    def state(self) -> tuple[dict[str, Any], Sequence[Group]]:
        """Return the state for a checkpoint, as JSON, and the rollouts that the schedule keeps."""
        state: dict[str, Any] = {"tokens": self.tokens}
        if self._vocabulary is not None:
            state["words"] = self._vocabulary.state()
        if self.schedule is None:
            return state, ()
        state["online"], groups = self.schedule.state()
        return state, groups

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned, without the schedule's part."""
        self.tokens = int(state.get("tokens", 0))
        if self._vocabulary is not None and state.get("words"):
            self._vocabulary.restore(state["words"])

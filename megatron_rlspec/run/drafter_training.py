"""What the drafter learns from, and when; and the tokens that drafts are chosen from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.run.extension import DrafterSchedule
from megatron_rlspec.speculation.vocabulary import DraftVocabulary
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, PackedBatch, Sample

FRESH_STEPS = 10  # of a run, after which a fresh drafter learns from all rollouts so far
FRESH_UPDATES = 8  # on each of them


def chosen_samples(number: int, share: float, seed: Sequence[int]) -> np.ndarray:
    """Return which of a step's samples the drafter learns from, `[number]` float32 of 0 and 1; at least one."""
    chosen = np.zeros(number, np.float32)
    order = np.random.default_rng(seed).permutation(number)
    chosen[order[: max(1, round(share * number))]] = 1
    return chosen


class Drafting:
    """The drafter's side of every step. Every rank holds one, and all see the same rollouts.

    schedule     an extension that decides on updates; None: the drafter learns in every step
    records      whether steps record if the drafter was updated: not in a warm start, nor without a trained drafter
    tokens       that trained the drafter at depth 1 so far
    last_update  the step that trained it last; -1: none in this process
    """

    def __init__(
        self,
        trainer: Trainer,
        vocabulary: DraftVocabulary | None,
        schedule: DrafterSchedule | None,
        records: bool,
        fresh: bool = False,
    ) -> None:
        """`fresh`: the drafter has not learnt yet; see `teach`."""
        self.schedule = schedule
        self.tokens = 0
        self.last_update = -1
        self._trainer = trainer
        self._vocabulary = vocabulary
        self._records = records
        self._teaches = fresh and schedule is None
        self._rollouts: list[Group] = []  # that `teach` learns from

    def weights(self, step: int, samples: Sequence[Sample]) -> list[np.ndarray] | None:
        """Return the drafter's weight of every position, `[L]` for each sample of a step; None if all are 1."""
        weights = None if self.schedule is None else self.schedule.weights(samples)
        config = self._trainer.config
        share = config.drafter.learnt_share
        if share == 1 or not self._records:
            return weights
        if weights is None:
            weights = [np.ones(len(sample.tokens), np.float32) for sample in samples]
        chosen = chosen_samples(len(samples), share, (config.train.seed, step))
        return [weight * learnt for weight, learnt in zip(weights, chosen, strict=True)]

    def observe(self, groups: Sequence[Group]) -> None:
        """Take the rollouts, or demonstrations, of the next step."""
        if self.schedule is not None:
            self.schedule.observe(groups)
        if self._vocabulary is not None:
            samples = [sample for group in groups for sample in group.samples]
            self._vocabulary.observe(sample.response for sample in samples)
            self._trainer.set_draft_vocabulary(self._vocabulary.ids())

    def during_rollout(self, step: int, begin: Callable[[], object]) -> None:
        """Let a schedule update the drafter while engines generate; see `DrafterSchedule.during_rollout`."""
        if self.schedule is not None:
            self.schedule.during_rollout(step, begin)

    def train_step(
        self,
        step: int,
        batches: Sequence[PackedBatch],
        options: Mapping[str, Any],
        rollout_seconds: float | None,
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

    def teach(
        self,
        step: int,
        groups: Sequence[Group],
        pack: Callable[[list[Sample]], Sequence[PackedBatch]],
    ) -> None:
        """Update a fresh drafter several times after each of a run's first steps, on all rollouts so far.

        The policy runs forward only. `pack` makes this rank's micro-batches of samples. Collective.
        """
        if not self._teaches:
            return
        self._rollouts += groups
        samples = [sample for group in self._rollouts for sample in group.samples]
        order = np.random.default_rng(step).permutation(len(samples))
        prediction = self._trainer.prediction
        updates = min(FRESH_UPDATES * (step + 1), len(order))
        for part in np.array_split(order, updates):
            batches = pack([samples[i] for i in part])
            self._trainer.train_step(batches, objective="grpo", train_policy=False)
        self._trainer.prediction = prediction  # of texts that it had not learnt from
        if step + 1 >= FRESH_STEPS:
            self._teaches = False
            self._rollouts = []

    def hot_tokens(self) -> np.ndarray | None:
        """Return the ids that drafts are chosen from, ascending; None if drafts are chosen from all."""
        if self._vocabulary is None:
            return None
        return self._vocabulary.ids()

    def state(self) -> tuple[dict[str, Any], Sequence[Group]]:
        """Return the state for a checkpoint, as JSON, and the rollouts that the schedule keeps."""
        state: dict[str, Any] = {"tokens": self.tokens}
        if self._vocabulary is not None:
            state["words"] = self._vocabulary.state()
        if self.schedule is None:
            return state, self._rollouts
        state["online"], groups = self.schedule.state()
        return state, groups

    def restore(self, state: Mapping[str, Any], rollouts: Sequence[Group]) -> None:
        """Set what `state` returned, without the schedule's part."""
        self.tokens = int(state.get("tokens", 0))
        self._teaches = self._teaches and state.get("step", 0) < FRESH_STEPS
        self._rollouts = list(rollouts) if self._teaches else []
        if self._vocabulary is not None and state.get("words"):
            self._vocabulary.restore(state["words"])
            # an update can come before the next rollout
            self._trainer.set_draft_vocabulary(self._vocabulary.ids())

"""A fresh drafter learns from the newest rollouts several times more, after each of a run's first steps.

`commands/training.py` chooses this schedule with `drafter.fresh`, unless the options need that of `online.py`, and not
in a replay. `run/drafter_training.py` calls it. As in `online.py`, its updates change only the drafter's parameters:
for given rollouts the policy's update is the same as without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.host import ranks
from megatron_rlspec.run.batches import micro_batches
from megatron_rlspec.run.drafter_training import AUTO_SHARE
from megatron_rlspec.run.extension import DrafterSchedule
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, Sample, samples_of

# Steps have extra updates until both are reached: `LEAST_STEPS` steps of the run, and `LEAST_READ` tokens that extra
# updates have read. A token counts each time it is read.
LEAST_STEPS = 10
LEAST_READ = 262144
# After a step the drafter learns from the newest `NEWEST_TOKENS` tokens, of several steps if one has fewer, or from
# `AUTO_SHARE` of the step's own tokens if that is more.
NEWEST_TOKENS = 32768
# An extra update reads 1 / UPDATES_PER_STEP of as many samples as the step has. Stored rollouts of earlier steps are
# read, too, so a step can have more than UPDATES_PER_STEP extra updates.
UPDATES_PER_STEP = 8
# The extra updates of a step may take the smaller of: this share of the seconds of its rollout and its training, and
# this share of the seconds of its rollout.
SHARE_OF_STEP = 0.25
SHARE_OF_ROLLOUT = 0.5


def tokens_of(samples: Sequence[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


class FreshLearner(DrafterSchedule):
    """Updates a fresh drafter several times more after each of a run's first steps."""

    def __init__(
        self,
        trainer: Trainer,
        load_policy: Callable[[int], None] | None,
        state: Mapping[str, Any],
        groups: Sequence[Group],
    ) -> None:
        """Begin, or continue from a checkpoint. `state` and `groups` are what `state()` returned, or empty.

        `load_policy` is for replays of a recorded run, which do not use this schedule.
        """
        self._trainer = trainer
        self._learnt = int(state.get("learnt", 0))  # tokens that extra updates have read
        # what extra updates read, the oldest group first; `teach` adds the present step's rollouts
        self._rollouts = list(groups)
        self._newest: Sequence[Group] = ()  # the rollouts of the present step

    def observe(self, groups: Sequence[Group]) -> None:
        """Take the rollouts of the next `train_step`."""
        self._newest = groups

    def train_step(
        self, step: int, train: Callable[[bool], dict[str, float]], rollout_seconds: float | None
    ) -> dict[str, float]:
        """See `DrafterSchedule.train_step`. `observe` must have got the step's rollouts. Collective."""
        began = time.perf_counter()
        metrics = train(True)
        if self._ended(step):
            return metrics
        # None on ranks above 0. Their time limit is not used: `teach` follows rank 0's. NaN if a checkpoint had the
        # rollout: then the limit below is NaN, too.
        rollout = rollout_seconds or 0.0
        of_step = SHARE_OF_STEP * (rollout + time.perf_counter() - began)
        return metrics | self.teach(step, min(of_step, SHARE_OF_ROLLOUT * rollout))

    def _ended(self, step: int) -> bool:
        """Return whether `step`, counted from 0, has no extra updates any more: `step` steps have ended before it."""
        return step >= LEAST_STEPS and self._learnt >= LEAST_READ

    def teach(self, step: int, seconds: float) -> dict[str, float]:
        """Update the drafter on the newest rollouts. The policy runs forward only. Collective. Returns metrics.

        Call it once in a step, after `observe` of its rollouts, at least one sample: each call stores them.

        The first update always runs. Another one runs only if it will probably end within `seconds` of rank 0, by the
        clock of rank 0; none if `seconds` is NaN. With train.deterministic all of them run, because no result may
        depend on a clock.
        """
        began = time.perf_counter()
        newest = samples_of(self._newest)
        most_tokens = max(NEWEST_TOKENS, int(AUTO_SHARE * tokens_of(newest)))
        self._rollouts += self._newest
        while len(self._rollouts) > 1 and tokens_of(samples_of(self._rollouts)) > most_tokens:
            del self._rollouts[0]
        samples = samples_of(self._rollouts)
        # Seeded by the step alone: all ranks, and a resumed run, take the same order.
        order = np.random.default_rng(step).permutation(len(samples))
        samples_per_update = -(-len(newest) // UPDATES_PER_STEP)  # rounded up
        updates = -(-len(order) // samples_per_update)  # rounded up
        prediction = self._trainer.prediction
        spent = 0.0
        for done, part in enumerate(np.array_split(order, updates), start=1):
            taught = [samples[i] for i in part]
            batches = micro_batches(self._trainer, taught)
            self._trainer.train_step(batches, objective="grpo", train_policy=False)
            self._learnt += tokens_of(taught)
            spent = time.perf_counter() - began
            # Whether the next update would end too late. Not by `>`, which is false if `seconds` is NaN.
            late = not spent * (done + 1) / done <= seconds
            # `tell` is collective: every rank calls it after every update, and gets rank 0's answer.
            if not self._trainer.config.train.deterministic and ranks.job().tell(int(late)):
                break
        # Each update has overwritten `trainer.prediction`, of the next rollout's acceptance. Put back that of the
        # policy's step: then the drafter had not learnt from these texts, just as it will not know those of the next
        # rollout.
        self._trainer.prediction = prediction
        if self._ended(step + 1):  # no later step reads the stored rollouts
            self._rollouts = []
        return {"drafter/seconds_fresh": spent}

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        """Return the state for a checkpoint, and the stored rollouts. `__init__` reads both."""
        return {"learnt": self._learnt}, self._rollouts

"""A fresh drafter learns from the newest rollouts again, after each of a run's first steps (`drafter.fresh`).

Only the drafter's parameters change, so the policy and its texts are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.host import ranks
from megatron_rlspec.run.batches import micro_batches
from megatron_rlspec.run.drafter_training import SHARE
from megatron_rlspec.run.extension import DrafterSchedule
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, Sample, samples_of

# The extra updates stop when both of these are reached. A run with small steps needs more than ten for the tokens.
STEPS = 10
LEARNT = 262144  # tokens that the drafter has learnt from
UPDATES = 8  # so many updates have as many samples as one step
TOKENS = 32768  # the drafter learns from so many of the newest tokens, or from `SHARE` of the step's if these are more
# The extra updates of a step may take these shares: of the step's seconds, and of the seconds of its generation.
OF_STEP = 0.25
OF_GENERATION = 0.5


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
        """Take up `state` and `groups`, which a checkpoint has of `state()`; see `DrafterScheduleBuilder`."""
        self._trainer = trainer
        self._learnt = int(state.get("learnt", 0))  # tokens
        self._rollouts = list(groups)
        self._newest: Sequence[Group] = ()

    def observe(self, groups: Sequence[Group]) -> None:
        self._newest = groups

    def train_step(
        self, step: int, train: Callable[[bool], dict[str, float]], rollout_seconds: float | None
    ) -> dict[str, float]:
        began = time.perf_counter()
        metrics = train(True)
        if self._ended(step):
            return metrics
        generated = rollout_seconds or 0.0
        of_step = OF_STEP * (generated + time.perf_counter() - began)
        return metrics | self.teach(step, min(of_step, OF_GENERATION * generated))

    def _ended(self, step: int) -> bool:
        return step >= STEPS and self._learnt >= LEARNT

    def teach(self, step: int, seconds: float) -> dict[str, float]:
        """Update the drafter on the newest rollouts. The policy runs forward only. Collective. Returns metrics.

        It ends before an update that would exceed `seconds`, by the clock of rank 0. With train.deterministic no clock
        is read.
        """
        began = time.perf_counter()
        newest = samples_of(self._newest)
        most = max(TOKENS, int(SHARE * tokens_of(newest)))
        self._rollouts += self._newest
        while len(self._rollouts) > 1 and tokens_of(samples_of(self._rollouts)) > most:
            del self._rollouts[0]
        samples = samples_of(self._rollouts)
        order = np.random.default_rng(step).permutation(len(samples))
        each = -(-len(newest) // UPDATES)  # samples of an update
        prediction = self._trainer.prediction
        spent = 0.0
        for done, part in enumerate(np.array_split(order, -(-len(order) // each)), start=1):
            taught = [samples[i] for i in part]
            batches = micro_batches(self._trainer, taught)
            self._trainer.train_step(batches, objective="grpo", train_policy=False)
            self._learnt += tokens_of(taught)
            spent = time.perf_counter() - began
            late = spent * (done + 1) / done > seconds  # the next update would be
            if not self._trainer.config.train.deterministic and ranks.job().tell(int(late)):
                break
        # The prediction of the step's own pass stays: the drafter had not learnt from its texts yet.
        self._trainer.prediction = prediction
        if self._ended(step + 1):
            self._rollouts = []
        return {"drafter/seconds_fresh": spent}

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        return {"learnt": self._learnt}, self._rollouts

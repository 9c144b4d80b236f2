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

# The extra updates end when the run has taken `LEAST_STEPS` steps and they have read `LEAST_LEARNT` tokens; a token
# counts each time it is read. With small steps ten are too few for that, and the updates go on.
LEAST_STEPS = 10
LEAST_LEARNT = 262144
# After a step the drafter learns from the newest `NEWEST_TOKENS`, of several steps if one has fewer, or from `SHARE` of
# the step's own tokens if that is more. Each update takes an `UPDATES_PER_STEP`-th of the number of samples of a step.
NEWEST_TOKENS = 32768
UPDATES_PER_STEP = 8
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
        return step >= LEAST_STEPS and self._learnt >= LEAST_LEARNT

    def teach(self, step: int, seconds: float) -> dict[str, float]:
        """Update the drafter on the newest rollouts. The policy runs forward only. Collective. Returns metrics.

        The first update always runs. Another one runs only if it will probably end within `seconds`, by the clock of
        rank 0; with train.deterministic all of them run.
        """
        began = time.perf_counter()
        newest = samples_of(self._newest)
        most_tokens = max(NEWEST_TOKENS, int(SHARE * tokens_of(newest)))
        self._rollouts += self._newest
        while len(self._rollouts) > 1 and tokens_of(samples_of(self._rollouts)) > most_tokens:
            del self._rollouts[0]
        samples = samples_of(self._rollouts)
        # the same order on all ranks
        order = np.random.default_rng(step).permutation(len(samples))
        samples_per_update = -(-len(newest) // UPDATES_PER_STEP)
        updates = -(-len(order) // samples_per_update)
        prediction = self._trainer.prediction
        spent = 0.0
        for done, part in enumerate(np.array_split(order, updates), start=1):
            taught = [samples[i] for i in part]
            batches = micro_batches(self._trainer, taught)
            self._trainer.train_step(batches, objective="grpo", train_policy=False)
            self._learnt += tokens_of(taught)
            spent = time.perf_counter() - began
            late = spent * (done + 1) / done > seconds  # the next update would be
            # `tell` is collective: every rank calls it after every update, and gets rank 0's answer
            if not self._trainer.config.train.deterministic and ranks.job().tell(int(late)):
                break
        # The prediction of the step's own pass stays: the drafter had not learnt from its texts yet.
        self._trainer.prediction = prediction
        if self._ended(step + 1):
            self._rollouts = []
        return {"drafter/seconds_fresh": spent}

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        return {"learnt": self._learnt}, self._rollouts

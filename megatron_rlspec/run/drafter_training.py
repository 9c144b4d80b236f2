"""What the drafter learns from, and when; and the tokens that drafts are chosen from.

`session.py` calls `Drafting` on every rank. The schedule, which an extension may replace, decides on steps and on
rollouts. This file has what is equal for every schedule: the part of the samples (`drafter.share`), and the draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_rlspec.run.extension import DrafterSchedule, DrafterScheduleBuilder
from megatron_rlspec.run.loading import Loaded
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, Sample, samples_of

# With drafter.share=auto the drafter learns from this part of a step's tokens, but from AUTO_LEAST_TOKENS at least: a
# quarter of a small step teaches too little (docs/staleness.md). `drafter_schedules/fresh.py` uses AUTO_SHARE, too.
AUTO_SHARE = 0.25
AUTO_LEAST_TOKENS = 2048


def chosen_samples(lengths: Sequence[int], share: float | None, seed: Sequence[int]) -> np.ndarray:
    """Return which of a step's samples the drafter learns from, `[samples]` float32: 1 if it does, else 0.

    At least one is chosen. The choice follows from the arguments, so all ranks choose the same.

    lengths  tokens of each sample, of which there is at least one
    share    part of the samples; None: as many as have `AUTO_SHARE` of the tokens, or AUTO_LEAST_TOKENS if that is
             more
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    if share is None:
        wanted = max(AUTO_LEAST_TOKENS, AUTO_SHARE * sum(lengths))
        tokens_so_far = np.cumsum(np.asarray(lengths)[order])
        # As many samples as have `wanted` tokens, in this order. One more than there are samples if all have fewer
        # tokens; the slice below then has all.
        number = int(np.searchsorted(tokens_so_far, wanted)) + 1
    else:
        number = max(1, round(share * len(lengths)))
    chosen = np.zeros(len(lengths), np.float32)
    chosen[order[:number]] = 1
    return chosen


class Drafting:
    """The drafter's side of every step. Every rank holds one, and all see the same rollouts.

    schedule  decides on updates: which steps, which samples
    tokens    that trained the drafter at depth 1 in the run so far
    """

    def __init__(
        self,
        trainer: Trainer,
        loaded: Loaded,
        extension: DrafterScheduleBuilder | None,
        state: Mapping[str, Any],
        rollouts: Sequence[Group],
        supervised: bool,
    ) -> None:
        """Begin, or continue with what `state` returned for a checkpoint; `state` and `rollouts` are empty otherwise.

        extension   builds the schedule; None: an update in every step
        supervised  whether this is a warm start, which learns from every batch alike
        """
        self._trainer = trainer
        self._vocabulary = loaded.vocabulary
        # whether the drafter learns from rollouts: then by a schedule, and perhaps from a part of the samples only
        self._learns = trainer.config.drafter.train and not supervised
        self.schedule = DrafterSchedule()
        if self._learns and extension is not None:
            load_policy = None
            if loaded.followed is not None:
                load_policy = partial(loaded.followed.load, trainer)
            # "online" is the schedule's own state, whichever schedule it is.
            self.schedule = extension(trainer, load_policy, state.get("online", {}), rollouts)
        self.tokens = int(state.get("tokens", 0))
        if self._vocabulary is not None and state.get("words"):
            self._vocabulary.restore(state["words"])
            # now, and not only at `observe`: with drafter.overlap an update comes before it
            trainer.set_draft_vocabulary(self._vocabulary.ids())

    def weights(self, step: int, samples: Sequence[Sample]) -> np.ndarray | None:
        """Return the drafter's weight of every sample of a step, `[n]`; None if all are 1.

        With `drafter.share` samples that are left out have the weight 0.
        """
        weights = self.schedule.weights(samples)
        config = self._trainer.config
        if not config.drafter.learns_part or not self._learns:
            return weights
        lengths = [len(sample.tokens) for sample in samples]
        chosen = chosen_samples(lengths, config.drafter.share, (config.train.seed, step))
        if chosen.all():
            return weights
        return chosen if weights is None else weights * chosen

    def observe(self, groups: Sequence[Group]) -> None:
        """Take the rollouts, or demonstrations, of the next step. Sets the trainer's draft vocabulary by their tokens.

        The engines get that vocabulary with the next push (`hot_tokens`). Call this once in a step: every call counts
        the tokens again.
        """
        self.schedule.observe(groups)
        if self._vocabulary is not None:
            samples = samples_of(groups)
            self._vocabulary.observe(sample.response for sample in samples)
            self._trainer.set_draft_vocabulary(self._vocabulary.ids())

    def train_step(
        self,
        step: int,
        train: Callable[..., dict[str, float]],
        rollout_seconds: float | None,
    ) -> dict[str, float]:
        """Update policy and drafter by `train`, which is `train_rollout` of the step. Returns the metrics. Collective.

        Call it once in a step, after `observe`.

        rollout_seconds  as in `DrafterSchedule.train_step`
        """
        metrics = self.schedule.train_step(
            step, lambda learns: train(train_drafter=learns), rollout_seconds
        )
        if self._learns:
            metrics.setdefault("drafter/updated", 1.0)  # a schedule may have set it
        self.tokens += int(metrics.get("drafter/tokens_1", 0))
        return metrics

    def hot_tokens(self) -> np.ndarray | None:
        """Return the ids that drafts are chosen from, ascending; None if drafts are chosen from all."""
        if self._vocabulary is None:
            return None
        return self._vocabulary.ids()

    def state(self) -> tuple[dict[str, Any], Sequence[Group]]:
        """Return the state for a checkpoint, and the rollouts that the schedule keeps. `__init__` reads both."""
        state: dict[str, Any] = {"tokens": self.tokens}
        if self._vocabulary is not None:
            state["words"] = self._vocabulary.state()
        state["online"], groups = self.schedule.state()
        return state, groups

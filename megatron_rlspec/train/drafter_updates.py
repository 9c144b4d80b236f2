"""Which steps train the drafter, and how much the samples of a step weigh by their rewards. No torch, no Megatron.

`extensions/drafter_schedules` uses both for our loop. The denominator of the drafter's loss is the sum of the
weights over the trained tokens (`packing/pack.py`), so only the weights' ratios matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

CLIP = 4.0  # a sample weighs at most CLIP times as much as one with the mean reward, and at least 1 / CLIP


class EverySteps:
    """The rule of drafter.update_every: update in the first step that can, and then every `every` steps.

    Read `due` before a step and call `count_step` once after it, on every rank: all ranks must decide alike. Rules that
    watch acceptance, or the time that an update saves, were worse than this one (docs/staleness.md).

    every               1 or more
    steps_since_update  ended steps since the last update; at first `every`, so that the first step is due
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps_since_update = every

    @property
    def due(self) -> bool:
        """Return whether the next step updates the drafter."""
        return self.steps_since_update + 1 >= self.every

    def count_step(self, updated: bool) -> None:
        """Count a step that has ended; `updated`: whether it updated the drafter. A missed update stays due."""
        self.steps_since_update = 0 if updated else self.steps_since_update + 1

    def state(self) -> dict[str, int]:
        """Return the state, as JSON, for the file beside a checkpoint. The key is part of that file's format."""
        return {"since": self.steps_since_update}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore what `state` returned."""
        self.steps_since_update = int(state["since"])


def reward_weights(
    rewards: Sequence[float] | np.ndarray, known: Sequence[bool] | None = None
) -> np.ndarray:
    """Return w(r) of each sample, `[n]` float64, all positive (ReSpec, section 5.3.1: normalised and clipped).

    w(r) is r divided by the mean, clipped to [1 / CLIP, CLIP]. If some reward is negative, the least one is first
    subtracted from all. All weights are 1 if the known rewards are all equal, or there are none.

    rewards  `[n]`, finite where they are known
    known    whether each reward is known; None: all are. A sample whose reward failed weighs 1, and the mean is without
             it
    """
    is_known = np.ones(len(rewards), bool) if known is None else np.asarray(known, bool)
    weights = np.ones(len(rewards))
    known_rewards = np.asarray(rewards, np.float64)[is_known]
    # Equal rewards say nothing, and if all are 0, so is their mean.
    if not len(known_rewards) or known_rewards.min() == known_rewards.max():
        return weights
    shifted = known_rewards - min(0.0, known_rewards.min())
    weights[is_known] = np.clip(shifted / shifted.mean(), 1 / CLIP, CLIP)
    return weights

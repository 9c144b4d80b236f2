"""Which steps train the drafter, and how much the samples of a step weigh by their rewards. Numpy only.

Our loop uses both through `extensions/drafter_schedules`.
The denominator of the drafter's loss is the sum of the weights (`packing/pack.py`), so only their ratios matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

CLIP = 4.0  # a sample weighs at most so many times as much as the mean


class EverySteps:
    """Updates in the first step that can, and then every `every` steps.

    Rules that watch acceptance, or the time that an update saves, ended behind this one (docs/staleness.md).
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.since = every  # steps since the last update; so many at first

    @property
    def due(self) -> bool:
        """Return whether the next step updates the drafter. Without `observe` the answer stays."""
        return self.since + 1 >= self.every

    def observe(self, updated: bool) -> None:
        """Count a step."""
        self.since = 0 if updated else self.since + 1

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"since": self.since}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore what `state` returned."""
        self.since = int(state["since"])


def reward_weights(
    rewards: Sequence[float] | np.ndarray, known: Sequence[bool] | None = None
) -> np.ndarray:
    """Return w(r) of each sample, `[n]` float64, all positive (ReSpec, section 5.3.1: normalised and clipped).

    w(r) is r divided by the mean, clipped to [1 / CLIP, CLIP]. If some reward is negative, r minus the least one takes
    the place of r. A sample that is not `known` (its reward failed) weighs 1 and does not enter the mean. All weights
    are 1 if the known rewards are all equal.
    """
    rated = np.ones(len(rewards), bool) if known is None else np.asarray(known, bool)
    weights = np.ones(len(rewards))
    r = np.asarray(rewards, np.float64)[rated]
    if not len(r) or r.min() == r.max():
        return weights
    value = r - min(0.0, r.min())
    weights[rated] = np.clip(value / value.mean(), 1 / CLIP, CLIP)
    return weights

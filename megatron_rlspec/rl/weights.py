"""What the drafter's training weighs: the reward of a sample, and the positions where engines refused a draft.

The denominator of the drafter's loss is the sum of the weights (`packing/pack.py`), so only their ratios matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from megatron_rlspec.types import Sample

RewardWeight = Literal["none", "reward", "rank"]


def reward_weights(
    rewards: Sequence[float] | np.ndarray,
    kind: RewardWeight,
    *,
    clip: float = 4.0,
    known: Sequence[bool] | None = None,
) -> np.ndarray:
    """Return w(r) of each sample, `[n]` float64, all positive (ReSpec, section 5.3.1: normalised and clipped).

    none    1
    reward  r divided by the mean; if some reward is negative, r minus the least one takes the place of r
    rank    the rank from 1 to n, equal rewards sharing the mean of theirs, divided by the mean rank

    Weights are clipped to [1 / clip, clip]. A sample that is not `known` (its reward failed) weighs 1 and does not
    enter the mean. All weights are 1 if the known rewards are all equal. Raises ValueError if `clip` is below 1.
    """
    if clip < 1:
        raise ValueError(f"clip={clip} leaves no weight between 1 / clip and clip; expected 1 or more")
    rated = np.ones(len(rewards), bool) if known is None else np.asarray(known, bool)
    weights = np.ones(len(rewards))
    r = np.asarray(rewards, np.float64)[rated]
    if kind == "none" or not len(r) or r.min() == r.max():
        return weights
    if kind == "rank":
        _, which, counts = np.unique(r, return_inverse=True, return_counts=True)
        last = counts.cumsum()
        value = (last - (counts - 1) / 2)[which]
    else:
        value = r - min(0.0, r.min())
    weights[rated] = np.clip(value / value.mean(), 1 / clip, clip)
    return weights


def refused_positions(sample: Sample, deepest: int) -> np.ndarray:
    """Return, `[L]` bool, the positions from which an engine drafted a token that the target refused.

    deepest  most steps of a round; a round that accepted so many drafts refused none

    A round emits its accepted drafts (`accepted_spans`), then one token of the target's. It drafted from the position
    t whose next token, t + 1, was the newest one when it began: the drafter's predictions at t are those of that round.
    A round that ran fewer steps than `deepest` and accepted all of them counts as refused, and so does a round without
    drafts: samples do not say how many steps a round ran.
    """
    found = np.zeros(len(sample.tokens), bool)
    if deepest < 1:
        return found
    begins = {last: first for first, last in sample.accepted_spans}
    drafted = np.zeros(len(sample.response), bool)
    for first, last in sample.accepted_spans:
        drafted[first:last] = True
    for end in np.flatnonzero(~drafted).tolist():  # the target's own token, the last one of its round
        begin = begins.get(end, end)
        position = sample.prompt_len + begin - 2
        if end - begin < deepest and position >= 0:
            found[position] = True
    return found


def drafter_weights(
    samples: Sequence[Sample],
    known: Sequence[bool],
    *,
    kind: RewardWeight,
    clip: float,
    refused: float = 1.0,
    deepest: int = 0,
) -> list[np.ndarray]:
    """Return the weight of every position, `[L]` float32 per sample, for `pack`.

    It is `reward_weights` of the sample, times `refused` at its `refused_positions`.
    """
    of_samples = reward_weights([sample.reward for sample in samples], kind, clip=clip, known=known)
    found = []
    for sample, weight in zip(samples, of_samples, strict=True):
        row = np.full(len(sample.tokens), weight, np.float32)
        if refused != 1:
            row[refused_positions(sample, deepest)] *= refused
        found.append(row)
    return found

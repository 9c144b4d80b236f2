"""Summarise the samples of a rollout: numbers for the records, and lines about one sample and missing advantages.

`generation.py`, `rollouts.py` and `recording.py` call these functions. None changes a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_rlspec import texts
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.tasks import rewards
from megatron_rlspec.types import Group, Sample

# an event shows so many characters from the beginning of a text, and as many from its end
SHOWN = 40


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Summarise reward, length and speculation of samples, of which there is at least one.

    The keys become metrics `rollout/NAME` and `eval/NAME` (`records/metric_names.toml`). Lengths are tokens. The accept
    length is a ratio of sums over all rounds. A reward that failed enters no mean. If all failed, there is no `reward`.
    """
    lengths = [len(sample.response) for sample in samples]
    values = {
        "samples": float(len(samples)),
        "failed_rewards": float(sum(rewards.failed(sample) for sample in samples)),
        "accept_length": accept_length(pooled(sample.accepted for sample in samples)),
        "response_tokens": float(sum(lengths)),
        "response_length": float(np.mean(lengths)),
        "median_response": float(np.median(lengths)),
        "p90_response": float(np.percentile(lengths, 90)),
        "longest_response": float(max(lengths)),
        "truncated": float(np.mean([sample.status == "truncated" for sample in samples])),
    }
    succeeded = rewards.known_rewards(samples)
    if succeeded:
        values["reward"] = float(np.mean(succeeded))
        values["reward_std"] = float(np.std(succeeded))
    # In this order: a part that a user named `std` must not replace `reward_std`.
    return _reward_parts(samples) | values


def _reward_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each part of the rewards over the samples that have it, as `reward_NAME`."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metadata.get("reward_parts", {}).items():
            parts.setdefault(f"reward_{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def best_of(groups: Sequence[Group]) -> dict[int, float]:
    """Return the expected best reward of k samples of a prompt, for k = 2, 4, 8, ... below n, and n; {} for n = 1.

    n is the number of samples of the smallest group. For rewards of 0 and 1 this is the unbiased estimate of pass@k. A
    failed reward counts 0. There is at least one group, and none is empty.
    """
    smallest = min(len(group.samples) for group in groups)
    sizes = [2**i for i in range(1, 32) if 2**i < smallest]  # 2**31 is more than any group has
    if smallest > 1:
        sizes.append(smallest)
    best = {}
    for k in sizes:
        best[k] = float(np.mean([_best_of(group, k) for group in groups]))
    return best


def _best_of(group: Group, k: int) -> float:
    """Return the expected best reward of k different samples of a group, drawn at random; k is at most their number."""
    values = sorted(0.0 if rewards.failed(s) else s.reward for s in group.samples)
    total = 0.0
    for rank, reward in enumerate(values):
        # The sample of this rank, from 0, is the best of k with C(rank, k - 1) of the C(n, k) choices.
        total += math.comb(rank, k - 1) * reward
    return total / math.comb(len(values), k)


def without_advantage(samples: Sequence[Sample]) -> str:
    """Return a line that says that no group of a step has an advantage, with the first scored sample as an example.

    At least one reward must not have failed.
    """
    example = next(sample for sample in samples if not rewards.failed(sample))
    return (
        "no group has an advantage, as if all its samples were equally good, so the policy learns nothing. An example: "
        f"{scored(example)}"
    )


def scored(sample: Sample) -> str:
    """Return one line about a sample: what its reward was given (prompt, response, label), and the reward."""
    reward = "failed" if rewards.failed(sample) else f"{sample.reward:g}"
    prompt_and_response = f"prompt {_ends(sample.prompt.text)}, response {_ends(sample.text)}"
    return f"{prompt_and_response}, label {_ends(sample.prompt.label)}, reward {reward}"


def _ends(text: str) -> str:
    """Return a text, or the beginning and end of a long one, quoted, with control characters escaped."""
    return texts.shown(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}...{text[-SHOWN:]}")

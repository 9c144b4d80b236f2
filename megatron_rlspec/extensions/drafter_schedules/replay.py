"""A bounded buffer of rollouts, from which the drafter learns again. Numpy only.

It keeps tokens, mask and log-probabilities (9 bytes a token), the reward and the versions of the policy. It keeps no
hidden states: today's policy computes them again when the drafter learns. Stored ones would be of an older policy than
today's output layer, and take 2 bytes times the hidden size for every token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megatron_rlspec.tasks.rewards import failed
from megatron_rlspec.train.drafter_updates import reward_weights
from megatron_rlspec.types import Group, Prompt, Sample

Draw = Literal["newest", "uniform", "reward"]
LEAST = 16  # tokens that a sample counts: the Python objects around its arrays take about 1.6 KB


class ReplayBuffer:
    """Samples of past rollouts, the oldest first; `add` drops the oldest ones beyond the bound.

    max_tokens  bound, of which a sample counts `LEAST` at least; the newest sample stays in any case
    tokens      now held, counted so
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.tokens = 0
        self.newest = 0  # samples of the last `add` that are still held
        self._samples: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, samples: Sequence[Sample]) -> None:
        """Append the samples of one rollout."""
        for sample in samples:
            self._append(_compact(sample))
        self.newest = min(len(samples), len(self._samples))

    def _append(self, sample: Sample) -> None:
        self._samples.append(sample)
        self.tokens += max(len(sample.tokens), LEAST)
        while len(self._samples) > 1 and self.tokens > self.max_tokens:
            self.tokens -= max(len(self._samples.popleft().tokens), LEAST)

    def draw(self, by: Draw, seed: Sequence[int]) -> list[Sample]:
        """Return different samples, of together at most as many tokens as the last `add` holds, but at least one.

        newest   the newest ones, the newest first
        uniform  every sample is as likely
        reward   as likely as `reward_weights`

        Nothing if the buffer is empty. The draw depends on the buffer and the seed only, so all ranks and a resumed run
        draw alike. Without replacement in proportion to weights: Efraimidis and Spirakis, 2006.
        """
        samples = list(self._samples)
        if not samples:
            return []
        newest = samples[len(samples) - self.newest :]
        tokens = sum(len(sample.tokens) for sample in newest)
        order = np.arange(len(samples))[::-1]
        if by != "newest":
            keys = np.random.default_rng(list(seed)).gumbel(size=len(samples))
            if by == "reward":
                known = [not failed(sample) for sample in samples]
                weights = reward_weights([sample.reward for sample in samples], known)
                keys += np.log(weights)
            order = np.argsort(-keys, kind="stable")
        chosen: list[Sample] = []
        for index in order.tolist():
            sample = samples[index]
            if chosen and len(sample.tokens) > tokens:
                break
            tokens -= len(sample.tokens)
            chosen.append(sample)
        return chosen

    def groups(self) -> list[Group]:
        """Return the content for a checkpoint: one group of the older samples, one of the last `add`; [] if empty."""
        samples = list(self._samples)
        if not samples:
            return []
        first_of_newest = len(samples) - self.newest
        no_prompt = Prompt(0, np.zeros(0, np.int32))
        groups = []
        for part in (samples[:first_of_newest], samples[first_of_newest:]):
            prompt = part[0].prompt if part else no_prompt
            groups.append(Group(prompt, part))
        return groups

    def restore(self, groups: Sequence[Group]) -> None:
        """Restore what `groups` returned, within this buffer's bounds."""
        self.clear()
        for group in groups:
            self.add(group.samples)


def _compact(sample: Sample) -> Sample:
    """Copy a sample with small types, and without texts."""
    tokens = sample.tokens.astype(np.int32)
    prompt = Prompt(sample.prompt.id, tokens[: sample.prompt_len])
    metadata = {}
    if "reward_error" in sample.metadata:
        metadata["reward_error"] = sample.metadata["reward_error"]
    return replace(
        sample,
        prompt=prompt,
        tokens=tokens,
        loss_mask=sample.loss_mask != 0,
        behaviour_logprobs=sample.behaviour_logprobs.astype(np.float32),
        accepted_spans=(),
        text="",
        metadata=metadata,
    )

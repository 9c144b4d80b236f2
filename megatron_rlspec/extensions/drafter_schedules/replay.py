"""A bounded buffer of rollouts, from which the drafter learns again (`online.py`). It imports no torch.

It keeps tokens, mask and log-probabilities (9 bytes a token), the reward and the versions of the policy. It keeps no
hidden states: the present policy computes them again when the drafter learns. Stored hidden states would be of an older
policy than the present output layer, and take 2 bytes times the hidden size for every token.

All ranks hold equal buffers, because all get the same rollouts.
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

DrawBy = Literal["newest", "uniform", "reward"]
# A sample with fewer tokens counts as so many: its Python objects take more than 1 KB, so a buffer of very short
# samples would need far more memory than its tokens.
LEAST_COUNTED = 16


class ReplayBuffer:
    """Samples of past rollouts, the oldest first; `add` drops the oldest ones beyond the bound.

    max_tokens  the bound (`drafter.replay_tokens`); a sample counts its tokens, or `LEAST_COUNTED` if it has fewer. The
                newest sample stays even if it exceeds the bound
    tokens      of the stored samples, counted in the same way
    newest      how many of the stored samples came with the last `add`
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.tokens = 0
        self.newest = 0
        self._samples: deque[Sample] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, samples: Sequence[Sample]) -> None:
        """Append copies of the samples of one rollout. Call it once for a rollout: it sets `newest`."""
        for sample in samples:
            self._append(_compact(sample))
        self.newest = min(len(samples), len(self._samples))

    def _append(self, sample: Sample) -> None:
        self._samples.append(sample)
        self.tokens += max(len(sample.tokens), LEAST_COUNTED)
        while len(self._samples) > 1 and self.tokens > self.max_tokens:
            self.tokens -= max(len(self._samples.popleft().tokens), LEAST_COUNTED)

    def draw(self, by: DrawBy, seed: Sequence[int]) -> list[Sample]:
        """Draw samples without replacement, of at most as many tokens as the stored samples of the last `add`.

        by = newest   the newest samples, the newest first
        by = uniform  every sample is equally likely
        by = reward   in proportion to `reward_weights`

        The samples stay in the buffer. At least one is drawn, also if it has more tokens; none if the buffer is empty.
        The draw depends on the buffer and the seed only. So all ranks, whose buffers are equal, draw the same samples,
        and a resumed run does, too.
        """
        samples = list(self._samples)
        if not samples:
            return []
        newest = samples[len(samples) - self.newest :]
        room = sum(len(sample.tokens) for sample in newest)  # tokens that may still be drawn
        order = np.arange(len(samples))[::-1]  # the newest sample first
        if by != "newest":
            # The largest keys of Gumbel noise + log(weight) are a draw without replacement in proportion to the weights
            # (Efraimidis and Spirakis, 2006, in another form). `reward_weights` are above 0.
            keys = np.random.default_rng(list(seed)).gumbel(size=len(samples))
            if by == "reward":
                succeeded = [not failed(sample) for sample in samples]
                weights = reward_weights([sample.reward for sample in samples], succeeded)
                keys += np.log(weights)
            order = np.argsort(-keys, kind="stable")
        chosen: list[Sample] = []
        for index in order.tolist():
            sample = samples[index]
            if chosen and len(sample.tokens) > room:
                break  # to go on with shorter ones would prefer short samples
            room -= len(sample.tokens)
            chosen.append(sample)
        return chosen

    def groups(self) -> list[Group]:
        """Return the content for a checkpoint: a group of the older samples, and one of the last `add`; [] if empty.

        Two groups, because `restore` must know which samples came with the last `add`. They are not GRPO groups: each
        sample has its own prompt, and that of the group is not read.
        """
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
        """Restore what `groups` returned, within this buffer's bound, which may be smaller than that of before."""
        self.clear()
        for group in groups:  # the last group is that of the last `add`, and sets `newest`
            self.add(group.samples)


def _compact(sample: Sample) -> Sample:
    """Copy a sample with small types, and without what the drafter's update does not read, such as texts."""
    tokens = sample.tokens.astype(np.int32)
    prompt = Prompt(sample.prompt.id, tokens[: sample.prompt_len])
    metadata = {}
    # `rewards.failed` reads this key.
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

"""Rollouts to micro-batches: the advantages of samples within their group, then this rank's part, packed.

`Session.pack` calls all three in this order. Evaluations and the drafter's own updates call `micro_batches` only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rlspec import custom
from megatron_rlspec.config import AlgorithmConfig
from megatron_rlspec.losses import grpo
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.tasks import rewards
from megatron_rlspec.train import runtime
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, PackedBatch, Sample


def advantages(algorithm: AlgorithmConfig, longest: int, group: Group) -> list[float]:
    """Return the advantage of every sample of a group, in their order.

    longest  tokens that a response may have (rollout.max_new_tokens)
    group    with rewards. It is not changed
    """
    shaped = []  # rewards, with the penalty of responses that are too long
    for sample in group.samples:
        length = len(sample.response)
        penalty = grpo.overlong_penalty(length, max_length=longest, zone=algorithm.overlong_tokens)
        shaped.append(sample.reward + penalty)
    # A failed reward is 0 in `sample.reward`. It must not enter the group's mean.
    succeeded = [not rewards.failed(sample) for sample in group.samples]
    if custom.is_function(algorithm.advantage):
        function = custom.load("algorithm.advantage", algorithm.advantage)
        return grpo.own_advantages(function, group.samples, shaped, succeeded, algorithm).tolist()
    return grpo.advantages(shaped, normalise_std=algorithm.normalise_std, known=succeeded).tolist()


def mini_batches(groups: Sequence[Group], updates: int) -> list[slice]:
    """Divide the samples of a step into `updates` parts of whole groups, fewer if there are fewer groups.

    There must be at least one group, and none may be empty. Returns slices of `samples_of(groups)`, none of them empty.
    """
    # index of the first sample after each group
    ends = np.cumsum([len(group.samples) for group in groups])
    parts = []
    first = 0
    for part in np.array_split(ends, min(updates, len(groups))):
        last = int(part[-1])
        parts.append(slice(first, last))
        first = last
    return parts


def micro_batches(
    trainer: Trainer,
    samples: Sequence[Sample],
    advantages: Sequence[float] | None = None,
    *,
    version: int | None = None,
    drafter_weights: np.ndarray | None = None,
    depth: int = 0,
    supervised: bool = False,
) -> list[PackedBatch]:
    """Return this rank's micro-batches of one optimizer step. `Trainer.train_step` takes them.

    All ranks must pass the same samples: each packs all of them and takes its share, without communication.

    samples          of all ranks
    advantages       of each sample; None: 0
    version          of the policy that trains on them, for `PackedBatch.staleness`
    drafter_weights  of each sample, `[n]`; None: 1
    depth            drafts that the drafter learns or is measured on at each position; 0: drafter.depth
    supervised       whether these are demonstrations, which no policy of the run has sampled. The loss is then a mean
                     over all tokens, whatever [algorithm] says
    """
    config = trainer.config
    parallel = config.parallel
    return pack(
        samples,
        advantages=advantages,
        drafter_weights=drafter_weights,
        depth=depth or config.drafter.depth,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
        # Without older samples staleness would be 0 everywhere, so the batches do not have it.
        version=version if config.rollout.max_lag and not supervised else None,
        aggregation="token" if supervised else config.algorithm.aggregation,
        constant_length=config.rollout.max_new_tokens,
        **runtime.placement(),
        # Sequence parallelism splits a micro-batch's tokens over these ranks.
        multiple=parallel.tensor if parallel.sequence else 1,
    )

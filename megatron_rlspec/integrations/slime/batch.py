"""slime's micro-batches and rollout data, as the sequences that the drafter learns from.

slime lays sequences out one after the other, each padded to a multiple of 2·cp under zigzag, with one more sequence of
padding at the end; `packed_seq_params.cu_seqlens_q` holds those boundaries before the split. Every rank still has
tokens and masks of whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_rlspec.cotrainer.fields import Sequences
from megatron_rlspec.train.drafter_updates import reward_weights


def sample_weights(rollout_data: Mapping[str, Any], kind: str) -> list[float]:
    """Return the drafter's weight of each sample of this data-parallel rank, by its reward.

    slime hands every rank the rewards of the whole rollout (`raw_reward`), so all ranks divide by one mean.
    """
    if kind == "none":
        return [1.0] * len(rollout_data["total_lengths"])
    weights = reward_weights(rollout_data["raw_reward"])
    return [float(weights[i]) for i in rollout_data["partition"]]


def micro_batch(
    batch: Mapping[str, Any], weights: Sequence[float] = (), seeds: Sequence[int] = ()
) -> Sequences:
    """Return the sequences of slime's `get_batch`: its `unconcat_tokens`, response masks and boundaries."""
    tokens: Sequence[torch.Tensor] = batch["unconcat_tokens"]
    masks = []
    for sample, response_mask in zip(tokens, batch["loss_masks"], strict=True):
        masks.append(token_mask(len(sample), response_mask))
    return Sequences(tokens, masks, batch["packed_seq_params"].cu_seqlens_q, weights, seeds)


def trained_tokens(
    rollout_data: Mapping[str, Any],
    samples: Sequence[int],
    depth: int,
    weights: Sequence[float] = (),
) -> list[float]:
    """Sum the weights of the predictions of each depth that these samples of slime's rollout data train: `[depth]`.

    `weights` of all samples of this rank's rollout data; empty: 1
    """
    masks = []
    for i in samples:
        masks.append(token_mask(rollout_data["total_lengths"][i], rollout_data["loss_masks"][i]))
    chosen = [weights[i] for i in samples] if weights else ()
    return Sequences((), masks, torch.zeros(1), chosen).trained(depth)


def token_mask(length: int, response_mask: torch.Tensor) -> torch.Tensor:
    """Extend slime's mask over the response, `[R]`, to all tokens of the sample, `[length]`."""
    mask = torch.zeros(length, dtype=torch.float32, device=response_mask.device)
    mask[length - len(response_mask) :] = response_mask.float()
    return mask

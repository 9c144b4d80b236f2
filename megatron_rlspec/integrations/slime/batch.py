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


def micro_batch(batch: Mapping[str, Any], seeds: Sequence[int] = ()) -> Sequences:
    """Return the sequences of slime's `get_batch`: its `unconcat_tokens`, response masks and boundaries.

    seeds  of the samples, in the order of the batch; () without coupled drafts
    """
    tokens: Sequence[torch.Tensor] = batch["unconcat_tokens"]
    masks = []
    for sample, response_mask in zip(tokens, batch["loss_masks"], strict=True):
        masks.append(token_mask(len(sample), response_mask))
    return Sequences(tokens, masks, batch["packed_seq_params"].cu_seqlens_q, seeds)


def trained_tokens(
    rollout_data: Mapping[str, Any], samples: Sequence[int], depth: int
) -> list[float]:
    """Count the predictions of each depth that these samples of slime's rollout data train: `[depth]`.

    samples  indices into this rank's rollout data
    """
    masks = []
    for i in samples:
        masks.append(token_mask(rollout_data["total_lengths"][i], rollout_data["loss_masks"][i]))
    return Sequences((), masks, torch.zeros(1)).count_trained(depth)


def token_mask(length: int, response_mask: torch.Tensor) -> torch.Tensor:
    """Extend slime's mask over the response, `[R]`, to all tokens of the sample, `[length]`."""
    mask = torch.zeros(length, dtype=torch.float32, device=response_mask.device)
    mask[length - len(response_mask) :] = response_mask.float()
    return mask

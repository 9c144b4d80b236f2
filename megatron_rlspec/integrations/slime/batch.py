"""The drafter's inputs and labels from slime's micro-batches: rolled on whole sequences, then cut for CP ranks.

slime lays sequences out one after the other, each padded to a multiple of 2·cp under zigzag, with one more sequence of
padding at the end; `packed_seq_params.cu_seqlens_q` holds those boundaries before the split. Every rank still
has tokens and masks of whole sequences, so nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rlspec.packing.context_parallel import Layout, slice_for_cp
from megatron_rlspec.packing.pack import predicted
from megatron_rlspec.packing.shift import drafter_targets
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.train.drafter_step import DrafterTargets
from megatron_rlspec.train.drafter_updates import RewardWeight, reward_weights


@dataclass(frozen=True, kw_only=True)
class DrafterFields(DrafterTargets):
    """This rank's share of one micro-batch: what the drafter reads, beside its targets.

    tokens        `[t]` for each depth, as `PackedBatch.drafter_tokens`
    position_ids  `[t]`
    """

    tokens: list[torch.Tensor]
    position_ids: torch.Tensor


def sample_weights(rollout_data: Mapping[str, Any], kind: RewardWeight) -> list[float]:
    """Return the drafter's weight of each sample of this data-parallel rank, by its reward.

    slime hands every rank the rewards of the whole rollout (`raw_reward`), so all ranks divide by one mean.
    """
    if kind == "none":
        return [1.0] * len(rollout_data["total_lengths"])
    weights = reward_weights(rollout_data["raw_reward"], kind)
    return [float(weights[i]) for i in rollout_data["partition"]]


def drafter_fields(
    batch: Mapping[str, Any],
    depth: int,
    cp_rank: int,
    cp_size: int,
    layout: Layout = "zigzag",
    weights: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    counts: Sequence[float] = (),
) -> DrafterFields:
    """Build the fields from slime's `get_batch`: its `unconcat_tokens`, response masks, lengths and boundaries.

    weights  of the samples of the micro-batch; 1 if omitted
    seeds    of the samples' noise, where drafts are coupled
    counts   of the step, as `DrafterTargets.counts`
    """
    samples: Sequence[torch.Tensor] = batch["unconcat_tokens"]
    device = samples[0].device
    cu = batch["packed_seq_params"].cu_seqlens_q.cpu()
    total = int(cu[-1])
    tokens = torch.zeros(total, dtype=torch.int64, device=device)
    mask = torch.zeros(total, dtype=torch.float32, device=device)
    weight = torch.ones(total, dtype=torch.float32, device=device)
    for i, sample in enumerate(samples):
        start = int(cu[i])
        rows = slice(start, start + len(sample))
        tokens[rows] = sample
        mask[rows] = token_mask(len(sample), batch["loss_masks"][i])
        if weights is not None:
            weight[rows] = weights[i]

    def share(x: torch.Tensor) -> torch.Tensor:
        return to_device(slice_for_cp(x, cu, cp_rank, cp_size, layout), device)

    starts = cu[:-1].long().repeat_interleave(cu[1:] - cu[:-1])
    positions = share(torch.arange(total) - starts)
    inputs, labels, masks = drafter_targets(tokens, mask, cu.to(device), depth)
    noise: dict[str, torch.Tensor] = {}
    if seeds is not None:
        noise["seeds"] = share(_seeds(samples, seeds, cu, counts[0] if counts else 0.0))
        noise["positions"] = positions
    return DrafterFields(
        tokens=[share(x) for x in inputs],
        labels=[share(x) for x in labels],
        weight=[share(x * weight) for x in masks],
        counts=counts,
        position_ids=positions,
        cu_seqlens_padded=cu,
        layout=layout,
        **noise,
    )


def _seeds(
    samples: Sequence[torch.Tensor], seeds: Sequence[int], cu: torch.Tensor, step_tokens: float
) -> torch.Tensor:
    """Lay out the seeds of the noise of whole sequences, `[T]`, on the CPU, which waits for no device."""
    total = int(cu[-1])
    of_positions = torch.full((total,), -1, dtype=torch.int64)
    for i, sample in enumerate(samples):
        start = int(cu[i])
        of_positions[start : start + len(sample)] = seeds[i]
    return of_positions.masked_fill(~predicted(total, step_tokens), -1)


def trained_tokens(
    rollout_data: Mapping[str, Any],
    samples: Sequence[int],
    depth: int,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Sum the weights of the predictions of each depth that these samples of slime's rollout data train: `[depth]`.

    `weights` of all samples of this rank's rollout data; 1 if omitted.
    """
    sums = [0.0] * depth
    for i in samples:
        length = rollout_data["total_lengths"][i]
        mask = token_mask(length, rollout_data["loss_masks"][i].cpu())
        tokens = torch.zeros(length, dtype=torch.int64)
        _, _, masks = drafter_targets(tokens, mask, torch.tensor([0, length]), depth)
        weight = 1.0 if weights is None else weights[i]
        for d in range(depth):
            sums[d] += weight * float(masks[d].sum())
    return sums


def token_mask(length: int, response_mask: torch.Tensor) -> torch.Tensor:
    """Extend slime's mask over the response, `[R]`, to all tokens of the sample, `[length]`."""
    mask = torch.zeros(length, dtype=torch.float32, device=response_mask.device)
    mask[length - len(response_mask) :] = response_mask.float()
    return mask

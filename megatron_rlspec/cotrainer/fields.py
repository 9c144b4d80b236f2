"""What a drafter reads and predicts in a micro-batch, made from whole sequences and then cut for context parallelism.

`cotrainer/drafter.py` calls `drafter_fields` for `CoTrainer` and slime; our own loop has the same columns in a
`PackedBatch` (`train/step.py`). Every context-parallel rank has tokens and masks of whole sequences, so ranks exchange
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlspec.packing.context_parallel import slice_for_cp
from megatron_rlspec.packing.pack import predicted_positions
from megatron_rlspec.packing.shift import drafter_targets
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.train.drafter_step import DrafterTargets


@dataclass(frozen=True)
class Sequences:
    """The whole sequences of one micro-batch, in the order in which the micro-batch holds them; at least one.

    tokens   `[L]` int64 of each sequence, all on the model's device; L is its length without padding
    masks    `[L]` of each sequence: 1 where the token itself is trained, else 0; on any device
    starts   `[n + 1]` int: where sequences begin in the micro-batch, before a split for context parallelism, and the
             end of the last one. A sequence ends with its padding. n is the number of sequences, or one more: the
             micro-batch then ends with padding that belongs to no sequence. With context parallelism every padded
             length must be a multiple of twice its size
    seeds    of each sequence's noise (`Request.seed`), where engines couple drafts to it; empty: not known
    """

    tokens: Sequence[Tensor]
    masks: Sequence[Tensor]
    starts: Tensor
    seeds: Sequence[int] = ()

    def count_trained(self, depth: int) -> list[float]:
        """Count the predictions that each depth trains, over the whole sequences: `[depth]`. Reads `masks` only.

        The sum over a step's micro-batches is the argument of `DrafterTraining.begin_step`.
        """
        sums = [0.0] * depth
        for mask in self.masks:
            # only the masks of the result are read, so any tokens will do
            tokens = torch.zeros(len(mask), dtype=torch.int64)
            _, _, masks = drafter_targets(tokens, mask.cpu(), torch.tensor([0, len(mask)]), depth)
            for d in range(depth):
                sums[d] += float(masks[d].sum())
        return sums


@dataclass(frozen=True, kw_only=True)
class DrafterFields(DrafterTargets):
    """This rank's share of one micro-batch: what the drafter reads, beside its targets.

    tokens        `[t]` int64 for each depth d from 1: the token d positions later, 0 beyond the sequence's end, as
                  `PackedBatch.drafter_tokens`
    position_ids  `[t]` int64, from 0 in each sequence
    """

    tokens: list[Tensor]
    position_ids: Tensor


def drafter_fields(
    sequences: Sequences,
    depth: int,
    counts: Sequence[float] = (),
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> DrafterFields:
    """Build this context-parallel rank's fields of a micro-batch. Every rank has the same `sequences`.

    counts  of the step, over all ranks, as `DrafterTargets.counts`; (): not known. Then the fields have no `counts` for
            a loss, and acceptance is predicted at as many positions as in a small step

    Raises ValueError for padded lengths that context parallelism cannot split.
    """
    device = sequences.tokens[0].device
    boundaries = sequences.starts.cpu()
    total = int(boundaries[-1])
    tokens = torch.zeros(total, dtype=torch.int64, device=device)
    mask = torch.zeros(total, dtype=torch.float32, device=device)
    # -1: padding, at which no acceptance is predicted
    seeds = torch.full((total,), -1, dtype=torch.int64)
    for i, sequence in enumerate(sequences.tokens):
        start = int(boundaries[i])
        rows = slice(start, start + len(sequence))
        tokens[rows] = sequence
        mask[rows] = sequences.masks[i].float()
        if sequences.seeds:
            seeds[rows] = sequences.seeds[i]

    # this rank's part of a tensor over the whole micro-batch, on the model's device
    def share(x: Tensor) -> Tensor:
        return to_device(slice_for_cp(x, boundaries, cp_rank, cp_size), device)

    lengths = boundaries[1:] - boundaries[:-1]
    starts = boundaries[:-1].long().repeat_interleave(lengths)
    positions = share(torch.arange(total) - starts)
    # Whole sequences are shifted first and cut afterwards, so no rank needs a neighbour's tokens.
    inputs, labels, masks = drafter_targets(tokens, mask, boundaries.to(device), depth)
    noise: dict[str, Tensor] = {}
    if sequences.seeds:
        # In a large step, acceptance is predicted at some positions only, because each one costs a hash for every token
        # of the vocabulary.
        step_tokens = counts[0] if counts else 0.0
        noise["seeds"] = share(seeds.masked_fill(~predicted_positions(total, step_tokens), -1))
        noise["positions"] = positions
    return DrafterFields(
        tokens=[share(x) for x in inputs],
        labels=[share(x) for x in labels],
        weight=[share(x) for x in masks],
        counts=counts,
        position_ids=positions,
        cu_seqlens_padded=boundaries,
        **noise,
    )

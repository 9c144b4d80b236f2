"""Pack samples into micro-batches: balanced over data-parallel ranks, shifted, then split for context parallelism.

Every rank calls `pack` (`run/batches.py`) with all samples of the optimizer step and takes its share, so nothing is
communicated. All ranks must therefore compute the same bins and counts: nothing here may depend on a rank, but for the
share that is returned. Tokens are shifted on whole sequences before the split. The denominators of the losses do not
depend on DP, CP or packing. `types.PackedBatch` describes the result.

L: tokens of one sample; T: tokens of a micro-batch. A column is a field of all samples, as one tensor `[L]` for each
sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.packing.context_parallel import slice_for_cp
from megatron_rlspec.packing.shift import drafter_targets, shift_packed
from megatron_rlspec.types import PackedBatch, Sample

Aggregation = Literal["token", "sample", "constant"]
# To predict the acceptance of a coupled draft at a position, every token of the vocabulary is hashed. To save time, a
# step predicts it at about PREDICTED_TOKENS tokens only, on all ranks together: at the first positions of each WINDOW
# positions of a micro-batch. The standard error of an acceptance rate is then at most 0.5 / √8192 = 0.6 %.
PREDICTED_TOKENS = 8192
WINDOW = 1024


def pack(
    samples: Sequence[Sample],
    *,
    depth: int,
    tokens_per_micro_batch: int,
    advantages: Sequence[float] | None = None,
    drafter_weights: Sequence[float] | np.ndarray | None = None,
    version: int | None = None,
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    dp_size: int = 1,
    dp_rank: int = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
    multiple: int = 1,
) -> list[PackedBatch]:
    """Return this rank's micro-batches of one optimizer step; ranks with too few samples get batches of padding only.

    samples                 of the whole step, in the same order on all ranks; the arguments below are equal on all
                            ranks, too, but for `dp_rank` and `cp_rank`
    depth                   drafts of each position, for the lists of `PackedBatch`
    tokens_per_micro_batch  most tokens of one micro-batch with padding, over all its context-parallel ranks
    multiple                a rank's tokens are a multiple of it (the tensor-parallel size under sequence parallelism)
    advantages              one per sample; 0 if omitted
    drafter_weights         one per sample, not negative; 1 if omitted. Samples of weight 0 are left out of the
                            drafter's pass (`PackedBatch.drafter_part`)
    version                 of the policy to be trained, not below that of any token; None leaves `staleness` out
    aggregation             what Σ policy_weight · loss_mask · loss / counts["policy"] is over the whole step.
                            token: the mean over trained tokens
                            sample: the mean over samples of their token means (0 for a sample without trained tokens)
                            constant: Σ / (samples · constant_length)
    constant_length         tokens that each sample counts under aggregation=constant; not read otherwise

    `counts["drafter"][d - 1]` is Σ drafter_weight · drafter_mask[d - 1]. A count of 0 becomes 1; the sum that it
    divides is 0. Raises ValueError for a sample longer than a micro-batch, and for one whose versions are wrong.
    """
    lengths = [len(sample.tokens) for sample in samples]
    # `cp_index` cuts into 2 * cp_size chunks, and each rank's share must be a multiple of `multiple`.
    chunks = 1 if cp_size == 1 else 2 * cp_size
    batch_unit = math.lcm(chunks, cp_size * multiple)
    # The padded length decides where a sample is cut. It must not depend on the other samples of the batch, because
    # `_rows_in` needs the same cuts in `drafter_part`.
    sample_unit = 1 if cp_size == 1 else batch_unit
    padded_lengths = [-(-length // sample_unit) * sample_unit for length in lengths]  # rounded up
    # rounded down, so that a micro-batch that is filled up to `batch_unit` stays within the limit
    budget = tokens_per_micro_batch // batch_unit * batch_unit
    bins = partition(padded_lengths, budget, dp_size)
    columns = _columns(samples, lengths, advantages, drafter_weights)
    columns["policy_weight"] = _repeated(_policy_weights(samples, aggregation), lengths)
    # all or none, so that either all ranks know the noise of their samples or none does
    seeds = [sample.seed for sample in samples if sample.seed is not None]
    if len(seeds) == len(samples):
        columns["seeds"] = _repeated(seeds, lengths)
    if version is not None:
        columns["staleness"] = [_staleness(sample, version) for sample in samples]
    counts = _counts(columns, lengths, depth, aggregation, constant_length)
    # indices of the samples that the drafter learns from
    learnt_samples = {i for i, weight in enumerate(columns["drafter_weight"]) if bool(weight.any())}
    # without token 0 of a sample, which nothing predicts
    learnt_tokens = sum(float(columns["mask"][i][1:].sum()) for i in learnt_samples)

    micro_batch = partial(
        _micro_batch,
        columns=columns,
        padded_lengths=padded_lengths,
        batch_unit=batch_unit,
        depth=depth,
        counts=counts,
        learnt_tokens=learnt_tokens,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    batches = []
    # every `dp_size`-th bin, so that all data-parallel ranks have equally many micro-batches, of similar loads
    for chosen in bins[dp_rank::dp_size]:
        batch = micro_batch(chosen)
        # decided by all samples of the step, so that either all batches of all ranks have a part or none has
        if len(learnt_samples) < len(samples):
            part = micro_batch([i for i in chosen if i in learnt_samples])
            batch = replace(batch, drafter_part=part, drafter_rows=_rows_in(batch, part))
        batches.append(batch)
    return batches


def predicted_positions(total: int, step_tokens: float) -> Tensor:
    """Return the positions of a micro-batch at which acceptance is predicted: a mask `[total]`, on the CPU.

    total        positions of the micro-batch before the context-parallel slice
    step_tokens  tokens that the drafter learns from in the step, on all ranks; an estimate is enough: `pack` counts
                 trained tokens, `cotrainer/fields.py` those of depth 1
    """
    wanted = WINDOW * PREDICTED_TOKENS / max(1.0, step_tokens)
    # at least 32 positions of every window, however large the step is
    first = max(32, math.ceil(wanted))
    return torch.arange(total) % WINDOW < first


def partition(
    lengths: Sequence[int],
    budget: int,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Put the indices of `lengths` into balanced bins whose lengths add up to at most `budget` in each.

    The number of bins is a multiple of `multiple_of`, also without items. For `pack` a bin is a micro-batch, an item a
    sample, and `multiple_of` the data-parallel size.

    Items are placed in order of falling length, each into the emptiest bin. If one does not fit there, all are placed
    again, into `multiple_of` more bins. Equal lengths and loads are ordered by index, so that all ranks get the same
    bins. `multiple_of` consecutive bins have similar loads, so ranks that take every `multiple_of`-th bin wait little
    for each other. Bins can be empty. Raises ValueError for an item above the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > budget:
        raise ValueError(
            f"sample {order[0]} takes {lengths[order[0]]} tokens, but a micro-batch holds {budget}: "
            "raise tokens_per_micro_batch or lower the maximum length"
        )
    least = max(1, math.ceil(sum(lengths) / max(budget, 1)))  # bins, if they could all be filled
    bins_needed = math.ceil(least / multiple_of) * multiple_of
    while True:
        heap = [(0, i) for i in range(bins_needed)]  # (load, bin), the emptiest first
        bins: list[list[int]] = [[] for _ in heap]
        for item in order:
            load, i = heap[0]
            if load + lengths[item] > budget:
                break  # too few bins: begin again with more
            bins[i].append(item)
            heapq.heapreplace(heap, (load + lengths[item], i))
        else:
            # the fullest first; of equal loads the lower index
            heap.sort(key=lambda load_and_index: (-load_and_index[0], load_and_index[1]))
            return [sorted(bins[i]) for _, i in heap]
        bins_needed += multiple_of


def _columns(
    samples: Sequence[Sample],
    lengths: list[int],
    advantages: Sequence[float] | None,
    drafter_weights: Sequence[float] | np.ndarray | None,
) -> dict[str, list[Tensor]]:
    """Return the columns by field: at index i, the value that describes token i itself."""
    if advantages is None:
        advantages = [0.0] * len(samples)
    if drafter_weights is None:
        drafter_weights = [1.0] * len(samples)
    return {
        "tokens": [torch.as_tensor(sample.tokens) for sample in samples],
        "mask": [torch.as_tensor(sample.loss_mask) for sample in samples],
        "behaviour_logprobs": [torch.as_tensor(sample.behaviour_logprobs) for sample in samples],
        "advantages": _repeated(advantages, lengths),
        "drafter_weight": _repeated(drafter_weights, lengths),
    }


def _repeated(values: Sequence[float] | np.ndarray, lengths: list[int]) -> list[Tensor]:
    """Return a column of float32 or int64 that repeats one value for all tokens of its sample."""
    return [torch.full((n,), value) for value, n in zip(values, lengths, strict=True)]


def _staleness(sample: Sample, version: int) -> Tensor:
    """Return how many versions each response token is older than `version`, float32 `[L]`; 0 on the prompt.

    Raises ValueError if the spans do not cover the response, or hold a version above `version`.
    """
    staleness = torch.zeros(len(sample.tokens))
    covered = sample.prompt_len  # tokens before this index have a version
    for sampled_by, first, last in sorted(sample.policy_versions, key=lambda span: span[1]):
        if sample.prompt_len + first != covered or sampled_by > version:
            break
        covered = sample.prompt_len + last
        staleness[sample.prompt_len + first : covered] = version - sampled_by
    if covered != len(sample.tokens):
        raise ValueError(
            f"sample {sample.request_id}: policy_versions={sample.policy_versions} of {len(sample.response)} response "
            f"tokens; expected spans that cover them, of versions up to {version}"
        )
    return staleness


def _policy_weights(samples: Sequence[Sample], aggregation: Aggregation) -> list[float]:
    """Return one weight for the loss of each sample's tokens: 1, or 1 / its trained tokens for the mean over samples.

    Token 0 is never predicted, so it does not count as trained.
    """
    if aggregation != "sample":
        return [1.0] * len(samples)
    return [1 / max(1.0, float(np.sum(sample.loss_mask[1:]))) for sample in samples]


def _counts(
    columns: dict[str, list[Tensor]],
    lengths: list[int],
    depth: int,
    aggregation: Aggregation,
    constant_length: int | None,
) -> dict[str, float | int | list[float]]:
    """Return `PackedBatch.counts` of the whole step. Sums are in float64: float32 does not count beyond 2²⁴."""
    cu = torch.tensor([0, *lengths]).cumsum(0)
    nothing = torch.zeros(0)  # without samples there is nothing to join
    mask = torch.cat([nothing, *columns["mask"]])
    weight = torch.cat([nothing, *columns["drafter_weight"]])
    no_tokens = torch.zeros(len(mask), dtype=torch.int64)  # only the masks are read
    _, _, masks = drafter_targets(no_tokens, mask, cu, depth)
    drafter = []  # by depth
    for trained in masks:
        total = (weight.double() * trained).sum()
        drafter.append(float(total) or 1.0)
    trained_tokens = shift_packed(mask, cu)
    tokens = float(trained_tokens.sum(dtype=torch.float64))
    policy = tokens
    if aggregation == "sample":
        policy = float(len(lengths))
    elif aggregation == "constant":
        assert constant_length, "aggregation=constant needs constant_length"
        policy = float(len(lengths) * constant_length)
    return {
        "policy": policy or 1.0,
        "drafter": drafter,
        "tokens": tokens,
        "samples": len(lengths),
    }


def _rows_in(batch: PackedBatch, part: PackedBatch) -> Tensor:
    """Return int64 `[t]`: the row in `batch` of each of the t positions of `part`; 0 for padding.

    `part` has some of the batch's samples. Both batches have these samples in the same order, and on this rank the same
    tokens of them: see `_micro_batch`. So the n-th real token of `part` is the n-th token of these samples in `batch`.
    """
    rows = torch.zeros(len(part.tokens), dtype=torch.int64)
    real = part.sequence_ids >= 0
    in_part = torch.isin(batch.sequence_ids, part.sequence_ids[real])
    rows[real] = in_part.nonzero()[:, 0]
    return rows


def _micro_batch(
    chosen: list[int],
    columns: dict[str, list[Tensor]],
    padded_lengths: list[int],
    batch_unit: int,
    depth: int,
    counts: dict[str, float | int | list[float]],
    learnt_tokens: float,
    cp_size: int,
    cp_rank: int,
) -> PackedBatch:
    """Place the chosen samples one after the other, shift, and return this rank's share.

    chosen          indices of samples, ascending, because `_rows_in` needs one order; empty: the batch is padding only
    columns         of all samples of the step, by field
    padded_lengths  of all samples of the step
    learnt_tokens   tokens that the drafter learns from in the step

    The padding of the last sequence also fills the batch up to a multiple of `batch_unit`. With `cp_size` > 1 there is
    nothing to fill, because every padded length is such a multiple. So a sample is cut the same way in every batch,
    which `_rows_in` relies on. Without samples the batch is one sequence of padding, because kernels need at least one
    sequence.
    """
    real = [len(columns["tokens"][i]) for i in chosen] or [0]
    padded = [padded_lengths[i] for i in chosen] or [0]
    units = max(1, math.ceil(sum(padded) / batch_unit))
    total = units * batch_unit
    padded[-1] += total - sum(padded)  # with `cp_size` > 1: 0, or all of an empty batch
    cu = torch.tensor([0, *real]).cumsum(0).int()
    cu_padded = torch.tensor([0, *padded]).cumsum(0).int()

    def lay_out(field: str, empty: int = 0) -> Tensor:
        """Return a column of the chosen samples as one tensor `[total]`, with `empty` on padding."""
        dtype = torch.int64 if field in ("tokens", "seeds") else torch.float32
        flat = torch.full((total,), empty, dtype=dtype)
        # not strict: no sequence starts at the last boundary
        for i, start in zip(chosen, cu_padded.tolist(), strict=False):
            column = columns[field][i]
            flat[start : start + len(column)] = column
        return flat

    tokens = lay_out("tokens")
    mask = lay_out("mask")
    sequence_ids = torch.full((total,), -1)
    for i, start, length in zip(chosen, cu_padded.tolist(), real, strict=False):
        sequence_ids[start : start + length] = i
    loss_mask = shift_packed(mask, cu_padded)
    drafter_tokens, drafter_labels, drafter_mask = drafter_targets(tokens, mask, cu_padded, depth)

    def share(x: Tensor) -> Tensor:
        """Return this rank's part. Everything is shifted before, so no rank needs another one's tokens."""
        return slice_for_cp(x, cu_padded, cp_rank, cp_size)

    def trained(field: str) -> Tensor:
        """Return this rank's part of the shifted values, with 0 where nothing is trained: they may be NaN there."""
        shifted = shift_packed(lay_out(field), cu_padded)
        return share(shifted.masked_fill(loss_mask == 0, 0))

    noise_seeds: Tensor | None = None
    if "seeds" in columns:
        # -1 where acceptance is not predicted
        seeds = lay_out("seeds", -1)
        predicted = predicted_positions(total, learnt_tokens)
        noise_seeds = share(seeds.masked_fill(~predicted, -1))
    starts = cu_padded[:-1].repeat_interleave(torch.tensor(padded))
    return PackedBatch(
        tokens=share(tokens),
        position_ids=share(torch.arange(total) - starts),
        labels=share(shift_packed(tokens, cu_padded)),
        loss_mask=share(loss_mask),
        advantages=trained("advantages"),
        behaviour_logprobs=trained("behaviour_logprobs"),
        staleness=trained("staleness") if "staleness" in columns else None,
        sequence_ids=share(sequence_ids),
        policy_weight=trained("policy_weight"),
        drafter_weight=share(lay_out("drafter_weight")),
        drafter_tokens=[share(x) for x in drafter_tokens],
        drafter_labels=[share(x) for x in drafter_labels],
        drafter_mask=[share(x) for x in drafter_mask],
        cu_seqlens=cu,
        cu_seqlens_padded=cu_padded,
        counts=counts,
        noise_seeds=noise_seeds,
    )

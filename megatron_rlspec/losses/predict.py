"""Predict the acceptance of the next rollout from the logits of the training forward.

Training computes every position once. An engine drafts only at positions where a round starts. Rounds start more often
where drafts are refused, because accepted drafts skip positions. A mean over positions is therefore too high. Example:
half of the text accepts with rate 0.95 and half with 0.1, at three steps; the mean over positions gives 2.41 tokens per
round, the true value is 1.71. `walk` follows each sequence instead: a round starts at the first position and ends after
the drafts that this text accepts, and the next round starts there.

Shapes: T positions in sequence order, with context-parallel shards joined; D depths; K step counts. Row t, depth d is
the drafter's prediction of token t + 1 + d, as in `PackedBatch.drafter_*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from scipy.linalg.lapack import dtbtrs
from torch import Tensor
from torch.nn.functional import pad

from megatron_rlspec.speculation.ragged import BINS, LOWEST


def of_rows(
    rows: Mapping[str, Tensor],
    depth: int,
    *,
    sampled: bool,
) -> tuple[Tensor, Tensor]:
    """Return (accept, reach), `[T, depth, F]`, from `Student.rows` of a training step, `[depth * T]`, by depth.

    sampled  the rollout draws from the policy's softmax at the training temperature, unfiltered. Otherwise (greedy,
             top-p, top-k) this function does not know the distribution, and `accept` is `reach`

    Rows of "coupled", `[depth * T, F]`, hold what a draft with the text's own noise does: they are both. F is the
    number of factors there (`types.SHARPNESS`), and 1 for other drafts.
    """
    if "coupled" in rows:
        accept = rows["coupled"]
        reach = accept
    else:
        reach = rows["match"][:, None]
        accept = reach
        if sampled and "argmax_prob" in rows:
            accept = rows["argmax_prob"][:, None]
    shape = (depth, len(accept) // depth)
    return accept.unflatten(0, shape).transpose(0, 1), reach.unflatten(0, shape).transpose(0, 1)


def logq_of_rows(rows: Mapping[str, Tensor], depth: int) -> Tensor:
    """Return log q of the drafts, `[T, depth, F]`, from `Student.rows`, by depth.

    A coupled draft that is not the label is taken to be the drafter's likeliest token, which it mostly is.
    """
    logq = rows["best_logq"][:, None]
    if "coupled" in rows:
        logq = torch.where(rows["coupled"] > 0, rows["label_logq"][:, None], logq)
    return logq.unflatten(0, (depth, len(logq) // depth)).transpose(0, 1)


def deepen(table: Tensor, depth: int) -> Tensor:
    """Extend `[T, D]` to `[T, depth]`: a depth beyond D takes the values of depth D at later positions.

    Row t at depth D + j and row t + j at depth D predict the same token. The rule holds for accept, reach and mask: row
    t is within its response at depth D + j if row t + j is within it at depth D.
    """
    columns = list(table.unbind(1))
    while len(columns) < depth:
        last = columns[-1]
        beyond_end = torch.zeros_like(last[:1])
        columns.append(torch.cat([last[1:], beyond_end]))
    return torch.stack(columns[:depth], 1)


def walk(
    accept: Tensor,
    reach: Tensor,
    mask: Tensor,
    steps: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the rounds of each sequence at every step count; accept, reach and mask are `[T, D]`, on the CPU.

    Return (reached, accepted) of `acceptance.Prediction`, `[K, D]` float64 each, and the probability `[T]` that a round
    of the last step count starts at each position.

    `mask[t, d]` is 1 where depth d + 1 at t predicts a generated token (`drafter_targets`). Consecutive rows with a
    mask are one response, or one turn of it; the first of them starts a round. Drafts past its end are not counted.
    """
    depth = accept.shape[1]
    valid = mask != 0
    alpha = accept.detach().double()
    alpha = alpha.masked_fill(~valid, 0)
    of_depths = reach.detach().double()
    of_depths = of_depths.masked_fill(~valid, 0)
    # [T, D + 1]: depth d reached from t
    of_depths = of_depths.cumprod(1)
    carried = pad(of_depths, (1, 0), value=1.0)
    reached = alpha.new_zeros(len(steps), depth)
    accepted = torch.zeros_like(reached)
    for row, k in enumerate(steps):
        inside = valid[:, 0]
        starts = _round_starts(inside, carried[:, : k + 1])
        weight = starts[:, None] * carried[:, :k]
        weight = weight * valid[:, :k]
        accepted_here = weight * alpha[:, :k]
        reached[row, :k] = weight.sum(0)
        accepted[row, :k] = accepted_here.sum(0)
    return reached, accepted, starts


def by_logq(logq: Tensor, accept: Tensor, reach: Tensor, mask: Tensor, starts: Tensor) -> Tensor:
    """Return `acceptance.Prediction.by_logq` of one sharpness, `[2, BINS]` float64.

    Arguments as of `walk`, with the drafts' log q, `[T, D]`, and the starts that `walk` found.
    """
    valid = mask != 0
    carried = reach.detach().double().masked_fill(~valid, 0).cumprod(1)
    before = pad(carried, (1, 0), value=1.0)[:, :-1]
    reached = starts[:, None] * valid * before
    accepted = reached * accept.detach().double()
    share = (logq.abs() / -LOWEST).nan_to_num(1.0).clamp(max=1).double().sqrt().sqrt()
    bins = ((1 - share) * (BINS - 0.01)).long().flatten()
    found = accept.new_zeros(2, BINS, dtype=torch.float64)
    for row, drafts in zip(found, (reached, accepted), strict=True):
        row.index_add_(0, bins, drafts.flatten())
    return found


def _round_starts(inside: Tensor, carried: Tensor) -> Tensor:
    """Return the probability that a round of k steps starts at each position, `[T]`; `carried [T, k + 1]`.

    The probability s_t of a start is 1 at the first position of a response, and else the sum over j of s_{t-1-j} times
    the probability that a round from t - 1 - j accepts j drafts: a banded triangular system, which LAPACK solves.
    """
    positions, size = carried.shape
    if not positions:
        return carried.new_zeros(0)
    index = torch.arange(positions)
    inside_before = pad(inside, (1, 0))[:-1]
    begins = inside & ~inside_before
    first = torch.where(begins, index, 0).cummax(0).values
    offset = index - first
    # row i, column u: entry (u + i, u) of the matrix
    band = torch.ones(size + 1, positions, dtype=carried.dtype)
    changes = carried[:, 1:] - carried[:, :-1]
    band[1:-1] = changes.t()
    band[-1] = -carried[:, -1]
    farthest = min(size, positions - 1)
    for ahead in range(1, farthest + 1):
        within = offset[ahead:] >= ahead  # a round ends with its response
        diagonal = band[ahead, : len(within)]
        diagonal.masked_fill_(~within, 0)
    response_begins = (offset == 0).double()
    starts, _ = dtbtrs(band.numpy(), response_begins.numpy(), uplo="L")
    return torch.from_numpy(starts).masked_fill(~inside, 0)

"""Predict the acceptance of the next rollout from the logits of the training forward.

Training computes every position once. An engine drafts only at positions where a round starts. Rounds start more often
where drafts are refused, because accepted drafts skip positions. A mean over positions is therefore too high. Example:
half of the text accepts with rate 0.95 and half with 0.1, at three steps; the mean over positions gives 2.41 tokens per
round, the true value is 1.71. `walk` follows each sequence instead: a round starts at the first position and ends after
the drafts that this text accepts, and the next round starts there.

Shapes: T positions in sequence order, with context-parallel shards joined; D depths; K step counts; F sharpnesses of
coupled drafts, or 1. Row t, depth d is the drafter's prediction of token t + 1 + d, as in `PackedBatch.drafter_*`.

accept  probability that the draft is accepted, if the drafts before it are
reach   the probability that a round on this text goes on after the draft: 1 if the draft is the text's token, else 0

`train/drafter_step.py` calls `accept_and_reach` and `logq_of_rows` on the device in every micro-batch. It calls
`deepen`, `walk` and `by_logq` once a step on the CPU (`follow_rounds`), so that the host waits for the device once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from scipy.linalg.lapack import dtbtrs
from torch import Tensor
from torch.nn.functional import pad

from megatron_rlspec.speculation.ragged import BINS, LOWEST


def accept_and_reach(
    rows: Mapping[str, Tensor],
    depth: int,
    *,
    sampled: bool,
) -> tuple[Tensor, Tensor]:
    """Return (accept, reach), `[T, depth, F]` each.

    rows     `Student.rows` of a micro-batch, `[depth * T]` or `[depth * T, F]`: first all positions of depth 1, then
             those of depth 2, and so on. Positions without a weight have 0, so the caller needs a mask, too
    depth    D, the number of depths in `rows`
    sampled  the rollout draws from the policy's softmax at the training temperature, unfiltered. `accept` is then
             p(argmax q), if `rows` have it: not under the loss "ce". Otherwise (greedy, top-p, top-k) the distribution
             is not known here, and `accept` is `reach`

    With rows of "coupled" (drafts with the text's own noise) both are these: on this text it is known whether the draft
    is accepted. F is then the number of `types.SHARPNESS`.
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
    """Return log q of the drafts, `[T, depth, F]`, from `Student.rows` as for `accept_and_reach`.

    `rows` do not say which token a coupled draft is, if it is not the label. It is then taken to be the drafter's
    likeliest token.
    """
    logq = rows["best_logq"][:, None]
    if "coupled" in rows:
        logq = torch.where(rows["coupled"] > 0, rows["label_logq"][:, None], logq)
    return logq.unflatten(0, (depth, len(logq) // depth)).transpose(0, 1)


def deepen(table: Tensor, depth: int) -> Tensor:
    """Extend `[T, D]` to `[T, depth]`: a depth beyond D takes the values of depth D at later positions.

    Row t at depth D + j and row t + j at depth D predict the same token. The rule holds for accept, reach, log q
    and the mask: row t is within its response at depth D + j if row t + j is within it at depth D.
    """
    columns = list(table.unbind(1))
    while len(columns) < depth:
        last = columns[-1]
        beyond_end = torch.zeros_like(last[:1])  # behind the last row nothing is predicted
        columns.append(torch.cat([last[1:], beyond_end]))
    return torch.stack(columns[:depth], 1)


def walk(
    accept: Tensor,
    reach: Tensor,
    mask: Tensor,
    steps: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the rounds of each sequence at every step count of `steps [K]`, at least one; each is from 1 to D.

    For `by_logq` the last of `steps` must be D: it counts the drafts of all D depths of the rounds that start.

    accept, reach  `[T, D]`, on the CPU
    mask           `[T, D]`: `mask[t, d]` is not 0 where depth d + 1 at t predicts a generated token. Consecutive rows
                   with `mask[t, 0]` are one response, or one turn of it; the first of them starts a round. Drafts past
                   the end are not counted

    Return (reached, accepted) of `acceptance.Prediction`, `[K, D]` float64 each, and the probability `[T]` that a round
    of the last step count starts at each position; `by_logq` takes it.
    """
    depth = accept.shape[1]
    valid = mask != 0
    # float64, for sums over many positions and for LAPACK in `_round_starts`
    accept_rates = accept.detach().double()
    accept_rates = accept_rates.masked_fill(~valid, 0)
    reach_rates = reach.detach().double()
    reach_rates = reach_rates.masked_fill(~valid, 0)
    # [T, D + 1]: column d is the probability that a round from t accepts d drafts or more, and so reaches depth d + 1
    at_least = reach_rates.cumprod(1)
    carried = pad(at_least, (1, 0), value=1.0)
    reached = accept_rates.new_zeros(len(steps), depth)
    accepted = torch.zeros_like(reached)
    for row, k in enumerate(steps):
        inside = valid[:, 0]
        starts = _round_starts(inside, carried[:, : k + 1])
        weight = starts[:, None] * carried[:, :k]
        weight = weight * valid[:, :k]
        accepted_weight = weight * accept_rates[:, :k]
        reached[row, :k] = weight.sum(0)
        accepted[row, :k] = accepted_weight.sum(0)
    return reached, accepted, starts


def by_logq(logq: Tensor, accept: Tensor, reach: Tensor, mask: Tensor, starts: Tensor) -> Tensor:
    """Return `acceptance.Prediction.by_logq` of one sharpness, `[2, BINS]` float64: reached and accepted drafts.

    logq    `[T, D]`: of the drafts
    starts  `[T]`: the third result of `walk`; the other arguments as those of `walk`

    The bins are those of `Selection.counts` in `speculation/ragged.py`, which begins with these numbers
    (`add_predicted`). They divide log q from LOWEST to 0, finest near 0; NaN is in the lowest bin. The formula below
    must divide as `cells_of` there does; the borders of the two differ by less than 0.3 % of a bin.
    """
    valid = mask != 0
    carried = reach.detach().double().masked_fill(~valid, 0).cumprod(1)
    before = pad(carried, (1, 0), value=1.0)[:, :-1]
    reached = starts[:, None] * valid * before
    accepted = reached * accept.detach().double()
    share = (logq.abs() / -LOWEST).nan_to_num(1.0).clamp(max=1).double().sqrt().sqrt()
    bins = ((1 - share) * (BINS - 0.01)).long().flatten()  # less than BINS, also for log q = 0
    counts = accept.new_zeros(2, BINS, dtype=torch.float64)
    for row, drafts in zip(counts, (reached, accepted), strict=True):
        row.index_add_(0, bins, drafts.flatten())
    return counts


def _round_starts(inside: Tensor, carried: Tensor) -> Tensor:
    """Return the probability that a round of k steps starts at each position, `[T]` float64; 0 outside of responses.

    inside   `[T]` bool: whether the position predicts a generated token
    carried  `[T, k + 1]`: column j is the probability that a round from t accepts j drafts or more

    The probability s_t of a start is 1 at the first position of a response. Elsewhere it is the sum over j of s_{t-1-j}
    times the probability that a round from t - 1 - j accepts exactly j drafts. This is a lower triangular system of
    equations with k + 1 diagonals below the main one. LAPACK solves it in one call; a loop over positions in Python
    would be slow.
    """
    positions, size = carried.shape
    if not positions:
        return carried.new_zeros(0)
    # `offset`: rows since the response began. It goes on counting after the end; the last line sets these rows to 0.
    index = torch.arange(positions)
    inside_before = pad(inside, (1, 0))[:-1]
    begins = inside & ~inside_before
    first = torch.where(begins, index, 0).cummax(0).values
    offset = index - first
    # LAPACK's storage of a band: row i, column u holds the entry (u + i, u) of the matrix. Row 0, the main diagonal, is
    # 1. Row i > 0 is minus the probability that a round from u accepts exactly i - 1 drafts.
    band = torch.ones(size + 1, positions, dtype=carried.dtype)
    minus_exactly = carried[:, 1:] - carried[:, :-1]
    band[1:-1] = minus_exactly.t()
    band[-1] = -carried[:, -1]
    farthest = min(size, positions - 1)
    for ahead in range(1, farthest + 1):
        within = offset[ahead:] >= ahead  # a round ends with its response
        diagonal = band[ahead, : len(within)]  # a view, so the next line writes into `band`
        diagonal.masked_fill_(~within, 0)
    response_begins = (offset == 0).double()
    # The ignored second result is LAPACK's error code: a matrix with ones on its diagonal is never singular.
    starts, _ = dtbtrs(band.numpy(), response_begins.numpy(), uplo="L")
    return torch.from_numpy(starts).masked_fill(~inside, 0)

"""Draw tokens from raw logits with keyed noise, in Triton, and return the log-prob of each token.

`sample` is the entry. SGLang's engine draws with it: `verifier.py` and `coupled.py` in `rollout/sglang/scheduler/`.
`kernels/chosen.py` compares it with `noise.draw` before that.

**What is drawn.** A row has logits x, and z = x / T in float32. The token is the argmax of s · z + g. g is the float64
noise of `noise.py`, which is that of SGLang's `multinomial_with_seed`. s is the sharpness: 1, but for coupled drafts. A
constant in a row does not change an argmax, so no softmax is needed. Of equal sums the lower column wins. Top-k, top-p
and min-p are left to plain torch (`token_filter.py`).

**One read.** An exact score needs two float64 logarithms, so few tokens get one. Let u be a token's uniform number. Its
noise is -log(-log u), and -log u >= 1 - u, so exp(-score) >= (1 - u) / exp(s · z). The right side takes a hash and one
exponential in float32. A token whose right side is more than the exp(-score) of another token cannot win. `SLACK`
covers the rounding of float32. The few tokens that remain are scored exactly. Most tiles of a long part (below) have
none of them, which one maximum over the tile shows.

**Parts.** A row is cut into parts, each read by one program, so that few rows fill a GPU. `scan` finds the best score
of a part and the sums that the log-prob needs. Torch joins the parts. The token does not depend on the number of parts;
the log-prob depends on it by rounding only.

z must lie between -1e29 and 1e29, or be -inf for a token that cannot be drawn. NaN counts as -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlspec.kernels.keyed_noise import SLACK, beats, hash_of, hash_of_row, score_of

BLOCK = 1024  # columns of a tile; a thread holds 8, and two tiles at once
MANY_PARTS = 16  # parts of each row where FEW_PARTS of each would be fewer programs than PROGRAMS
FEW_PARTS = 2  # parts of each row otherwise
PROGRAMS = 512  # programs that fill a GPU: about four on each of an H100's 132 multiprocessors
# `maxnreg` is the limit of a thread's registers. Without one, Triton 3.8 takes 64 or 96 and spills the rest to memory.
LAUNCH = {"num_warps": 4, "maxnreg": 128}

_INF = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-1e30)  # stands for -inf where a difference must not be NaN
# The peak before any logit is read. It is above _LOWEST, so that tokens that cannot be drawn weigh exp(-1e29) = 0.
_START = tl.constexpr(-9e29)
# 2^32 - 1 less a margin of 2047. float32 numbers below 2^32 are 256 apart: rounding leaves out no token that can win.
_CERTAIN = tl.constexpr(2.0**32 - 2048)


@triton.jit
def _tile(logits, row, stride, start, end, temperature, BLOCK: tl.constexpr):
    """Return z [BLOCK] of the columns from `start` on; _LOWEST from `end` on, and for -inf and NaN."""
    columns = start + tl.arange(0, BLOCK)
    # The row's place in int64: the logits of a batch can have more than 2^31 elements.
    start_of_row = logits + row.to(tl.int64) * stride
    x = tl.load(start_of_row + columns, mask=columns < end, other=-_INF).to(tl.float32)
    z = x
    if temperature != 1.0:
        # Triton's `/` is approximate. `div_rn` rounds as torch's division does, so both draw the same token.
        z = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return tl.where(z > _LOWEST, z, _LOWEST)  # a comparison with NaN is false


@triton.jit
def _limit(top, score):
    """Return the largest (1 - u) / exp(s · z - top) · 2^32 with which a token may still beat this score.

    top is that of `scan`. The result is finite, also for a score of -inf: its product with a weight of 0
    must not be NaN.
    """
    return tl.minimum(tl.exp((top.to(tl.float64) - score).to(tl.float32)) * SLACK, 3e38)


@triton.jit
def scan(
    logits,  # [N, V]
    stride,  # elements between rows of logits
    width,  # V
    seeds,  # [N] int64
    positions,  # [N] integers
    temperatures,  # [N] float32
    sharpnesses,  # [N] float32
    words,  # [V] token ids of the columns, if MAPPED; else column i is token i
    part_score,  # written, as the next three: [N, parts] float64, -inf if nothing can be drawn
    part_column,  # [N, parts] int64
    part_peak,  # [N, parts] float32
    part_total,  # [N, parts] float64
    columns_of_part,  # columns of one part, a multiple of BLOCK
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write of one part of a row: the best score and its column, `peak`, and the sum of exp(z - peak).

    A tile without a possible winner changes the sum only. Every other tile moves `peak` up to its largest z, and its
    possible winners are scored, the most promising first, until no other one can beat the best.

    At sharpness 1 `peak` may be less than the maximum of z, by less than 23: noise is at most 32 · log 2, so a larger z
    always takes the branch that moves `peak`.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    start = part * columns_of_part
    end = tl.minimum(start + columns_of_part, width)
    state = hash_of_row(seeds, positions, row)
    temperature = tl.load(temperatures + row)
    sharpness = tl.load(sharpnesses + row)
    best = tl.full((), -_INF, tl.float64)
    best_column = start
    peak = tl.full((), _START, tl.float32)
    top = peak * sharpness
    limit = _limit(top, best)
    # `peak` is the largest z of the tiles that moved it; at sharpness 1 a later z may be larger. `top` is s · peak.
    # Weights of the log-prob are exp(z - peak), those of the score exp(s · z - top).
    # Sums of exp(z - peak), one for each place in a tile, added up after the last tile:
    totals = tl.zeros((BLOCK,), tl.float32)
    next_z = _tile(logits, row, stride, start, end, temperature, BLOCK)
    for tile in range(start, end, BLOCK):
        z = next_z
        # Load the next tile now: the memory works while this tile is computed. Behind the last tile nothing is loaded.
        next_z = _tile(logits, row, stride, tile + BLOCK, end, temperature, BLOCK)
        columns = tile + tl.arange(0, BLOCK)
        if MAPPED:
            ids = tl.load(words + columns, mask=columns < end, other=0)
        else:
            ids = columns
        hashed = hash_of(state, ids)
        weights = tl.exp(z - peak)
        # A token can win if (1 - u) · 2^32 <= limit · weight. The left side is 2^32 - 1 - hash, so the test is whether
        # limit · weight + hash reaches 2^32 - 1. At sharpness 1 the score's weight is that of the log-prob.
        reached = tl.fma(weights, limit, hashed.to(tl.float32))
        if sharpness != 1.0:
            reached = tl.fma(tl.exp(z * sharpness - top), limit, hashed.to(tl.float32))
            # A z above `peak` must take the branch that moves `peak`, or its weight could make `totals` infinite.
            reached = tl.where(z > peak, _INF, reached)
        if tl.max(reached, 0) >= _CERTAIN:
            # Relative to the new `peak` no weight of this tile is above 1.
            higher = tl.maximum(peak, tl.max(z, 0))
            totals *= tl.exp(peak - higher)
            peak = higher
            top = peak * sharpness
            weights = tl.exp(z - peak)
            totals += weights
            score_weights = weights
            if sharpness != 1.0:
                score_weights = tl.exp(z * sharpness - top)
            one_minus_u = (hashed ^ 0xFFFFFFFF).to(tl.float32)  # times 2^32
            bound = tl.where(score_weights > 0, one_minus_u / score_weights, _INF)
            bound = tl.where(bound <= _limit(top, best), bound, _INF)
            while tl.min(bound, 0) < _INF:
                column = tile + tl.argmin(bound, 0)
                own_z = tl.max(tl.where(columns == column, z, -_INF), 0)
                if MAPPED:
                    word = tl.load(words + column)
                else:
                    word = column
                score = score_of(own_z * sharpness, hash_of(state, word))
                if beats(score, column, best, best_column):
                    best = score
                    best_column = column
                can_win = (columns != column) & (bound <= _limit(top, best))
                bound = tl.where(can_win, bound, _INF)
            limit = _limit(top, best)
        else:
            totals += weights
    place = row * tl.num_programs(1) + part
    tl.store(part_score + place, best)
    tl.store(part_column + place, best_column.to(tl.int64))
    tl.store(part_peak + place, peak)
    tl.store(part_total + place, tl.sum(totals.to(tl.float64), 0))


def parts_of(rows: int, width: int) -> tuple[int, int]:
    """Return in how many parts each of `rows` rows of `width` columns is read, and the columns of one part.

    The last parts of a row can be empty: `scan` then writes the score -inf and the sum 0.
    """
    tiles = triton.cdiv(width, BLOCK)
    parts = min(MANY_PARTS if rows * FEW_PARTS < PROGRAMS else FEW_PARTS, tiles)
    return parts, triton.cdiv(tiles, parts) * BLOCK


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    sharpness: Tensor | None = None,
    words: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a column [N] int64 of each row of logits [N, V], with its log-prob [N] float32 at the row's temperature.

    The log-prob is of softmax(logits / temperature): the sharpness does not change it. A row in which nothing can be
    drawn gets column 0 and the log-prob NaN.

    logits        float32, bfloat16 or float16; float64 would be rounded to float32
    seeds         [N] int64
    positions     [N] integers: the position of the predicting token, as `keys` of `noise.draw`
    temperatures  [N] or [N, 1], positive
    sharpness     [N] or [N, 1]; None: 1
    words         [V], the token ids of the columns, for the noise; None: column i is token i

    All are on the device of the logits. The host does not wait for the device, so a CUDA graph can capture the call.
    Raises ValueError for logits whose columns do not lie next to each other.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"logits have a stride of {logits.stride(1)} between columns; expected 1")
    rows, width = logits.shape
    parts, columns_of_part = parts_of(rows, width)
    temperatures = temperatures.reshape(-1).float()
    sharpness = torch.ones_like(temperatures) if sharpness is None else sharpness
    scores = seeds.new_empty(rows, parts, dtype=torch.float64)
    totals = torch.empty_like(scores)
    columns = seeds.new_empty(rows, parts, dtype=torch.int64)
    peaks = temperatures.new_empty(rows, parts)
    if rows:
        scan[rows, parts](
            logits,
            logits.stride(0),
            width,
            seeds,
            positions,
            temperatures,
            sharpness.reshape(-1).float(),
            logits if words is None else words,  # not read without words
            scores,
            columns,
            peaks,
            totals,
            columns_of_part,
            MAPPED=words is not None,
            BLOCK=BLOCK,
            **LAUNCH,
        )
    # Of equal scores `argmax` takes the first part, whose columns are lower.
    best_part = scores.argmax(1, keepdim=True)
    tokens = columns.gather(1, best_part)
    z = logits.gather(1, tokens).float() / temperatures[:, None]
    peak = peaks.amax(1, keepdim=True)
    log_total = ((peaks - peak).double() + totals.log()).logsumexp(1, keepdim=True)
    logprobs = ((z - peak).double() - log_total).float()
    return tokens[:, 0], logprobs[:, 0]

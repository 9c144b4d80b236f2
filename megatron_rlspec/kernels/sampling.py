"""Draw tokens from raw logits with keyed noise, in Triton: temperature, and the log-prob of the token.

**What is drawn.** Of a row's logits x, z = x / T in float32. The token is the argmax of s · z + g, with g the float64
noise of `noise.py`, which is that of SGLang's `multinomial_with_seed`, and s the sharpness (1 but for drafts). A
constant in a row does not change an argmax, so no softmax is needed. Of equal sums the lower column wins. Top-k, top-p
and min-p are left to plain torch (`token_filter.py`).

**One read.** A score needs two float64 logarithms, which few tokens get. Let u be a token's uniform number. Its noise
is -log(-log u), and -log u >= 1 - u, so exp(-score) >= (1 - u) / exp(s · z). The right side is a hash and one
exponential in float32. A token whose right side is more than the exp(-score) of another one cannot win; `SLACK` covers
the rounding of float32. About five tokens of a row of 151,680 are left, and scored exactly. Most tiles have none of
them, and end with one maximum that says so.

**Parts.** A row is cut into parts, so that few rows fill a GPU. `scan` finds the best score of a part, and what the
log-prob needs; torch joins the parts. The token does not depend on the parts; the log-prob does by rounding.

Logits lie between -1e29 and 1e29, or are -inf for tokens that cannot be drawn. NaN counts as -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlspec.kernels.keyed_noise import SLACK, beats, hash_of, hash_of_row, score_of

BLOCK = 1024  # columns of a tile; a thread holds 8, and two tiles at once
PARTS = 16  # of a row, if there are few rows; more rows fill a GPU in FEWER parts
FEWER = 2
PROGRAMS = 512  # that fill a GPU: four on each of 132 multiprocessors
# Registers are those of a thread: without a limit, Triton 3.8 keeps to 64 or 96 and spills the rest.
LAUNCH = {"num_warps": 4, "maxnreg": 128}

_INF = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-1e30)  # stands for -inf where a difference must not be NaN
_START = tl.constexpr(-9e29)  # before any logit is read
# 2^32 - 1 less the rounding of float32, in sums of two numbers up to it
_CERTAIN = tl.constexpr(2.0**32 - 2048)


@triton.jit
def _tile(logits, row, stride, start, end, temperature, BLOCK: tl.constexpr):
    """Read a tile: z [BLOCK], _LOWEST beyond the end, for -inf and for what is not a number."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < end, other=-_INF).to(tl.float32)
    z = x
    if temperature != 1.0:
        z = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return tl.where(z > _LOWEST, z, _LOWEST)


@triton.jit
def _limit(peak, score):
    """Return the largest (1 - u) / exp(s · z - peak) · 2^32 with which a token may still beat this score; finite."""
    return tl.minimum(tl.exp((peak.to(tl.float64) - score).to(tl.float32)) * SLACK, 3e38)


@triton.jit
def scan(
    logits,  # [N, V]
    stride,  # between rows of logits
    width,  # V
    seeds,  # [N] int64
    positions,  # [N]
    temperatures,  # [N]
    sharpnesses,  # [N]
    words,  # [V] ids of the columns, if MAPPED
    part_score,  # [N, parts] float64, -inf if nothing can be drawn
    part_column,  # [N, parts] int64
    part_peak,  # [N, parts]
    part_total,  # [N, parts] float64
    columns_of_part,  # a multiple of BLOCK
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write of one part of a row: its best score with the column, the maximum of z, and the sum of exp(z - maximum)."""
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
    totals = tl.zeros((BLOCK,), tl.float32)  # of exp(z - peak), by place in a tile
    following = _tile(logits, row, stride, start, end, temperature, BLOCK)
    for tile in range(start, end, BLOCK):
        z = following
        # while this tile is worked on
        following = _tile(logits, row, stride, tile + BLOCK, end, temperature, BLOCK)
        columns = tile + tl.arange(0, BLOCK)
        if MAPPED:
            noisy = tl.load(words + columns, mask=columns < end, other=0)
        else:
            noisy = columns
        hashed = hash_of(state, noisy)
        weights = tl.exp(z - peak)
        # 1 - u <= limit · weight, times 2^32
        reached = tl.fma(weights, limit, hashed.to(tl.float32))
        if sharpness != 1.0:
            reached = tl.fma(tl.exp(z * sharpness - top), limit, hashed.to(tl.float32))
            # a large weight would make the sum infinite
            reached = tl.where(z > peak, _INF, reached)
        if tl.max(reached, 0) >= _CERTAIN:
            higher = tl.maximum(peak, tl.max(z, 0))
            totals *= tl.exp(peak - higher)
            peak = higher
            top = peak * sharpness
            weights = tl.exp(z - peak)
            totals += weights
            chances = weights
            if sharpness != 1.0:
                chances = tl.exp(z * sharpness - top)
            rest = (hashed ^ 0xFFFFFFFF).to(tl.float32)  # (1 - u) · 2^32
            bound = tl.where(chances > 0, rest / chances, _INF)
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
                left = (columns != column) & (bound <= _limit(top, best))
                bound = tl.where(left, bound, _INF)
            limit = _limit(top, best)
        else:
            totals += weights
    at = row * tl.num_programs(1) + part
    tl.store(part_score + at, best)
    tl.store(part_column + at, best_column.to(tl.int64))
    tl.store(part_peak + at, peak)
    tl.store(part_total + at, tl.sum(totals.to(tl.float64), 0))


def parts_of(rows: int, width: int) -> tuple[int, int]:
    """Return in how many parts rows are read, and the columns of one."""
    tiles = triton.cdiv(width, BLOCK)
    parts = min(PARTS if rows * FEWER < PROGRAMS else FEWER, tiles)
    return parts, triton.cdiv(tiles, parts) * BLOCK


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    sharpness: Tensor | None = None,
    words: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a column [N] int64 of each row of logits [N, V], with its log-prob [N] at the row's temperature.

    seeds         [N] int64
    positions     [N] integers
    temperatures  [N] or [N, 1], positive
    sharpness     [N] or [N, 1]; None: 1
    words         [V], the token ids of the columns; None: column i is token i

    All are on the device of the logits. The host does not wait for it. Raises ValueError for logits whose columns do
    not lie next to each other.
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
    # of equal scores the first part's, whose columns are lower
    best_part = scores.argmax(1, keepdim=True)
    tokens = columns.gather(1, best_part)
    z = logits.gather(1, tokens).float() / temperatures[:, None]
    peak = peaks.amax(1, keepdim=True)
    log_total = ((peaks - peak).double() + totals.log()).logsumexp(1, keepdim=True)
    logprobs = ((z - peak).double() - log_total).float()
    return tokens[:, 0], logprobs[:, 0]

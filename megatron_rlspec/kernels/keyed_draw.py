"""Draw tokens from raw logits with keyed noise, in Triton: temperature, top-k, top-p, min-p, log-prob of the token.

**What is drawn.** Of a row's logits x, z = x / T in float32. The token is the argmax of s · z + g over the tokens that
the limits keep, with g the float64 noise of `noise.py`, which is that of SGLang's `multinomial_with_seed`, and s the
sharpness (1 but for drafts). A constant in a row does not change an argmax, so no softmax is needed. The limits keep
the first tokens of the row's *order*: larger z first, of equal z the lower column. Of equal sums the lower column wins.

**One read without limits.** A score needs two float64 logarithms, which few tokens get. Let u be a token's uniform
number. Its noise is -log(-log u), and -log u >= 1 - u, so exp(-score) >= (1 - u) / exp(s · z). The right side is a hash
and one exponential in float32. A token whose right side is more than the exp(-score) of another one cannot win;
`SLACK` covers the rounding of float32. About five tokens of a row of 151,680 are left, and scored exactly. Most tiles
have none of them, and end with one maximum that says so.

**Two reads with limits.** The limits cut the order somewhere. Whichever place that is, the winner is a token whose
score beats those of all tokens before it in the order: a *stair*. A row has about ln V of them at most (12 of 151,680
equal tokens, 2 of a peaked row). The first read lists the stairs, by the bound above. The second read adds up, for each
stair, the tokens before it: their number, for top-k, and their mass, for top-p. No token is sorted. A mass is an
integer, exp(z - max) · 2^44, so a sum does not depend on the order of additions.

A list holds STAIRS stairs. If a row has more (once in a million flat rows, or made so on purpose) the last ones in
the order are left out, and if the cut may lie among them, `choose` goes on with two more reads from there.

**Parts.** A row is cut into parts, so that few rows fill a GPU: `scan` lists the stairs of a part, `merge` those of
the row, `add_up` adds up over a part, `choose` decides. The token does not depend on the parts; the log-prob does by
rounding.

Logits lie between -1e29 and 1e29, or are -inf for tokens that cannot be drawn. NaN counts as -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rlspec.kernels.keyed_noise import SLACK, beats, hash_of, hash_of_row, score_of

_ONE = tl.constexpr(2.0**44)  # the mass of the likeliest token
_INF = tl.constexpr(float("inf"))
_LAST = tl.constexpr(2**31 - 1)  # behind every column
_LOWEST = tl.constexpr(-1e30)  # stands for -inf where a difference must not be NaN
_START = tl.constexpr(-9e29)  # before any logit is read
# 2^32 - 1 less the rounding of float32, in sums of two numbers up to it
_CERTAIN = tl.constexpr(2.0**32 - 2048)


@triton.jit
def _before(z, column, other_z, other_column):
    """Return whether a token comes before another one in the row's order."""
    return (z > other_z) | ((z == other_z) & (column < other_column))


@triton.jit
def _best(z, column, score, among):
    """Return z, column and score of the entry that beats the others; (-inf, last column, -inf) if there is none."""
    most = tl.max(tl.where(among, score, -_INF), 0)
    first = tl.min(tl.where(among & (score == most), column, _LAST), 0)
    return tl.max(tl.where(among & (score == most) & (column == first), z, -_INF), 0), first, most


@triton.jit
def _last(z, column):
    least = tl.min(z, 0)
    return least, tl.max(tl.where(z == least, column, -1), 0)


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
def _insert(z, column, score, slots, held_z, held_column, held, floor_z, floor_column, ranked):
    """Put a stair into the list, in place of those that it rules out.

    In a full list the last stair of the order gives way, and the floor moves up to it.
    """
    ruled = _before(z, column, held_z, held_column) | (ranked == 0)
    held = tl.where(ruled & beats(score, column, held, held_column), -_INF, held)
    slot = tl.argmax((held == -_INF).to(tl.int32), 0)
    if tl.min(held, 0) > -_INF:
        last_z, last_column = _last(held_z, held_column)
        slot = tl.argmax(((held_z == last_z) & (held_column == last_column)).to(tl.int32), 0)
        floor_z = last_z
        floor_column = last_column
        if _before(last_z, last_column, z, column):
            slot = tl.full((), -1, tl.int32)
            floor_z = z
            floor_column = column
    held_z = tl.where(slots == slot, z, held_z)
    held_column = tl.where(slots == slot, column, held_column)
    held = tl.where(slots == slot, score, held)
    return held_z, held_column, held, floor_z, floor_column


@triton.jit
def _stairs(
    logits, row, stride, start, end, words, state, temperature, sharpness, ranked, after_z,
    after_column, after, peak, MAPPED: tl.constexpr, BLOCK: tl.constexpr, STAIRS: tl.constexpr,
):  # fmt: skip
    """Read columns [start, end) of a row once.

    after_z, after_column, after   a stair that is kept: only what comes after it in the order and beats it is listed;
                                   (inf, -1, -inf) for none
    peak   the row's maximum, or _START: with a kept stair it must be known, else no tile before it would be worked on
    Returns the list (z, column, score, [STAIRS] each, free places with score -inf), the floor (z, column), from which
    on stairs may be missing, and the maximum of z with the sum of exp(z - maximum).
    """
    slots = tl.arange(0, STAIRS)
    held_z = tl.where(slots == 0, after_z, -_INF)
    held_column = tl.where(slots == 0, after_column, _LAST)
    held = tl.where(slots == 0, after, tl.full((STAIRS,), -_INF, tl.float64))
    best_z = after_z
    best_column = after_column
    best = after
    floor_z = -_INF + temperature
    floor_column = after_column * 0 + _LAST
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
        if ranked:
            reached = tl.where(z >= best_z, _INF, reached)
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
            if ranked:
                bound = tl.where(_before(after_z, after_column, z, columns), bound, _INF)
            open_ = ((ranked != 0) & _before(z, columns, best_z, best_column)) | (
                bound <= _limit(top, best)
            )
            bound = tl.where(open_ & _before(z, columns, floor_z, floor_column), bound, _INF)
            while tl.min(bound, 0) < _INF:
                i = tl.argmin(bound, 0)
                column = tile + i
                new_z = tl.max(tl.where(columns == column, z, -_INF), 0)
                if MAPPED:
                    word = tl.load(words + column)
                else:
                    word = column
                score = score_of(new_z * sharpness, hash_of(state, word))
                rules = (_before(held_z, held_column, new_z, column) | (ranked == 0)) & (
                    held > -_INF
                )
                rules = rules & beats(held, held_column, score, column)
                # the first in the order of those that rule it out
                ruler_z = tl.max(tl.where(rules, held_z, -_INF), 0)
                ruler_column = tl.min(tl.where(rules & (held_z == ruler_z), held_column, _LAST), 0)
                ruler = tl.max(tl.where(rules & (held_column == ruler_column), held, -_INF), 0)
                if ruler == -_INF:
                    held_z, held_column, held, floor_z, floor_column = _insert(
                        new_z,
                        column,
                        score,
                        slots,
                        held_z,
                        held_column,
                        held,
                        floor_z,
                        floor_column,
                        ranked,
                    )
                    best_z, best_column, best = _best(held_z, held_column, held, held > -_INF)
                    ruler_z = new_z
                    ruler_column = column
                    ruler = score
                open_ = ((ranked != 0) & _before(z, columns, ruler_z, ruler_column)) | (
                    bound <= _limit(top, ruler)
                )
                open_ = open_ & (columns != column) & _before(z, columns, floor_z, floor_column)
                bound = tl.where(open_, bound, _INF)
            limit = _limit(top, best)
        else:
            totals += weights
    return held_z, held_column, held, floor_z, floor_column, peak, tl.sum(totals.to(tl.float64), 0)


@triton.jit
def _sums(
    logits,
    row,
    stride,
    start,
    end,
    temperature,
    peak,
    list_z,
    list_column,
    count,
    BLOCK: tl.constexpr,
    STAIRS: tl.constexpr,
):
    """Read columns [start, end) of a row once.

    Returns the number and the mass [STAIRS] of the tokens before each of `add_up` stairs, and the mass of all.
    """
    slots = tl.arange(0, STAIRS)
    numbers = tl.zeros((STAIRS,), tl.int32)
    masses = tl.zeros((STAIRS,), tl.int64)
    whole = tl.full((), 0, tl.int64)
    for tile in range(start, end, BLOCK):
        z = _tile(logits, row, stride, tile, end, temperature, BLOCK)
        columns = tile + tl.arange(0, BLOCK)
        mass = (tl.exp(z - peak) * _ONE).to(tl.int64)
        whole += tl.sum(mass, 0)
        for i in range(count):
            ahead = _before(z, columns, tl.load(list_z + i), tl.load(list_column + i))
            numbers += tl.where(slots == i, tl.sum(ahead.to(tl.int32), 0), 0)
            masses += tl.where(slots == i, tl.sum(tl.where(ahead, mass, 0), 0), 0)
    return numbers, masses, whole


@triton.jit
def _kept(z, score, numbers, masses, whole, peak, top_k, top_p, min_p):
    """Return which stairs the limits keep [STAIRS]."""
    most = tl.where(top_p < 1, top_p.to(tl.float64) * whole.to(tl.float64), _INF)
    return (
        (score > -_INF)
        & (numbers < top_k)
        & (masses.to(tl.float64) <= most)
        & (tl.exp(z - peak) >= min_p)
    )


@triton.jit
def _limits(top_ks, top_ps, min_ps, request, width):
    """Return top-k, top-p and min-p of a row, and 1 if one of them limits anything."""
    k = tl.load(top_ks + request)
    p = tl.load(top_ps + request).to(tl.float32)
    least = tl.load(min_ps + request).to(tl.float32)
    return k, p, least, ((k < width) | (p < 1) | (least > 0)).to(tl.int32)


@triton.jit(do_not_specialize=["nodes"])
def scan(
    logits,  # [N, V]
    stride,  # between rows of logits
    width,  # V
    seeds,  # [B] int64
    positions,  # [N]
    temperatures,  # [B]
    sharpnesses,  # [B]
    top_ks,  # [B]
    top_ps,  # [B]
    min_ps,  # [B]
    words,  # [V] ids of the columns, if MAPPED
    part_z,  # [N, PARTS, STAIRS]
    part_column,  # [N, PARTS, STAIRS]
    part_score,  # [N, PARTS, STAIRS]
    part_floor_z,  # [N, PARTS]
    part_floor_column,  # [N, PARTS]
    part_peak,  # [N, PARTS]
    part_total,  # [N, PARTS]
    nodes,  # N / B
    columns_of_part,  # a multiple of BLOCK
    MAPPED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAIRS: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    request = row // nodes
    _, _, _, ranked = _limits(top_ks, top_ps, min_ps, request, width)
    start = part * columns_of_part
    z, column, score, lowest_z, lowest_column, peak, total = _stairs(
        logits,
        row,
        stride,
        start,
        tl.minimum(start + columns_of_part, width),
        words,
        hash_of_row(seeds, positions, row, request),
        tl.load(temperatures + request),
        tl.load(sharpnesses + request),
        ranked,
        tl.full((), _INF, tl.float32),
        tl.full((), -1, tl.int32),
        tl.full((), -_INF, tl.float64),
        tl.full((), _START, tl.float32),
        MAPPED,
        BLOCK,
        STAIRS,
    )
    at = row * PARTS + part
    places = at * STAIRS + tl.arange(0, STAIRS)
    tl.store(part_z + places, z)
    tl.store(part_column + places, column)
    tl.store(part_score + places, score)
    tl.store(part_floor_z + at, lowest_z)
    tl.store(part_floor_column + at, lowest_column)
    tl.store(part_peak + at, peak)
    tl.store(part_total + at, total)


@triton.jit(do_not_specialize=["nodes"])
def merge(
    part_z,  # [N, PARTS, STAIRS]
    part_column,  # [N, PARTS, STAIRS]
    part_score,  # [N, PARTS, STAIRS]
    part_floor_z,  # [N, PARTS]
    part_floor_column,  # [N, PARTS]
    part_peak,  # [N, PARTS]
    part_total,  # [N, PARTS]
    row_z,  # [N, STAIRS]
    row_column,  # [N, STAIRS]
    row_score,  # [N, STAIRS]
    row_floor_z,  # [N]
    row_floor_column,  # [N]
    row_peak,  # [N]
    row_total,  # [N]
    counts,  # [N] stairs in the list
    top_ks,  # [B]
    top_ps,  # [B]
    min_ps,  # [B]
    width,  # V
    nodes,  # N / B
    PARTS: tl.constexpr,
    STAIRS: tl.constexpr,
):
    """List a row's stairs, from the last in the order to the first. Of more than STAIRS the last ones are left out."""
    row = tl.program_id(0)
    _, _, _, ranked = _limits(top_ks, top_ps, min_ps, row // nodes, width)
    parts = row * PARTS + tl.arange(0, PARTS)
    lowest_z = tl.max(tl.load(part_floor_z + parts), 0)
    same = tl.load(part_floor_z + parts) == lowest_z
    lowest_column = tl.min(tl.where(same, tl.load(part_floor_column + parts), _LAST), 0)
    peak = tl.max(tl.load(part_peak + parts), 0)
    totals_of_parts = tl.load(part_total + parts)
    scale = tl.exp(tl.load(part_peak + parts) - peak).to(tl.float64)
    total = tl.sum(tl.where(totals_of_parts > 0, totals_of_parts * scale, 0.0), 0)

    all_ = row * PARTS * STAIRS + tl.arange(0, PARTS * STAIRS)
    z = tl.load(part_z + all_)
    column = tl.load(part_column + all_)
    score = tl.load(part_score + all_)
    left = (score > -_INF) & _before(z, column, lowest_z, lowest_column)
    slots = tl.arange(0, STAIRS)
    held_z = tl.full((STAIRS,), -_INF, tl.float32)
    held_column = tl.full((STAIRS,), _LAST, tl.int32)
    held = tl.full((STAIRS,), -_INF, tl.float64)
    count = tl.full((), 0, tl.int32)
    while tl.max(left.to(tl.int32), 0) > 0:
        best_z, best_column, best = _best(z, column, score, left)
        slot = slots == count % STAIRS
        if count >= STAIRS:  # the place of the last in the order that is listed
            lowest_z = tl.max(tl.where(slot, held_z, -_INF), 0)
            lowest_column = tl.min(tl.where(slot, held_column, _LAST), 0)
        held_z = tl.where(slot, best_z, held_z)
        held_column = tl.where(slot, best_column, held_column)
        held = tl.where(slot, best, held)
        count += 1
        left = left & (ranked != 0) & _before(z, column, best_z, best_column)
    places = row * STAIRS + slots
    tl.store(row_z + places, held_z)
    tl.store(row_column + places, held_column)
    tl.store(row_score + places, held)
    tl.store(row_floor_z + row, lowest_z)
    tl.store(row_floor_column + row, lowest_column)
    tl.store(row_peak + row, peak)
    tl.store(row_total + row, total)
    tl.store(counts + row, tl.minimum(count, STAIRS))


@triton.jit(do_not_specialize=["nodes"])
def add_up(
    logits,  # [N, V]
    stride,  # between rows of logits
    width,  # V
    temperatures,  # [B]
    top_ks,  # [B]
    top_ps,  # [B]
    min_ps,  # [B]
    row_z,  # [N, STAIRS]
    row_column,  # [N, STAIRS]
    counts,  # [N] stairs in the list
    row_peak,  # [N]
    numbers,  # [N, PARTS, STAIRS] tokens before each stair
    masses,  # [N, PARTS, STAIRS] their mass
    wholes,  # [N, PARTS] mass of a part
    nodes,  # N / B
    columns_of_part,  # a multiple of BLOCK
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAIRS: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    _, _, _, ranked = _limits(top_ks, top_ps, min_ps, row // nodes, width)
    if ranked:
        start = part * columns_of_part
        number, mass, whole = _sums(
            logits,
            row,
            stride,
            start,
            tl.minimum(start + columns_of_part, width),
            tl.load(temperatures + row // nodes),
            tl.load(row_peak + row),
            row_z + row * STAIRS,
            row_column + row * STAIRS,
            tl.load(counts + row),
            BLOCK,
            STAIRS,
        )
        at = row * PARTS + part
        places = at * STAIRS + tl.arange(0, STAIRS)
        tl.store(numbers + places, number)
        tl.store(masses + places, mass)
        tl.store(wholes + at, whole)


@triton.jit(do_not_specialize=["nodes"])
def choose(
    logits,  # [N, V]
    stride,  # between rows of logits
    width,  # V
    seeds,  # [B] int64
    positions,  # [N]
    temperatures,  # [B]
    sharpnesses,  # [B]
    top_ks,  # [B]
    top_ps,  # [B]
    min_ps,  # [B]
    words,  # [V] ids of the columns, if MAPPED
    row_z,  # [N, STAIRS]
    row_column,  # [N, STAIRS]
    row_score,  # [N, STAIRS]
    row_floor_z,  # [N]
    row_floor_column,  # [N]
    row_peak,  # [N]
    row_total,  # [N]
    numbers,  # [N, PARTS, STAIRS] tokens before each stair
    masses,  # [N, PARTS, STAIRS] their mass
    wholes,  # [N, PARTS] mass of a part
    tokens,  # [N] int64
    logprobs,  # [N]
    nodes,  # N / B
    MAPPED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAIRS: tl.constexpr,
):
    """Choose the stair that is kept and beats the others."""
    row = tl.program_id(0)
    request = row // nodes
    k, p, least, ranked = _limits(top_ks, top_ps, min_ps, request, width)
    places = row * STAIRS + tl.arange(0, STAIRS)
    z = tl.load(row_z + places)
    column = tl.load(row_column + places)
    score = tl.load(row_score + places)
    peak = tl.load(row_peak + row)
    kept = score > -_INF
    if ranked:
        parts = row * PARTS + tl.arange(0, PARTS)
        tables = parts[:, None] * STAIRS + tl.arange(0, STAIRS)[None, :]
        number = tl.sum(tl.load(numbers + tables), 0)
        mass = tl.sum(tl.load(masses + tables), 0)
        kept = _kept(z, score, number, mass, tl.sum(tl.load(wholes + parts), 0), peak, k, p, least)
    best_z, best_column, best = _best(z, column, score, kept)
    cut = tl.sum(((score > -_INF) & (kept == 0)).to(tl.int32), 0)
    going_on = (ranked != 0) & (cut == 0) & (tl.load(row_floor_z + row) > -_INF)
    temperature = tl.load(temperatures + request)
    state = hash_of_row(seeds, positions, row, request)
    while going_on:
        z, column, score, lowest_z, lowest_column, _, _ = _stairs(
            logits,
            row,
            stride,
            0,
            width,
            words,
            state,
            temperature,
            tl.load(sharpnesses + request),
            ranked,
            best_z,
            best_column,
            best,
            peak,
            MAPPED,
            BLOCK,
            STAIRS,
        )
        tl.debug_barrier()
        tl.store(row_z + places, z)
        tl.store(row_column + places, column)
        tl.debug_barrier()
        number, mass, whole = _sums(
            logits,
            row,
            stride,
            0,
            width,
            temperature,
            peak,
            row_z + row * STAIRS,
            row_column + row * STAIRS,
            STAIRS,
            BLOCK,
            STAIRS,
        )
        kept = _kept(z, score, number, mass, whole, peak, k, p, least)
        best_z, best_column, best = _best(z, column, score, kept)
        cut = tl.sum(((score > -_INF) & (kept == 0)).to(tl.int32), 0)
        going_on = (cut == 0) & (lowest_z > -_INF)
    tl.store(tokens + row, tl.where(best > -_INF, best_column, 0).to(tl.int64))
    log_total = tl.log(tl.load(row_total + row))
    tl.store(logprobs + row, ((best_z - peak).to(tl.float64) - log_total).to(tl.float32))

"""Triton kernels that read the logits of a row for its loss, and read them again to write the gradient in their place.

`losses.py` launches them, with one program for each row. It passes the tensors of `statistics` by position, some of
`gradient` by name, and the KINDs as text: change both files together. Columns of a row must lie next to each other;
this is not checked. Nothing here talks to other ranks; `losses/fused.py` joins their sums.

A row has logits x over this rank's words (tokens of the vocabulary), and z = x / T in float32. q = softmax(z) over the
words of all ranks. p is a teacher's distribution, given by its logits and their log Σ exp. A logit of minus infinity
has q = 0. If a logit is NaN, the sums of its row are NaN.

`statistics` is the first pass. A program reads a row in tiles of BLOCK columns. Lane i sees column i of every tile. It
keeps the maximum m of its own columns, and sums relative to m: Σ exp(z - m), and by KIND

    entropy      Σ exp(z - m) · (z - m)
    forward_kl   Σ p · (log p - (z - m)), and Σ p

When m rises to m', the sums so far are corrected to m'. The lanes are joined once, at the end of the row.

The first pass also finds whether a coupled draft of sharpness s is the label. The draft is the word with the largest
s · z + noise, so the label is beaten if another word scores more. The noise of a word costs two float64 logarithms. By
the bound that `sampling.py` explains, only a few words of a row need them.

`gradient` is the second pass. It needs log Σ exp over all ranks, and also sums min(p, q) over this rank's words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rlspec.kernels.keyed_noise import SLACK, beats, hash_of, hash_of_row, score_of

# In place of minus infinity: a quarter of float32's lowest number, so that differences of two z do not overflow.
# `losses.head.lowest` is nearly the same number for plain torch.
LOWEST = tl.constexpr(-8.5e37)
_INF = tl.constexpr(float("inf"))
_LAST = tl.constexpr(2**31 - 1)  # "no column yet": the largest int32, so a minimum never takes it


@triton.jit
def _scaled(x, inside, temperature):
    """Return z = x / temperature [BLOCK], LOWEST where there is no word or its logit is minus infinity."""
    z = x.to(tl.float32)
    if temperature != 1.0:
        # Triton's `/` is approximate. `div_rn` rounds as torch's division does.
        z = tl.div_rn(z, tl.zeros_like(z) + temperature)
    return tl.where((inside == 0) | (z < LOWEST), LOWEST, z)


@triton.jit
def _split(lses, row):
    """Return the float64 number `lses[row]` as a sum of two float32 numbers, high and low.

    z - high - low is log q in float32, exact to rounding even where z and log Σ exp are large.
    """
    lse = tl.load(lses + row)
    high = lse.to(tl.float32)
    return high, (lse - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _teacher(logits, start, columns, column, inside, temperature, high, low, MAPPED: tl.constexpr):
    """Return log p [BLOCK] of the student's columns `column` [BLOCK] of one tile.

    start      the first element of the teacher's row in `logits`
    columns    if MAPPED: the teacher's column for each column of the student
    high, low  the teacher's log Σ exp, as `_split` gives it
    """
    teacher_column = column
    if MAPPED:
        teacher_column = tl.load(columns + column, mask=inside, other=0)
    return (
        _scaled(
            tl.load(logits + start + teacher_column, mask=inside, other=0.0), inside, temperature
        )
        - high
        - low
    )


@triton.jit
def statistics(
    logits, stride, width, temperature, teacher, teacher_stride, teacher_rows, teacher_lses,
    columns, seeds, keys, labels, label_scores, words, offset, factors, peaks, totals, seconds,
    masses, bests, beaten, KIND: tl.constexpr, MAPPED: tl.constexpr, FACTORS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of one row over this rank's words: the fields of `losses.Statistics`, which has their meaning.

    `teacher` to `columns` are the fields of `losses.Teacher`, read for KIND "forward_kl" only. `seeds` to `factors` are
    those of `losses.Noise`, read for FACTORS > 0 only. `peaks` to `beaten` are written.

    KIND      "none", "entropy" or "forward_kl"
    MAPPED    whether `columns` and `words` are given; else columns are the teacher's, and ids start at `offset`
    FACTORS   number of sharpnesses in `factors`; 0: no noise
    SLOTS     the power of 2 from FACTORS on, the row length of `beaten`
    beaten    [C, SLOTS] int32: 1 if a word of this rank beats the label, or the row has no seed
    """
    row = tl.program_id(0)
    # in int64: a chunk of logits can have more than 2^31 elements
    start = row.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), _LAST, tl.int32)
    if KIND == "forward_kl":
        teacher_row = tl.load(teacher_rows + row)
        teacher_start = teacher_row * teacher_stride
        high, low = _split(teacher_lses, teacher_row)
    if FACTORS > 0:
        slots = tl.arange(0, SLOTS)
        factor = tl.load(factors + slots, mask=slots < FACTORS, other=1.0)
        state = hash_of_row(seeds, keys, row)
        label = tl.load(labels + row).to(tl.int32)
        label_score = tl.load(label_scores + row)
        label_noisy = score_of(label_score * factor, hash_of(state, label))  # [SLOTS]
        # exp(-noise of the label) · 2^32: the label's part of the bound below
        limit = tl.exp(-score_of(label_score * 0, hash_of(state, label)).to(tl.float32)) * SLACK
        # Rows without a seed and slots without a factor count as lost at once, so that no word is compared for them.
        lost = (slots * 0 + (tl.load(seeds + row) < 0).to(tl.int32)) | (slots >= FACTORS).to(
            tl.int32
        )
    for tile in range(0, width, BLOCK):
        column = tile + lanes
        inside = column < width
        z = _scaled(tl.load(logits + start + column, mask=inside, other=0.0), inside, temperature)
        # `>`: of equal z the first one, which has the lower column
        best = tl.where(z > peak, column, best)
        higher = tl.maximum(peak, z)
        decay = tl.exp(peak - higher)
        # Explicitly 0: in a lane that has seen nothing but LOWEST, exp(z - higher) would be 1.
        weight = tl.where(z == LOWEST, 0.0, tl.exp(z - higher))
        if KIND == "entropy":
            # uses `total` relative to the former `peak`, so before `total` changes
            second = decay * (second + (peak - higher) * total) + weight * (z - higher)
        if KIND == "forward_kl":
            logp = _teacher(
                teacher, teacher_start, columns, column, inside, temperature, high, low, MAPPED
            )
            p = tl.exp(logp)
            # uses `mass` of the tiles before, so before `mass` changes
            second += (higher - peak) * mass + p * (logp - (z - higher))
            mass += p
        total = total * decay + weight
        peak = higher
        if FACTORS > 0:
            if tl.min(lost, 0) == 0:
                if MAPPED:
                    word = tl.load(words + column, mask=inside, other=0)
                else:
                    word = column + offset
                # A word can beat the label at sharpness s only if 1 - u <= exp(s · (z - label's z)) · exp(-label's
                # noise); see `sampling.py`. The bound takes the best s of those not lost yet, by the sign of `ahead`.
                one_minus_u = (hash_of(state, word) ^ 0xFFFFFFFF).to(tl.float32)  # times 2^32
                ahead = z - label_score
                most = tl.max(tl.where(lost == 0, factor, -_INF), 0)
                least = tl.min(tl.where(lost == 0, factor, _INF), 0)
                rivals = inside & (word != label)
                rivals = rivals & (
                    one_minus_u <= tl.exp(tl.maximum(ahead * most, ahead * least)) * limit
                )
                # Score the rivals of this tile exactly, one after the other, until the label has lost at every s.
                while tl.max(rivals.to(tl.int32), 0) > 0:
                    i = tl.argmax(rivals.to(tl.int32), 0)
                    is_rival = lanes == i
                    rival = tl.max(tl.where(is_rival, word, -1), 0)
                    score = score_of(
                        tl.sum(tl.where(is_rival, z, 0.0), 0) * factor, hash_of(state, rival)
                    )
                    lost = lost | beats(score, rival, label_noisy, label).to(tl.int32)
                    rivals = rivals & (is_rival == 0) & (tl.min(lost, 0) == 0)
    # Join the lanes: each lane's sums are corrected from its own maximum to that of the row.
    row_peak = tl.max(peak, 0)
    scale = tl.exp(peak - row_peak)
    if KIND == "forward_kl":
        tl.store(seconds + row, tl.sum(second + (row_peak - peak) * mass, 0))
        tl.store(masses + row, tl.sum(mass, 0))
    elif KIND == "entropy":
        tl.store(seconds + row, tl.sum(scale * (second + (peak - row_peak) * total), 0))
    tl.store(peaks + row, row_peak)
    tl.store(totals + row, tl.sum(total * scale, 0))
    # Of lanes with the row's maximum, the lowest column. A row without words, or with nothing above LOWEST, has none:
    # it gets a column that exists, because `losses/fused.py` looks up the id of the column.
    tl.store(
        bests + row,
        tl.minimum(tl.min(tl.where(peak == row_peak, best, _LAST), 0), tl.maximum(width - 1, 0)),
    )
    if FACTORS > 0:
        tl.store(beaten + row * SLOTS + slots, lost)


@triton.jit
def gradient(
    logits,  # [C, W], overwritten by the gradient, in their own type
    stride,  # elements between rows of logits
    width,  # columns that are read and written
    temperature,
    lses,  # [C] float64: log Σ exp(z) over the words of all ranks
    teacher,  # [M, W]; this and the next four as in `statistics`
    teacher_stride,  # elements between rows of teacher
    teacher_rows,  # [C], of the M
    teacher_lses,  # [M] float64
    columns,  # [width], if MAPPED
    places,  # [C] int64: the label's column, -1 where another rank has it
    on_logprob,  # [C]
    on_entropy,  # [C]; None: without the term of the entropy
    entropies,  # [C]
    scales,  # [C]
    masses,  # [C]: Σ p over the words of all ranks
    overlaps,  # [C], written: Σ min(p, q) over this rank's words
    KIND: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one row's gradient in z in place of its logits, which no other program reads. By KIND it is that of

    label        on_logprob · log q(label) + on_entropy · entropy; reads `places` to `entropies`
    forward_kl   scales · KL(p ‖ q); reads the teacher's arguments, `scales` and `masses`, and writes `overlaps`
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    high, low = _split(lses, row)
    overlap = tl.zeros((BLOCK,), tl.float32)
    if KIND == "label":
        place = tl.load(places + row)
        logprob_factor = tl.load(on_logprob + row)
        if on_entropy is not None:
            entropy_factor = tl.load(on_entropy + row)
            entropy = tl.load(entropies + row)
    else:
        teacher_row = tl.load(teacher_rows + row)
        teacher_start = teacher_row * teacher_stride
        teacher_high, teacher_low = _split(teacher_lses, teacher_row)
        scale = tl.load(scales + row)
        mass = tl.load(masses + row)
    for tile in range(0, width, BLOCK):
        column = tile + lanes
        inside = column < width
        z = _scaled(tl.load(logits + start + column, mask=inside, other=0.0), inside, temperature)
        logq = z - high - low
        q = tl.exp(logq)
        if KIND == "label":
            value = -logprob_factor * q + tl.where(column == place, logprob_factor, 0.0)
            if on_entropy is not None:
                value -= entropy_factor * q * (logq + entropy)
        else:
            logp = _teacher(
                teacher,
                teacher_start,
                columns,
                column,
                inside,
                temperature,
                teacher_high,
                teacher_low,
                MAPPED,
            )
            p = tl.exp(logp)
            overlap += tl.minimum(p, q)
            value = scale * (q * mass - p)  # Σ p = mass, so the gradient sums to 0 over all words
        tl.store(logits + start + column, value.to(logits.dtype.element_ty), mask=inside)
    if KIND == "forward_kl":
        tl.store(overlaps + row, tl.sum(overlap, 0))

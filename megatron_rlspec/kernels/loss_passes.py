"""Read the logits of a row for its loss, and once more to write the gradient in their place, in Triton.

A row has logits x over this rank's words, and z = x / T in float32. q = softmax(z) over the words of all ranks. p is a
teacher's distribution, by its logits and its log Σ exp. A logit of minus infinity has q = 0. With a NaN sums are NaN.

`statistics` is the first pass. Every lane keeps a maximum m of its own, and sums relative to it: Σ exp(z - m), and what
`KIND` asks for. The lanes are joined once, at the end of the row:

entropy      Σ exp(z - m) · (z - m)
forward_kl   Σ p · (log p - (z - m)), and Σ p

It also finds whether a coupled draft is the label: the word with the largest s · z + noise, for several s. The label is
beaten if one word scores more. The noise of a word costs two float64 logarithms. By the bound of `sampling.py` only a
few words of a row need them.

`gradient` is the second pass. It needs log Σ exp over all ranks, and sums up Σ min(p, q).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rlspec.kernels.keyed_noise import SLACK, beats, hash_of, hash_of_row, score_of

LOWEST = tl.constexpr(-8.5e37)  # in place of minus infinity: differences do not overflow
_INF = tl.constexpr(float("inf"))
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _scaled(x, inside, temperature):
    """Return z = x / temperature [BLOCK], LOWEST where there is no word or its logit is minus infinity."""
    z = x.to(tl.float32)
    if temperature != 1.0:
        z = tl.div_rn(z, tl.zeros_like(z) + temperature)
    return tl.where((inside == 0) | (z < LOWEST), LOWEST, z)


@triton.jit
def _split(lses, row):
    """Return a float64 number as a sum of two in float32."""
    lse = tl.load(lses + row)
    high = lse.to(tl.float32)
    return high, (lse - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _teacher(logits, start, columns, at, inside, temperature, high, low, MAPPED: tl.constexpr):
    """Return log p [BLOCK] of a tile of the student's words."""
    place = at
    if MAPPED:
        place = tl.load(columns + at, mask=inside, other=0)
    return (
        _scaled(tl.load(logits + start + place, mask=inside, other=0.0), inside, temperature)
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
    """Write of one row, over this rank's words: peak, total, second and mass (see above), and the best column.

    labels, label_scores  of FACTORS factors: the label's id and its z, of the rank that has it
    beaten                [N, SLOTS]: 1 where a word of this rank beats the label, or the row has no seed
    """
    row = tl.program_id(0)
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
        own = score_of(label_score * factor, hash_of(state, label))
        limit = tl.exp(-score_of(label_score * 0, hash_of(state, label)).to(tl.float32)) * SLACK
        lost = (slots * 0 + (tl.load(seeds + row) < 0).to(tl.int32)) | (slots >= FACTORS).to(
            tl.int32
        )
    for tile in range(0, width, BLOCK):
        at = tile + lanes
        inside = at < width
        z = _scaled(tl.load(logits + start + at, mask=inside, other=0.0), inside, temperature)
        best = tl.where(z > peak, at, best)
        higher = tl.maximum(peak, z)
        decay = tl.exp(peak - higher)
        weight = tl.where(z == LOWEST, 0.0, tl.exp(z - higher))
        if KIND == "entropy":
            second = decay * (second + (peak - higher) * total) + weight * (z - higher)
        if KIND == "forward_kl":
            logp = _teacher(
                teacher, teacher_start, columns, at, inside, temperature, high, low, MAPPED
            )
            p = tl.exp(logp)
            second += (higher - peak) * mass + p * (logp - (z - higher))
            mass += p
        total = total * decay + weight
        peak = higher
        if FACTORS > 0:
            if tl.min(lost, 0) == 0:
                if MAPPED:
                    word = tl.load(words + at, mask=inside, other=0)
                else:
                    word = at + offset
                rest = (hash_of(state, word) ^ 0xFFFFFFFF).to(tl.float32)  # (1 - u) · 2^32
                ahead = z - label_score
                most = tl.max(tl.where(lost == 0, factor, -_INF), 0)
                least = tl.min(tl.where(lost == 0, factor, _INF), 0)
                left = inside & (word != label)
                left = left & (rest <= tl.exp(tl.maximum(ahead * most, ahead * least)) * limit)
                while tl.max(left.to(tl.int32), 0) > 0:
                    i = tl.argmax(left.to(tl.int32), 0)
                    it = lanes == i
                    rival = tl.max(tl.where(it, word, -1), 0)
                    score = score_of(
                        tl.sum(tl.where(it, z, 0.0), 0) * factor, hash_of(state, rival)
                    )
                    lost = lost | beats(score, rival, own, label).to(tl.int32)
                    left = left & (it == 0) & (tl.min(lost, 0) == 0)
    top = tl.max(peak, 0)
    scale = tl.exp(peak - top)
    if KIND == "forward_kl":
        tl.store(seconds + row, tl.sum(second + (top - peak) * mass, 0))
        tl.store(masses + row, tl.sum(mass, 0))
    elif KIND == "entropy":
        tl.store(seconds + row, tl.sum(scale * (second + (peak - top) * total), 0))
    tl.store(peaks + row, top)
    tl.store(totals + row, tl.sum(total * scale, 0))
    tl.store(
        bests + row,
        tl.minimum(tl.min(tl.where(peak == top, best, _LAST), 0), tl.maximum(width - 1, 0)),
    )
    if FACTORS > 0:
        tl.store(beaten + row * SLOTS + slots, lost)


@triton.jit
def gradient(
    logits,  # [C, W], overwritten
    stride,  # between rows of logits
    width,  # columns that are read
    temperature,
    lses,  # [C] float64
    teacher,  # [M, W]
    teacher_stride,  # between rows of teacher
    teacher_rows,  # [C], of the M
    teacher_lses,  # [M] float64
    columns,  # [width], if MAPPED
    places,  # [C]
    on_logprob,  # [C]
    on_entropy,  # [C] or None
    entropies,  # [C]
    scales,  # [C]
    masses,  # [C]
    overlaps,  # [C]
    KIND: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one row's gradient in z in place of its logits.

    KIND label   on_logprob · ∂ log q(label) + on_entropy · ∂ entropy; places: the label's column, -1 on other ranks
    forward_kl   scales · ∂ KL, and overlaps, Σ min(p, q) over this rank's words; masses: Σ p over those of all ranks
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    high, low = _split(lses, row)
    overlap = tl.zeros((BLOCK,), tl.float32)
    if KIND == "label":
        place = tl.load(places + row)
        up = tl.load(on_logprob + row)
        if on_entropy is not None:
            spread = tl.load(on_entropy + row)
            entropy = tl.load(entropies + row)
    else:
        teacher_row = tl.load(teacher_rows + row)
        teacher_start = teacher_row * teacher_stride
        teacher_high, teacher_low = _split(teacher_lses, teacher_row)
        scale = tl.load(scales + row)
        mass = tl.load(masses + row)
    for tile in range(0, width, BLOCK):
        at = tile + lanes
        inside = at < width
        z = _scaled(tl.load(logits + start + at, mask=inside, other=0.0), inside, temperature)
        logq = z - high - low
        q = tl.exp(logq)
        if KIND == "label":
            value = -up * q + tl.where(at == place, up, 0.0)
            if on_entropy is not None:
                value -= spread * q * (logq + entropy)
        else:
            logp = _teacher(
                teacher,
                teacher_start,
                columns,
                at,
                inside,
                temperature,
                teacher_high,
                teacher_low,
                MAPPED,
            )
            p = tl.exp(logp)
            overlap += tl.minimum(p, q)
            value = scale * (q * mass - p)
        tl.store(logits + start + at, value.to(logits.dtype.element_ty), mask=inside)
    if KIND == "forward_kl":
        tl.store(overlaps + row, tl.sum(overlap, 0))

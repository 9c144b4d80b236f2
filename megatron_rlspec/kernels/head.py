"""Launch the kernels of `loss_passes.py` over a chunk of the output head's logits, [C, W].

`read` is the first pass. `write_label` or `write_against` is the second one: each replaces the logits by the gradient,
so a chunk gets one of them, and once. W is the vocabulary, or this rank's words; results are of these words only.
`losses/fused.py` joins the ranks' results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megatron_rlspec.kernels import loss_passes

BLOCK = 1024  # words of a tile
# arguments of `loss_passes.gradient` with one number a row; each KIND reads some of them, the others are None
_ROWS = ("places", "on_logprob", "on_entropy", "entropies", "scales", "masses", "overlaps")


@dataclass(frozen=True)
class Teacher:
    """The teacher of each row: logits [M, W] at the same temperature, and log Σ exp of them [M], float64.

    rows [C] int64 says which of the M it is; columns [width] int32, which of the W words are the student's; None: all.
    """

    logits: Tensor
    lse: Tensor
    rows: Tensor
    columns: Tensor | None = None


@dataclass(frozen=True)
class Noise:
    """The noise that labels [C] int64 were sampled with: seeds [C] int64, negative for none; keys [C] int64.

    scores [C]   the labels' logits over the temperature, in float32
    factors [F]  sharpnesses of a coupled draft, float32
    offset       id of the first word; words [width] int32: their ids, if they are not consecutive
    """

    seeds: Tensor
    keys: Tensor
    labels: Tensor
    scores: Tensor
    factors: Tensor
    offset: int = 0
    words: Tensor | None = None


@dataclass(frozen=True)
class Statistics:
    """What `read` finds in each row, over this rank's words; [C] each. z = logits / temperature.

    peak    the largest z
    total   Σ exp(z - peak)
    second  for the entropy: Σ exp(z - peak) · (z - peak); for forward KL: Σ p · (log p - (z - peak)); else undefined
    mass    for forward KL: Σ p; else undefined
    best    int64: the column of the largest z, of equal ones the lowest
    beaten  [C, F] bool: whether a word of this rank beats the label, or the row has no seed; F = 0 without noise
    """

    peak: Tensor
    total: Tensor
    second: Tensor
    mass: Tensor
    best: Tensor
    beaten: Tensor


def read(
    logits: Tensor,
    width: int,
    temperature: float,
    with_entropy: bool = False,
    teacher: Teacher | None = None,
    noise: Noise | None = None,
) -> Statistics:
    """Read the first `width` columns of each row once.

    With a teacher it is for forward KL, and `with_entropy` does not count. With a teacher and noise, give both
    `teacher.columns` and `noise.words`, or neither: the kernel has one switch for them, MAPPED.
    """
    kind = "none"
    if teacher is not None:
        kind = "forward_kl"
    elif with_entropy:
        kind = "entropy"
    rows = len(logits)
    peak, total, second, mass = logits.new_empty(4, rows, dtype=torch.float32)
    best = logits.new_empty(rows, dtype=torch.int32)
    factors = 0 if noise is None else len(noise.factors)
    slots = triton.next_power_of_2(max(factors, 1))
    beaten = best.new_empty(rows, slots)
    # Arguments that the kernel does not read, here and in `_teacher_arguments`, are `logits`: any tensor will do.
    draws = noise or Noise(logits, logits, logits, logits, logits)
    if rows:
        loss_passes.statistics[(rows,)](
            logits,
            logits.stride(0),
            width,
            temperature,
            *_teacher_arguments(teacher, logits),
            draws.seeds,
            draws.keys,
            draws.labels,
            draws.scores,
            logits if draws.words is None else draws.words,
            draws.offset,
            draws.factors,
            peak,
            total,
            second,
            mass,
            best,
            beaten,
            KIND=kind,
            MAPPED=_mapped(teacher) or draws.words is not None,
            FACTORS=factors,
            SLOTS=slots,
            BLOCK=BLOCK,
        )
    return Statistics(peak, total, second, mass, best.long(), beaten[:, :factors] != 0)


def write_label(
    logits: Tensor,
    width: int,
    temperature: float,
    lse: Tensor,
    places: Tensor,
    on_logprob: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Replace logits by `on_logprob` times the gradient of log q(label) in z, plus that of the entropy.

    places   [C] int64, the labels' columns, -1 where another rank has them
    entropy  ([C] factor of its gradient, [C] entropy)
    """
    spread, entropies = entropy or (None, None)
    rows = {"places": places, "on_logprob": on_logprob, "on_entropy": spread}
    _second_pass(logits, width, temperature, lse, None, **rows, entropies=entropies)


def write_against(
    logits: Tensor,
    width: int,
    temperature: float,
    lse: Tensor,
    teacher: Teacher,
    scales: Tensor,
    masses: Tensor,
) -> Tensor:
    """Replace logits by `scales [C]` times the gradient of forward KL in z; return Σ min(p, q) [C] over these words.

    masses  [C], Σ p over the words of all ranks
    """
    overlap = logits.new_empty(len(logits), dtype=torch.float32)
    rows = {"scales": scales, "masses": masses, "overlaps": overlap}
    _second_pass(logits, width, temperature, lse, teacher, **rows)
    return overlap


def _second_pass(
    logits: Tensor,
    width: int,
    temperature: float,
    lse: Tensor,
    teacher: Teacher | None,
    **rows: Tensor | None,
) -> None:
    """Launch `loss_passes.gradient`. `rows`: those of `_ROWS` that its KIND reads."""
    if len(logits):
        loss_passes.gradient[(len(logits),)](
            logits,
            logits.stride(0),
            width,
            temperature,
            lse,
            *_teacher_arguments(teacher, logits),
            **dict.fromkeys(_ROWS) | rows,
            KIND="label" if teacher is None else "forward_kl",
            MAPPED=_mapped(teacher),
            BLOCK=BLOCK,
        )


def _mapped(teacher: Teacher | None) -> bool:
    return teacher is not None and teacher.columns is not None


def _teacher_arguments(teacher: Teacher | None, logits: Tensor) -> list[Tensor | int | None]:
    """Return the kernels' arguments about a teacher, in their order."""
    if teacher is None:
        return [logits, 0, None, None, None]
    return [teacher.logits, teacher.logits.stride(0), teacher.rows, teacher.lse, teacher.columns]

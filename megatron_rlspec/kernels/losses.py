"""Losses and gradients from a chunk of the output layer's logits, [C, W]: the launches of `loss_passes.py`.

Call `read` first. Then call `write_label` or `write_forward_kl` at most once: each overwrites the logits by their
gradient, so a further call would read gradients as logits.

C is the number of rows. W is the number of this rank's columns: its share of the vocabulary or of the draft vocabulary.
A "word" is a token of the vocabulary. No function here talks to other ranks: results are sums and maxima over this
rank's columns. `losses/fused.py` joins those of the tensor-parallel ranks. `losses/choice.py` compares this module with
plain torch before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megatron_rlspec.kernels import loss_passes

BLOCK = 1024  # columns of a tile; a power of 2, as Triton's `arange` asks
# Arguments of `loss_passes.gradient`, [C] each. Each KIND reads some of them. The others must still be passed: as None.
_ROWS = ("places", "on_logprob", "on_entropy", "entropies", "scales", "masses", "overlaps")


@dataclass(frozen=True)
class Teacher:
    """The teacher (the policy) of a chunk of students.

    logits   [M, W], raw, of the policy's rows; the temperature is the students'
    lse      [M] float64: log Σ exp(logits / temperature) over the vocabulary of all ranks
    rows     [C] int64: the row of `logits` that is the teacher of each student
    columns  [width] int32: the column of `logits` for each column of the student; None: the same columns
    """

    logits: Tensor
    lse: Tensor
    rows: Tensor
    columns: Tensor | None = None


@dataclass(frozen=True)
class Noise:
    """The keyed noise (`noise.py`) with which the labels were sampled, for `Statistics.beaten`.

    seeds    [C] int64; negative: the label was sampled without noise
    keys     [C] int64: the `keys` of `noise.draw`
    labels   [C] int64, token ids
    scores   [C] float32: the label's logit / temperature, on every rank, also where another rank has its column
    factors  [F] float32: sharpnesses of a coupled draft (`types.SHARPNESS`)
    offset   the token id of column 0, if ids are consecutive
    words    [width] int32: the token id of each column, if they are not
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
    """The sums of each row over this rank's columns, [C] float32 where nothing else is said. z = logits / temperature.

    peak    the largest z
    total   Σ exp(z - peak)
    second  with entropy: Σ exp(z - peak) · (z - peak); with a teacher: Σ p · (log p - (z - peak)); else uninitialised
    mass    with a teacher: Σ p; else uninitialised
    best    int64: the column of the largest z, of equal ones the lowest
    beaten  [C, F] bool: True if, at this sharpness, some column of this rank scores more than the label, or if the row
            has no seed. F = 0 without noise
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
    """Read the first `width` <= W columns of each row of `logits` [C, W] once; the logits stay as they are.

    With a `width` of 0 (a rank without words) `peak` is `loss_passes.LOWEST`, the sums are 0, and `best` is 0.

    Columns of `logits` and of `teacher.logits` must lie next to each other (stride 1). This is not checked.

    With a teacher the sums are those of forward KL, and `with_entropy` is ignored. With a teacher and noise, give both
    `teacher.columns` and `noise.words`, or neither: the kernel has one switch, MAPPED, and reads both or neither.
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
    slots = triton.next_power_of_2(max(factors, 1))  # Triton's `arange` needs a power of 2
    beaten = best.new_empty(rows, slots)
    # Without noise or words, `logits` stands for the arguments that the kernel does not read.
    noise_or_unread = noise or Noise(logits, logits, logits, logits, logits)
    if rows:
        loss_passes.statistics[(rows,)](
            logits,
            logits.stride(0),
            width,
            temperature,
            *_teacher_arguments(teacher, logits),
            noise_or_unread.seeds,
            noise_or_unread.keys,
            noise_or_unread.labels,
            noise_or_unread.scores,
            logits if noise_or_unread.words is None else noise_or_unread.words,
            noise_or_unread.offset,
            noise_or_unread.factors,
            peak,
            total,
            second,
            mass,
            best,
            beaten,
            KIND=kind,
            MAPPED=_mapped(teacher) or noise_or_unread.words is not None,
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
    """Overwrite `logits` by the gradient in z of on_logprob · log q(label) + on_entropy · entropy.

    z is logits / temperature: for the gradient in the logits, the caller divides the two factors by the temperature.

    lse         [C] float64: log Σ exp(z) over the vocabulary of all ranks
    places      [C] int64: the label's column; -1 where another rank has it
    on_logprob  [C] float32
    entropy     (on_entropy [C], the row's entropy [C]), float32; None: without the second term
    """
    on_entropy, entropies = entropy or (None, None)
    rows = {"places": places, "on_logprob": on_logprob, "on_entropy": on_entropy}
    _second_pass(logits, width, temperature, lse, None, **rows, entropies=entropies)


def write_forward_kl(
    logits: Tensor,
    width: int,
    temperature: float,
    lse: Tensor,
    teacher: Teacher,
    scales: Tensor,
    masses: Tensor,
) -> Tensor:
    """Overwrite `logits` by `scales [C]` times the gradient of forward KL in z. Return Σ min(p, q) [C] of this rank.

    `teacher.logits` are read meanwhile, so they must not share memory with `logits`.

    lse     [C] float64: log Σ exp(z) of the student over the columns of all ranks
    masses  [C] float32: Σ p over the student's columns of all ranks; 1 if these are the whole vocabulary
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
    """Return the kernels' arguments `teacher` to `columns`, in their order. Without a teacher none of them is read."""
    if teacher is None:
        return [logits, 0, None, None, None]
    return [teacher.logits, teacher.logits.stride(0), teacher.rows, teacher.lse, teacher.columns]

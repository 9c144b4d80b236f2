"""Losses of a chunk of rows by the kernels of `kernels/losses.py`: raw logits are read twice and never copied.

The first read gives all but the gradient and Σ min(p, q). The second one gives these, and writes the gradient over the
logits. This file joins the results of the tensor-parallel ranks, each of which has its columns of the logits.
`losses/plain.py` computes the same in plain torch; `losses/choice.py` calls one or the other.

Shapes as in `losses/drafter.py`. Losses are float32, and the same on every rank. Log Σ exp is float64, because the
logits here are not relative to the largest one: float32 would lose digits of small differences between large numbers.

These are collective, all ranks of the head's group must call them in the same order: `Taught.logprob`, and of
`FusedRows` the constructor, `best`, `coupled` and `write_forward_kl`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.losses.head import DraftHead, VocabParallelHead, lowest
from megatron_rlspec.packing.transfer import to_device
from megatron_rlspec.types import SHARPNESS


@dataclass(frozen=True)
class Taught:
    """The teacher of C students: rows of the policy's raw logits.

    head    of the policy, over the whole vocabulary
    logits  `[M, V/tp]`, not divided by the temperature
    lse     `[M]` float64: log Σ exp(logits / temperature)
    rows    `[C]` int64: the row of `logits` that each student learns from
    """

    head: VocabParallelHead
    logits: Tensor
    lse: Tensor
    rows: Tensor

    def logprob(self, ids: Tensor) -> Tensor:
        """Return log p `[C]` float32 of the token ids `ids [C]`. Collective."""
        columns = self.head.places(ids)
        # An id of another rank has column -1. Column 0 is read in its place and counts as 0 in the sum over ranks.
        index = columns.clamp(min=0)
        logits = self.logits[self.rows, index]
        scaled = _scaled(logits, self.head)
        scaled.masked_fill_(columns < 0, 0)
        logprob = self.head.sum(scaled).double() - self.lse[self.rows]
        return logprob.float()


class FusedRows:
    """A chunk of rows of the policy, or of students, whose logits have been read. `PlainRows` has the same methods.

    head     with `kernel` set; over the whole vocabulary, or a `DraftHead`
    logits   `[C, width]`, of `head.logits`; `write_label` and `write_forward_kl` overwrite them
    noise    (seeds `[C]`, keys `[C]`), as for `Student`; for `coupled`

    Attributes:

    scores   the raw logits, until a method writes the gradient over them
    lse      `[C]` float64: log Σ exp(logits / temperature)
    logprob  `[C]`: log q(label)
    value    `[C]`: forward KL with a teacher, else the entropy if `with_entropy`, else 0

    Call one method that writes, and once: a second one would read gradients as logits. Call `back` and `of_weight`
    after it: before it they would take logits for gradients.
    """

    def __init__(
        self,
        head: VocabParallelHead,
        logits: Tensor,
        labels: Tensor,
        with_entropy: bool = False,
        teacher: Taught | None = None,
        noise: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._head = head
        self._labels = labels
        self.scores = logits
        kernel: Any = head.kernel
        self._kernel = kernel
        draft_head = head if isinstance(head, DraftHead) else None
        width = head.width
        if draft_head is not None and not draft_head.some:
            # This rank has none of the words. Its one column is a stand-in (`DraftHead.of_words`): kernels skip it, and
            # the zeros are its gradient.
            width = 0
            logits.zero_()
        # the first arguments of `read`, `write_label` and `write_forward_kl` in `kernels/losses.py`
        self._kernel_input = logits, width, head.temperature
        columns = None
        ids = None
        # Both or neither: the kernel has one switch for them (MAPPED).
        if draft_head is not None:
            columns = draft_head.columns.to(torch.int32)
            ids = draft_head.ids.to(torch.int32)
        self._teacher = teacher and kernel.Teacher(
            teacher.logits, teacher.lse, teacher.rows, columns
        )
        label_logit = head.pick(logits, labels)
        label = head.sum(_scaled(label_logit, head))
        noise_of_labels = None
        if noise is not None:
            factors = to_device(torch.tensor(SHARPNESS), logits.device)
            seeds, keys = (to_device(x, logits.device) for x in noise)
            noise_of_labels = kernel.Noise(seeds, keys, labels, label, factors, head.start, ids)
        of_rank = kernel.read(*self._kernel_input, with_entropy, self._teacher, noise_of_labels)
        self._of_rank = of_rank
        # Each rank's sums are relative to the largest z of its own columns. Correct them to that of all columns, then
        # add them over the ranks, in one call.
        peak = head.max(of_rank.peak)
        below_peak = of_rank.peak - peak
        scale = below_peak.exp()
        parts = [of_rank.total * scale]
        if teacher is not None:
            parts.append(of_rank.second - below_peak * of_rank.mass)
            parts.append(of_rank.mass)
        elif with_entropy:
            second_of_rank = of_rank.second + below_peak * of_rank.total
            parts.append(scale * second_of_rank)
        sums = head.sum(torch.stack(parts))
        total, *rest = sums.double()  # in the order of `parts`
        self.lse = peak.double() + total.log()
        self._best_logprob = (peak.double() - self.lse).float()
        logprob = label.double() - self.lse
        self.logprob = logprob.float()
        self.value = torch.zeros_like(label)
        if teacher is not None:
            # Over a part of the vocabulary: p(S) · KL(p / p(S) ‖ q), as in `losses/plain.py`.
            second, mass = rest
            self._mass = torch.ones_like(label)
            if draft_head is not None:
                self._mass = mass.float()
            # Σ p · (log p - log q), with log q = (z - peak) - log total
            value = second + mass * total.log()
            of_mass = torch.xlogy(self._mass, self._mass)
            self.value = value.float() - of_mass
        elif with_entropy:
            # -Σ q · log q, with q = exp(z - peak) / total
            (second,) = rest
            value = second / total - total.log()
            self.value = -value.float()

    def best(self) -> tuple[Tensor, Tensor]:
        """Return the ids `[C]` of the largest logits, of equal ones the lowest id, and log q `[C]` of them."""
        ids = self._head.ids_of(self._of_rank.best)
        return self._head.best(self._of_rank.peak, ids), self._best_logprob

    def coupled(self) -> Tensor:
        """Return `[C, F]`: 1.0 where a draft with the label's noise is the label, by sharpness; 0.0 without a seed."""
        # Floats for `head.max`. A label that a word of any rank beats is beaten, hence the maximum.
        beaten = self._of_rank.beaten.float()
        return 1 - self._head.max(beaten)

    def write_label(self, on_logprob: Tensor) -> None:
        """Overwrite the logits by `on_logprob [C]` times the gradient of log q(label) in logits / temperature.

        The caller divides `on_logprob` by the temperature if it wants the gradient in the logits.
        """
        columns = self._head.places(self._labels)
        self._kernel.write_label(*self._kernel_input, self.lse, columns, on_logprob)

    def write_forward_kl(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrite the logits by `scales [C]` times the gradient of forward KL in logits / temperature.

        Return (Σ min(p, q), forward KL), `[C]` each. It needs a teacher.
        """
        overlap = self._kernel.write_forward_kl(
            *self._kernel_input, self.lse, self._teacher, scales, self._mass
        )
        return self._head.sum(overlap), self.value

    def back(self) -> Tensor:
        """Return the gradient `[C, H]` of the hidden states, of this rank's columns: the caller sums it over ranks."""
        return self._head.back(self.scores)

    def of_weight(self, hidden: Tensor) -> Tensor:
        """Return the gradient `[width, H]` of this rank's rows of the output layer; `hidden [C, H]`."""
        return self.scores.t() @ hidden


def _scaled(x: Tensor, head: VocabParallelHead) -> Tensor:
    """Return z = x / temperature in float32, finite for a logit of minus infinity; the kernels compute the same."""
    scaled = x.float().div_(head.temperature)
    return scaled.clamp_(min=lowest(torch.float32))

"""Losses of a chunk of rows from raw logits, vocabulary-parallel, by `kernels/head.py`: in two reads, without a copy.

The first read gives all but the gradient, which the second one writes in place of the logits. Shapes as in
`losses/drafter.py`. Results are float32, and the same on every rank. Log Σ exp is float64, because the logits here
are not relative to the largest one.
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
    """The policy's logits `[M, V/tp]`, log Σ exp of them `[M]`, and the row of them `[C]` that each student learns."""

    head: VocabParallelHead
    logits: Tensor
    lse: Tensor
    rows: Tensor

    def logprob(self, ids: Tensor) -> Tensor:
        """Return log p `[C]` of `ids [C]`."""
        columns = self.head.places(ids)
        # of ids that another rank has, any column, whose logit does not count
        index = columns.clamp(min=0)
        logits = self.logits[self.rows, index]
        scaled = _scaled(logits, self.head)
        scaled.masked_fill_(columns < 0, 0)
        logprob = self.head.sum(scaled).double() - self.lse[self.rows]
        return logprob.float()


class FusedRows:
    """Students, or rows of the policy, that have been read once.

    logits  `[C, width]`, of `head.logits`
    noise   seeds and keys `[C]`, as for `Student`; for `coupled`

    scores are the logits, lse `[C]` float64, logprob `[C]`, log q(label), and value `[C]`: forward KL with a teacher,
    the entropy if it is asked for, else 0
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
        words = head if isinstance(head, DraftHead) else None
        width = head.width
        if words is not None and not words.some:
            width = 0
            logits.zero_()  # of a word that this rank does not have: its gradient is 0
        self._chunk = logits, width, head.temperature
        columns = None
        ids = None
        if words is not None:
            columns = words.columns.to(torch.int32)
            ids = words.ids.to(torch.int32)
        self._teacher = teacher and kernel.Teacher(
            teacher.logits, teacher.lse, teacher.rows, columns
        )
        label_logit = head.pick(logits, labels)
        label = head.sum(_scaled(label_logit, head))
        draws = None
        if noise is not None:
            factors = to_device(torch.tensor(SHARPNESS), logits.device)
            seeds, keys = (to_device(x, logits.device) for x in noise)
            draws = kernel.Noise(seeds, keys, labels, label, factors, head.start, ids)
        # what this rank's columns give
        here = kernel.read(*self._chunk, with_entropy, self._teacher, draws)
        self._here = here
        peak = head.max(here.peak)
        behind = here.peak - peak
        scale = behind.exp()
        parts = [here.total * scale]
        if teacher is not None:
            parts.append(here.second - behind * here.mass)
            parts.append(here.mass)
        elif with_entropy:
            second_here = here.second + behind * here.total
            parts.append(scale * second_here)
        sums = head.sum(torch.stack(parts))
        total, *second = sums.double()
        self.lse = peak.double() + total.log()
        self._best_logprob = (peak.double() - self.lse).float()
        logprob = label.double() - self.lse
        self.logprob = logprob.float()
        self.value = torch.zeros_like(label)
        if teacher is not None:
            # Over a part of the vocabulary: p(S) · KL(p / p(S) ‖ q), as in `losses/plain.py`.
            self._mass = torch.ones_like(label)
            if words is not None:
                self._mass = second[1].float()
            value = second[0] + second[1] * total.log()
            of_mass = torch.xlogy(self._mass, self._mass)
            self.value = value.float() - of_mass
        elif with_entropy:
            value = second[0] / total - total.log()
            self.value = -value.float()

    def best(self) -> tuple[Tensor, Tensor]:
        """Return the ids `[C]` of the largest logits, of equal ones the lowest id, and log q of them."""
        ids = self._head.ids_of(self._here.best)
        return self._head.best(self._here.peak, ids), self._best_logprob

    def coupled(self) -> Tensor:
        """Return `[C, F]`: 1.0 where a draft with the label's noise is the label, by sharpness; 0.0 without a seed."""
        beaten = self._here.beaten.float()
        return 1 - self._head.max(beaten)

    def write_label(self, on_logprob: Tensor) -> None:
        """Replace the logits by `on_logprob [C]` times the gradient of log q(label) in q's scores."""
        columns = self._head.places(self._labels)
        self._kernel.write_label(*self._chunk, self.lse, columns, on_logprob)

    def against(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ min(p, q) and forward KL, `[C]`, and replace the logits by `scales [C]` times its gradient."""
        overlap = self._kernel.write_against(
            *self._chunk, self.lse, self._teacher, scales, self._mass
        )
        return self._head.sum(overlap), self.value

    def back(self) -> Tensor:
        """Return the gradient `[C, H]` of the hidden states, after a method that writes; `VocabParallelHead.back`."""
        return self._head.back(self.scores)

    def of_weight(self, hidden: Tensor) -> Tensor:
        """Return the gradient `[width, H]` of the output layer, after a method that writes; `hidden [C, H]`."""
        return self.scores.t() @ hidden


def _scaled(x: Tensor, head: VocabParallelHead) -> Tensor:
    scaled = x.float().div_(head.temperature)
    return scaled.clamp_(min=lowest(torch.float32))

"""Losses by kernels or in plain torch: which of them a rank takes, and what both have in common.

Shapes as in `losses/drafter.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.kernels import chosen
from megatron_rlspec.losses.fused import FusedRows, Taught
from megatron_rlspec.losses.head import VocabParallelHead
from megatron_rlspec.losses.plain import PlainRows, PlainTeacher
from megatron_rlspec.noise import draw

Teacher = Taught | PlainTeacher


def head_of(
    weight: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> VocabParallelHead:
    """Return the head of `weight [V/tp, H]`. Kernels compute its losses if they are right on all ranks of `group`."""
    head = VocabParallelHead.of(weight, temperature, group)
    return replace(head, kernel=chosen.head(head.weight, agrees, head.group))


def teacher_of(head: VocabParallelHead, scores: Tensor, lse: Tensor, rows: Tensor) -> Teacher:
    """Return the teacher of C students: row `rows[i]` of the policy's M rows for student i.

    scores  `[M, V/tp]`: raw logits where kernels compute the losses of `head`, else log-probabilities
    lse     `[M]`, log Σ exp of logits / temperature; for kernels only
    """
    if head.kernel is None:
        return PlainTeacher(head, scores.index_select(0, rows))
    return Taught(head, scores, lse, rows)


def read(
    head: VocabParallelHead,
    hidden: Tensor,
    labels: Tensor,
    with_entropy: bool = False,
    teacher: Any = None,
    noise: tuple[Tensor, Tensor] | None = None,
) -> FusedRows | PlainRows:
    """Read the rows `hidden [C, H]` of the policy, or of students of a `teacher_of` this head."""
    if head.kernel is None:
        return PlainRows(head, hidden, labels, with_entropy, teacher, noise)
    return FusedRows(head, head.logits(hidden), labels, with_entropy, teacher, noise)


def policy_gradient(
    head: VocabParallelHead,
    hidden: Tensor,
    labels: Tensor,
    lse: Tensor,
    on_logprob: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return `on_logprob [C]` times the gradient of log p(label) in the logits, `[C, width]`, plus that of the entropy.

    lse      as `read` found it
    entropy  ([C] factor of its gradient, [C] entropy)
    """
    if head.kernel is not None:
        logits = head.logits(hidden)
        above = on_logprob / head.temperature
        if entropy is not None:
            entropy = entropy[0] / head.temperature, entropy[1]
        head.kernel.write_label(
            logits, head.width, head.temperature, lse, head.places(labels), above, entropy
        )
        return logits
    logp = head.scores(hidden)
    logp.sub_(lse[:, None])
    p = logp.exp()
    factor = -on_logprob[:, None]
    if entropy is not None:
        on_entropy, value = entropy
        spread = logp.add_(value[:, None])
        factor = spread.mul_(-on_entropy[:, None]).add_(factor)
    grad = head.add_at(p.mul_(factor), labels, on_logprob)
    return grad.div_(head.temperature).to(hidden.dtype)


@torch.no_grad()
def agrees(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernel` finds losses and gradients of plain torch, on 4 rows in float32 and in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 16, generator=generator)
    words = torch.randn(2500, 16, generator=generator)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        hidden, taught = rows.to(device, dtype).chunk(2)
        weight = words.to(device, dtype)
        plain = VocabParallelHead.of(weight, 0.9, None)
        index = torch.arange(len(hidden), device=device)
        labels = draw(plain.logits(hidden).float() / plain.temperature, index, index)
        found = _results(replace(plain, kernel=kernel), hidden, taught, labels)
        expected = _results(plain, hidden, taught, labels)
        near = []
        for ours, right, allowed in zip(found, expected, (1e-4, tolerance, 0.0), strict=True):
            for a, b in zip(ours, right, strict=True):
                near.append((a - b).float().norm() <= allowed * b.float().norm())
        if not bool(torch.stack(near).all()):
            return False
    return True


def _results(
    head: VocabParallelHead, hidden: Tensor, taught: Tensor, labels: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return three lists: losses `[C]` of policy and drafter, gradients `[C, H]`, and what must be equal exactly.

    The last list has the drafter's likeliest words, and whether coupled drafts are the labels. The noise of row i has
    seed i and key i.

    hidden, taught  `[C, H]`, what the head reads: of the policy and the students, and of their teacher
    """
    policy = read(head, hidden, labels, with_entropy=True)
    given = read(head, taught, labels)
    if head.kernel is None:
        given.scores.sub_(given.lse[:, None])
    rows = torch.arange(len(hidden), device=hidden.device)
    teacher = teacher_of(head, given.scores, given.lse, rows)
    student = read(head, hidden, labels, teacher=teacher, noise=(rows, rows))
    best, best_logprob = student.best()
    coupled = student.coupled()
    ones = torch.ones_like(policy.logprob)
    overlap, divergence = student.against(ones)
    losses = [policy.logprob, policy.value, best_logprob, overlap, divergence]
    gradients = [student.back()]
    for entropy in (None, (ones, policy.value)):
        gradient = policy_gradient(head, hidden, labels, policy.lse, ones, entropy)
        gradients.append(head.back(gradient))
    return losses, gradients, [best, coupled]

"""The choice between kernels (`fused.py`) and plain torch (`plain.py`) for all losses: one interface to both.

`head_of` chooses. `VocabParallelHead.kernel` then says what was chosen: a module, or None for plain torch. The two
differ in what `scores` and `lse` are (see `teacher_of`), so code that uses these must look at `head.kernel`, as
`losses/drafter.py` and `losses/logprobs.py` do. These two are the callers of this file.

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
    """Return the head of `weight [V/tp, H]`, this rank's rows of the output layer.

    Kernels compute its losses if they agree with plain torch on all ranks of `group`. On a GPU the first call for a
    group is collective (`kernels/chosen.py`), so all of its ranks must make it. `temperature` is above 0.
    """
    head = VocabParallelHead.of(weight, temperature, group)
    return replace(head, kernel=chosen.losses(head.weight, agrees, head.group))


def teacher_of(head: VocabParallelHead, scores: Tensor, lse: Tensor, rows: Tensor) -> Teacher:
    """Return the teacher of C students: row `rows[i]` of the policy's M rows for student i.

    scores  `[M, V/tp]`: raw logits where kernels compute the losses of `head`, else log-probabilities
    lse     `[M]`, log Σ exp(logits / temperature); plain torch does not read it
    rows    `[C]` int64, on the device of `scores`
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
    """Compute logits, log q(label) and more of one chunk of rows; see `FusedRows` for what the result has. Collective.

    Of the result, call `best` and `coupled` before a method that writes: in `PlainRows` writing overwrites the scores.

    hidden   `[C, H]`: of the policy, or of the drafter (a student)
    labels   `[C]` token ids
    teacher  for the drafter: what `teacher_of` returned, for the same `kernel` as that of this head; only without
             `with_entropy`
    noise    (seeds `[C]`, keys `[C]`): for `coupled` of the result; may be on the CPU
    """
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
    """Return the gradient `[C, width]` of on_logprob · log p(label) + on_entropy · entropy in the logits.

    The logits are computed again from `hidden [C, H]`, because those of the forward are not kept. Collective without
    kernels (`VocabParallelHead.scores`).

    lse         `[C]`, the attribute `lse` of what `read` returned for the same rows and head: of raw logits with
                kernels, else of `head.scores`
    on_logprob  `[C]`
    entropy     (on_entropy `[C]`, the rows' entropy `[C]` as `read` computed it); None: without the second term
    """
    if head.kernel is not None:
        logits = head.logits(hidden)
        # The kernel's gradient is in z = logits / temperature: the chain rule gives one more 1 / temperature.
        scaled = on_logprob / head.temperature
        if entropy is not None:
            entropy = entropy[0] / head.temperature, entropy[1]
        head.kernel.write_label(
            logits, head.width, head.temperature, lse, head.places(labels), scaled, entropy
        )
        return logits  # the kernel has written the gradient over them
    # ∂ log p(label) = onehot - p; ∂ entropy = -p · (log p + entropy). In place, since [C, width] takes much memory.
    logp = head.scores(hidden)
    logp.sub_(lse[:, None])
    p = logp.exp()
    factor = -on_logprob[:, None]
    if entropy is not None:
        on_entropy, value = entropy
        surprise = logp.add_(value[:, None])
        factor = surprise.mul_(-on_entropy[:, None]).add_(factor)
    grad = head.add_at(p.mul_(factor), labels, on_logprob)
    return grad.div_(head.temperature).to(hidden.dtype)


@torch.no_grad()
def agrees(kernel: ModuleType, device: torch.device) -> bool:
    """Return whether `kernel` computes plain torch's losses and gradients, on 4 rows in float32 and in bfloat16.

    `kernel` is `kernels.losses`; tests pass a wrong one. `kernels/chosen.py` calls this, and catches what the kernels
    raise. The vocabulary has 2,500 tokens, so that rows have several tiles of 1,024 and the last tile is not full.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 16, generator=generator)
    words = torch.randn(2500, 16, generator=generator)
    # The tolerances are of gradients: they have the type of the logits, and bfloat16 rounds them coarsely.
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        hidden, teacher_hidden = rows.to(device, dtype).chunk(2)
        weight = words.to(device, dtype)
        plain = VocabParallelHead.of(weight, 0.9, None)
        # Labels are sampled with the noise of `_results`, so that some coupled drafts are labels and some are not.
        index = torch.arange(len(hidden), device=device)
        labels = draw(plain.logits(hidden).float() / plain.temperature, index, index)
        actual = _results(replace(plain, kernel=kernel), hidden, teacher_hidden, labels)
        expected = _results(plain, hidden, teacher_hidden, labels)
        near = []
        # Losses, gradients, and what must be equal exactly. NaN fails the comparison.
        for ours, right, allowed in zip(actual, expected, (1e-4, tolerance, 0.0), strict=True):
            for a, b in zip(ours, right, strict=True):
                near.append((a - b).float().norm() <= allowed * b.float().norm())
        if not bool(torch.stack(near).all()):
            return False
    return True


def _results(
    head: VocabParallelHead, hidden: Tensor, teacher_hidden: Tensor, labels: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return three lists: losses `[C]` of policy and drafter, gradients `[C, H]`, and what must be equal exactly.

    The last list has the drafter's likeliest tokens, and whether coupled drafts are the labels. The noise of row i has
    seed i and key i.

    hidden          `[C, H]`, read as the policy's rows and as the students'
    teacher_hidden  `[C, H]`, of the students' teacher
    """
    policy = read(head, hidden, labels, with_entropy=True)
    of_teacher = read(head, teacher_hidden, labels)
    if head.kernel is None:
        of_teacher.scores.sub_(of_teacher.lse[:, None])  # `teacher_of` takes log-probabilities here
    rows = torch.arange(len(hidden), device=hidden.device)
    teacher = teacher_of(head, of_teacher.scores, of_teacher.lse, rows)
    student = read(head, hidden, labels, teacher=teacher, noise=(rows, rows))
    # `best` comes first: in `PlainRows` the methods after it overwrite the scores that it reads.
    best, best_logprob = student.best()
    coupled = student.coupled()
    ones = torch.ones_like(policy.logprob)
    overlap, divergence = student.write_forward_kl(ones)
    losses = [policy.logprob, policy.value, best_logprob, overlap, divergence]
    gradients = [student.back()]
    for entropy in (None, (ones, policy.value)):
        gradient = policy_gradient(head, hidden, labels, policy.lse, ones, entropy)
        gradients.append(head.back(gradient))
    return losses, gradients, [best, coupled]

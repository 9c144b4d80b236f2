"""Time the output layer: losses of policy and drafter by kernels and by plain torch, passes, chunks, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gpu.figures import Figures, forget_peak, median, peak_gib
from gpu.plan import Plan
from megatron_rlspec.kernels import chosen
from megatron_rlspec.losses.drafter import Student
from megatron_rlspec.losses.fused import FusedRows
from megatron_rlspec.losses.head import VocabParallelHead
from megatron_rlspec.losses.logprobs import policy_logprobs


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    rows, chunks = plan.head
    shape, dtype = plan.shape, getattr(torch, plan.dtype)
    std = shape.hidden**-0.5
    weight = (torch.randn(shape.vocab, shape.hidden, device=plan.device) * std).to(dtype).requires_grad_()
    hidden = torch.randn(rows, shape.hidden, device=plan.device).to(dtype).requires_grad_()
    labels = torch.randint(0, shape.vocab, (rows,))
    losses = _losses(hidden, weight, labels)
    if plan.on_gpu:
        with figures.attempt("kernels"):
            _by_kernels(plan, figures, losses, hidden, weight)
    with mock.patch.object(chosen, "head", lambda *_: None):
        _by_torch(plan, figures, losses, hidden, weight)


def _by_kernels(
    plan: Plan, figures: Figures, losses: dict[str, Callable[[int | None], None]], hidden: Any, weight: Any
) -> None:
    """Time the losses, and one chunk's passes; compare the gradient with that of plain torch."""
    rows, chunks = plan.head
    head = VocabParallelHead.of(weight, 1.0, None, True)
    if head.kernel is None:
        raise RuntimeError("the kernels do not run here; the log says why")
    for name, loss in losses.items():
        _say(plan, figures, f"{name}, kernels", lambda: loss(None), rows)  # noqa: B023
    losses["drafter, ce"](None)
    found = hidden.grad
    with mock.patch.object(chosen, "head", lambda *_: None):
        losses["drafter, ce"](chunks[0])
    apart = float((found - hidden.grad).float().norm() / hidden.grad.float().norm())
    figures.say("drafter, ce, kernels: the gradient's distance from plain torch's", apart, "", "relative norm")
    logits = head.logits(hidden.detach()[: chunks[0]])
    labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    note = f"{len(logits):,} rows of {plan.shape.vocab:,} words"
    first = median(plan.repeats, lambda: FusedRows(head, logits, labels, "entropy"))
    figures.say("a chunk: the first pass", first, "ms", note)
    read = FusedRows(head, logits, labels)
    figures.say("a chunk: the second pass", median(plan.repeats, lambda: read.write_label(read.logprob)), "ms", note)


def _by_torch(
    plan: Plan, figures: Figures, losses: dict[str, Callable[[int | None], None]], hidden: Any, weight: Any
) -> None:
    rows, chunks = plan.head
    _passes(plan, figures, VocabParallelHead.of(weight, 1.0, None, True), hidden.detach()[: chunks[0]])
    for chunk in chunks:
        for name, loss in losses.items():
            _say(plan, figures, f"{name}, chunks of {chunk:,}", lambda: loss(chunk), rows)  # noqa: B023
    compiled = torch.compile(Student._learn)
    with mock.patch.object(Student, "_learn", compiled):
        for name in ("drafter, ce", "drafter, forward_kl"):
            _say(plan, figures, f"{name}, compiled", lambda: losses[name](chunks[0]), rows)  # noqa: B023


def _say(plan: Plan, figures: Figures, name: str, work: Callable[[], Any], rows: int) -> None:
    with figures.attempt(name):
        forget_peak()
        figures.say(name, median(plan.repeats, work), "ms", f"{rows:,} rows, forward and backward")
        figures.peak(name, peak_gib())


def _losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> dict[str, Callable[[int | None], None]]:
    """Return the losses by name; each takes the rows of a chunk, None: the default, and runs forward and backward."""
    ones = torch.ones(len(labels))

    def drafter(kind: Any) -> Callable[[int | None], None]:
        teacher = None if kind == "ce" else hidden.detach().flip(0)

        def work(chunk: int | None) -> None:
            hidden.grad = None
            student = Student(hidden, weight, labels, ones, kind, chunk=chunk)
            if teacher is None:
                student.learn_labels()
            else:
                student.learn_from(teacher)
            student.finish()[0].backward()

        return work

    def policy(chunk: int | None) -> None:
        hidden.grad = weight.grad = None
        logprobs, entropy = policy_logprobs(hidden, weight, labels, with_entropy=True, chunk=chunk)
        assert entropy is not None
        (logprobs + 0.01 * entropy).sum().backward()

    return {"drafter, ce": drafter("ce"), "drafter, forward_kl": drafter("forward_kl"), "policy with entropy": policy}


def _passes(plan: Plan, figures: Figures, head: VocabParallelHead, hidden: torch.Tensor) -> None:
    """Write the time of the passes over one chunk of logits."""
    scores = head.scores(hidden)
    lse = head.log_sum_exp(scores)
    product = median(plan.repeats, lambda: hidden @ head.weight.t())
    whole = median(plan.repeats, lambda: head.scores(hidden))
    found = {
        "product": product,
        "cast, scale, clamp, largest, subtract": whole - product,
        "logsumexp": median(plan.repeats, lambda: head.log_sum_exp(scores)),
        "argmax": median(plan.repeats, lambda: head.argmax(scores)),
        "subtract and exp": median(plan.repeats, lambda: (scores - lse[:, None]).exp_()),
        "cast and product of the gradient": median(plan.repeats, lambda: head.back(scores)),
    }
    for name, ms in found.items():
        figures.say(f"a chunk: {name}", ms, "ms", f"{len(hidden):,} rows of {plan.shape.vocab:,} words")

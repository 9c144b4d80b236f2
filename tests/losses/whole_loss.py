"""The drafter's loss in one call."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rlspec.losses.drafter import Metrics, Student


def drafter_loss(
    *arguments: Any, teacher_hidden: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, Metrics]:
    """Return Σ token_weight · loss and metrics. Arguments are those of `Student`; without a teacher, of labels.

    Metrics are scalars without `groups`.
    """
    student = Student(*arguments, **options)
    if teacher_hidden is None:
        student.learn_labels()
    else:
        student.learn_from(teacher_hidden)
    total, metrics = student.finish()
    if "groups" not in options:
        metrics = {name: value[0] for name, value in metrics.items()}
    return total, metrics

"""Compare the bits of policy and optimizer after three steps with and without a drafter, at the length of real samples.

The control is two runs without a drafter. Where these differ, kernels that add in any order are the reason, and not the
drafter: the backward of flash attention adds the gradients of queries so.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch

from gpu.figures import Figures, timed
from gpu.plan import Plan
from gpu.train import packed, shape_of
from megatron_rlspec.config import Config
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.train.step import Trainer

STEPS = 3
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, before `train.deterministic` is set


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    layers, count, length = plan.identity
    note = f"{layers} layers, {count} samples of {length:,} tokens, {STEPS} steps"
    for deterministic in (False, True):
        mode = ", train.deterministic" if deterministic else ""
        with figures.attempt(f"policies{mode}"):
            alone, again, beside = (_train(plan, drafter, deterministic) for drafter in (False, False, True))
            figures.say(f"a step without a drafter{mode}", alone[1], "ms", note)
            figures.say(f"twice without a drafter: tensors that differ{mode}", _differ(alone, again), "", note)
            figures.say(f"with and without: tensors that differ{mode}", _differ(alone, beside), "", note)


def _differ(first: tuple[list[int], float], second: tuple[list[int], float]) -> int:
    return sum(a != b for a, b in zip(first[0], second[0], strict=True))


def _train(plan: Plan, drafter: bool, deterministic: bool) -> tuple[list[int], float]:
    """Return fingerprints of the policy's parameters and of its optimizer's tensors, and ms of the last step."""
    gc.collect()  # the trainer before this one
    layers, count, length = plan.identity
    settings: dict[str, Any] = {
        "model": {"dtype": plan.dtype, "max_length": length},
        "drafter": {"depth": plan.train_depth, "train": drafter},
        "train": {"tokens_per_micro_batch": count * length, "deterministic": deterministic},
        "rollout": {"max_new_tokens": length // 2},
    }
    shape = shape_of(plan, layers)
    trainer = Trainer(Config.model_validate(settings), shape)
    taken = 0.0
    for step in range(STEPS):
        batches = packed(count, length, plan.train_depth, shape["vocab_size"], seed=step)
        taken = timed(lambda: trainer.train_step(batches, objective="grpo"))  # noqa: B023
    optimizer = trainer.learner.optimizer.optimizer
    tensors = list(trainer.policy.parameters())
    tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [x for state in optimizer.state.values() for _, x in sorted(state.items()) if torch.is_tensor(x)]
    found = [fingerprint(tensor.detach().contiguous()) for tensor in tensors]
    return found, taken

"""For SGLang versions whose NCCL weight push reaches the target only: receive once, load twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def load_twice(original: Callable, manager: Any, request: Any) -> Any:
    """Wrap the manager's update: give the drafter's model the tensors that the target's model loads.

    A tensor that the drafter cannot load makes the update fail.
    """
    drafter = drafter_model(manager.draft_worker)
    if drafter is None:
        return original(manager, request)
    target = manager.tp_worker.model_runner.model
    received: list[Any] = []
    load = target.load_weights
    own = vars(target).get("load_weights")

    def keep(weights: Any) -> Any:
        weights = list(weights)
        received.extend(weights)
        return load(weights)

    target.load_weights = keep
    try:
        result = original(manager, request)
    finally:
        del target.load_weights
        if own is not None:  # another hook had replaced it
            target.load_weights = own
    if result.success:
        drafter.load_weights(received)
    return result


def drafter_model(worker: Any) -> Any:
    """Return the model of a speculative worker of SGLang 0.5.15, or None if there is none."""
    for holder in (worker, getattr(worker, "_draft_worker", None)):
        for name in ("draft_model_runner", "draft_runner"):
            runner = getattr(holder, name, None)
            if runner is not None:
                return runner.model
    return None

"""For SGLang versions whose NCCL weight push reaches the target only: receive once, load twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_rlspec.rollout.sglang.scheduler.served_weights import models_of


def load_twice(original: Callable, manager: Any, request: Any) -> Any:
    """Wrap the manager's update: give the drafter's model the tensors that the target's model loads.

    A tensor that the drafter cannot load makes the update fail.
    """
    target, drafter = models_of(manager)
    if drafter is None:
        return original(manager, request)
    received: list[Any] = []
    load = target.load_weights

    def keep(weights: Any) -> Any:
        weights = list(weights)
        received.extend(weights)
        return load(weights)

    target.load_weights = keep
    try:
        result = original(manager, request)
    finally:
        target.load_weights = load
    if result.success:
        drafter.load_weights(received)
    return result

"""For SGLang versions whose NCCL weight push reaches the target only: receive once, load twice.

`plugin.py` registers it. Without the rest of the plugin it is registered where the environment variable
`RLSPEC_SGLANG_DRAFTER_PUSH` is set and SGLang has no weight-update session with a selector (from 0.5.23 on it has, and
loads the drafter itself).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron_rlspec.rollout.sglang import settings

VARIABLE = "RLSPEC_SGLANG_DRAFTER_PUSH"
TARGET = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register() -> None:
    if not os.environ.get(VARIABLE) or settings.VARIABLE in os.environ:
        return  # in the latter case the plugin registers it, with what else its version of SGLang needs
    from sglang.srt.managers import io_struct
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not hasattr(io_struct, "BeginWeightUpdateReqInput"):
        HookRegistry.register(f"{TARGET}.update_weights_from_distributed", load_twice, HookType.AROUND)


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

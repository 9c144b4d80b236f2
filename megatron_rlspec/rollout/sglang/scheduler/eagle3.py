"""An EAGLE-3 drafter beside its target, in one SGLang engine: which tensors of a push go to which of the two models.

SGLang hands all tensors of an update to both loaders, and each loader skips the names that it does not know. The class
of an EAGLE-3 drafter knows the target's `lm_head.weight`, `model.norm.weight` and layer 0, and would take them for its
own. So the names of the drafter's tensors begin with `PREFIX` in a push, and each loader sees its own model's tensors
only. That also protects the drafter from pushes without drafter tensors, and from SGLang's `update_weights_from_disk`.

`control.py` calls `separate_loaders` when the scheduler has started, and `describe` for its command of that name.

The map from the drafter's vocabulary to tokens is fixed when the engine starts: SGLang copies it out of the model, and
captured CUDA graphs read the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.models.config import PREFIX
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.sglang.scheduler.served_weights import load_through

Tensors = Iterable[tuple[str, Tensor]]


def draft_worker(scheduler: Any) -> Any:
    """Return SGLang's `EagleDraftWorker` if its drafter is one of EAGLE-3, else None."""
    worker = getattr(scheduler.draft_worker, "draft_worker", None)
    algorithm = getattr(worker, "speculative_algorithm", None)
    return worker if algorithm is not None and algorithm.is_eagle3() else None


def separate_loaders(target: Any, drafter: Any) -> None:
    """Let the target's loader see the tensors without `PREFIX`, and the drafter's loader the others, `PREFIX` removed.

    `push/` sends the drafter's tensors with that prefix (`models/config.py`). Call it once, and before
    `Deliveries.watch`: the last wrapper of a loader sees the tensors first, and that one must see the names of the
    push.
    """

    def targets(tensors: Tensors) -> Tensors:
        return ((name, tensor) for name, tensor in tensors if not name.startswith(PREFIX))

    def drafters(tensors: Tensors) -> Tensors:
        return (
            (name.removeprefix(PREFIX), tensor)
            for name, tensor in tensors
            if name.startswith(PREFIX)
        )

    load_through(target, targets)
    load_through(drafter, drafters)
    # SGLang makes this norm for every layer, but reads the first layer's only. Without the others, the model has the
    # same parameters as a push, so fingerprints of both can be compared.
    for layer in drafter.model.layers[1:]:
        layer.input_layernorm = None


def describe(scheduler: Any) -> dict[str, Any]:
    """Return what the engine's drafter and the trainer's must have in common; {} without an EAGLE-3 drafter.

    `check_served_drafter` in `rollout/start.py` compares the answer with the trainer's files. The answer has two keys:

    taps   indices of the target's layers whose inputs the drafter reads (auxiliary hidden states), ascending
    words  fingerprint of the token ids [S] int64 from which it drafts, in the order of its head's rows
    """
    worker = draft_worker(scheduler)
    if worker is None:
        return {}
    words = worker.hot_token_id
    if words is None:  # without a map, row i of the head is token i
        words = torch.arange(worker.target_worker.model_config.vocab_size)
    model = scheduler.tp_worker.model_runner.model
    return {
        "taps": sorted(set(model.model.layers_to_capture)),
        "words": fingerprint(words.cpu().to(torch.int64)),
    }

"""Let SGLang's CPU engine multiply by packed weights, where `sgl_kernel`, which packs them itself, is not installed.

`embedded/packed.py` keeps a packed copy of each matrix. All copies are dropped after everything that writes into
weights (`WRITERS`): SGLang's loaders write through `.data`, which torch does not count as a change, so a copy would
stay old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_rlspec.rollout.embedded.packed import PackedWeights

LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# Methods of UPDATER that write into weights. The tests compare them with the installed SGLang: a new one must be here.
WRITERS = (
    "check_weights",
    "end_weight_update",
    "resume_memory_occupation",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)

_packed_weights = PackedWeights()  # of this scheduler process


def hooks() -> Iterator[tuple[str, Callable, str]]:
    """Yield hooks for `plugin._register`: (name in SGLang, our function, kind).

    `scheduler/versions.py` asks for them only where `stand_ins` replaced `sgl_kernel`.
    """
    yield LINEAR, _apply, "REPLACE"
    yield HEAD, _head, "AROUND"
    for writer in WRITERS:
        yield f"{UPDATER}.{writer}", _forget, "AFTER"


def _apply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as `UnquantizedLinearMethod.apply`."""
    return _packed_weights.linear(x, layer.weight, bias)


def _head(
    original: Callable,
    processor: Any,
    hidden: Tensor,
    head: Any,
    bias: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Multiply by an output layer that is a plain matrix, of the hidden states' dtype; leave others to SGLang.

    Returns logits [N, V]. For such layers SGLang ignores the bias, too.
    """
    weight = getattr(head, "weight", None)
    unquantized = type(getattr(head, "quant_method", None)).__name__ in (
        "NoneType",
        "UnquantizedEmbeddingMethod",
    )
    if (
        unquantized
        and weight is not None
        and weight.dtype == hidden.dtype
        and not processor.use_fp32_lm_head
    ):
        return _packed_weights.linear(hidden, weight)
    return original(processor, hidden, head, bias, **more)


def _forget(returned: Any, *args: Any, **kwargs: Any) -> None:
    """Drop all packed copies after a method of `WRITERS`. Returns None, so that SGLang keeps the method's result."""
    _packed_weights.forget()

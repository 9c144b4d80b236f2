"""The weights that an SGLang engine serves, under the names of their Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch


def _mimo_drafter(name: str) -> str:
    if name.startswith("model.mtp_block."):
        return "model.mtp_layers.0." + name.removeprefix("model.mtp_block.")
    return re.sub(r"^model\.(\w+_layernorm|input_proj)\.", r"model.mtp_layers.0.\1.", name)


# SGLang's draft class -> its parameter names in the checkpoint.
_DRAFTERS = {"MiMoMTP": _mimo_drafter}


def named_tensors(target: torch.nn.Module, drafter: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, full tensor) of every parameter; those the drafter shares with the target appear once."""
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    yield from _unfused(target)
    if drafter is None:
        return
    rename = _DRAFTERS.get(type(drafter).__name__)
    if rename is None:
        raise NotImplementedError(f"checkpoint names of {type(drafter).__name__}; known are {', '.join(_DRAFTERS)}")
    for name, tensor in _unfused(drafter):
        if tensor.data_ptr() not in shared:
            yield rename(name), tensor


def _unfused(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}"
            parts = _parts(module, prefix)
            if parts is None:
                rows = getattr(module, "org_vocab_size", None)  # Vocabularies are padded for the kernels.
                yield name, parameter.data if rows is None else parameter.data[:rows]
                continue
            fused = prefix.rpartition(".")[2]
            pieces = parameter.data.split([size for _, size in parts])
            for (part, _), tensor in zip(parts, pieces, strict=True):
                yield name.replace(fused, part), tensor


def _parts(module: torch.nn.Module, prefix: str) -> list[tuple[str, int]] | None:
    """(checkpoint's module name, rows) of the pieces that SGLang stacks into one parameter, or None."""
    if prefix.endswith(".qkv_proj"):
        q, kv = module.q_proj_shard_size, module.kv_proj_shard_size
        return [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    if prefix.endswith(".gate_up_proj"):
        return list(zip(("gate_proj", "up_proj"), module.output_partition_sizes, strict=True))
    return None


def of_scheduler(scheduler: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """`named_tensors` of the live models of SGLang's `Scheduler`."""
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size > 1:
        raise NotImplementedError("reading the weights of an engine with tensor parallelism")
    worker = getattr(scheduler.draft_worker, "draft_worker", None)
    drafter = None if worker is None else worker.draft_runner.model
    return named_tensors(scheduler.tp_worker.model_runner.model, drafter)

"""The weights that an SGLang engine serves, under the names of their Hugging Face checkpoint.

Under tensor parallelism every rank holds parts. A fingerprint is a sum over a tensor's words, so each rank sums over
what it holds, at its place in the full tensor, and only sums travel between ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.weights.fingerprint import fingerprint

_WORD = 8  # bytes; a fingerprint's unit, which no two ranks may share


@dataclass(frozen=True)
class TensorPart:
    """What one rank holds of the tensor `name` of `shape`: rows (dim 0) or columns (dim 1) from `first` on."""

    name: str
    part: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    first: int = 0
    drafter: bool = False

    def fingerprint(self) -> int:
        """This part's share of the full tensor's fingerprint. Raises ValueError if a word crosses the part's edge."""
        if tuple(self.part.shape) == self.shape:
            return fingerprint(self.part)
        if self.dim == 0:
            return fingerprint(self.part, start=self.first * self.part[0].numel())
        width = self.part.shape[1] * self.part.element_size()
        if width % _WORD:
            raise ValueError(f"{self.name}: a part of {width} bytes a row; expected a multiple of {_WORD}")
        full = self.part.new_zeros(self.shape)
        full.narrow(self.dim, self.first, self.part.shape[self.dim]).copy_(self.part)
        return fingerprint(full)


def joined(marks: Sequence[Sequence[int]], firsts: Sequence[Sequence[int]]) -> list[int]:
    """Every rank's `[tensors]` fingerprints and first rows or columns -> those of the full tensors.

    Ranks that hold the same part must agree on it; otherwise both count, and the sum matches no tensor's fingerprint.
    """
    return [
        sum(mark for _, mark in set(zip(at, of_ranks, strict=True))) % (1 << 64)
        for at, of_ranks in zip(zip(*firsts, strict=True), zip(*marks, strict=True), strict=True)
    ]


def fingerprints(scheduler: Any) -> dict[str, int]:
    """Of every tensor of the engine; all tensor-parallel ranks of SGLang's `Scheduler` must call it."""
    held = list(of_scheduler(scheduler))
    mine = torch.tensor([[_signed(h.fingerprint()) for h in held], [h.first for h in held]])
    group = _parallel().tp_group.cpu_group
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    marks, firsts = zip(*(rank.tolist() for rank in found), strict=True)
    return dict(zip((h.name for h in held), joined(marks, firsts), strict=True))


def of_scheduler(scheduler: Any) -> Iterator[TensorPart]:
    """What this rank's live models hold."""
    parallel = _parallel()
    if parallel.pp_size > 1:
        raise NotImplementedError(
            "weights of an engine with pipeline parallelism cannot be read; serve with --tp alone"
        )
    return named_tensors(*models_of(scheduler), parallel.tp_rank)


def models_of(scheduler: Any) -> tuple[torch.nn.Module, torch.nn.Module | None]:
    """Target and drafter, or None without speculation."""
    runner = getattr(getattr(scheduler.draft_worker, "draft_worker", None), "draft_runner", None)
    return scheduler.tp_worker.model_runner.model, None if runner is None else runner.model


def record_deliveries(model: torch.nn.Module, marks: dict[str, int]) -> None:
    """From now on, note in `marks` the fingerprint of every tensor that the model's loader is given, by its name.

    This works for every architecture and for quantised weights, whose stored form cannot be compared.
    """
    load = model.load_weights

    def noted(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            marks[name] = fingerprint(tensor)
            yield name, tensor

    def load_weights(weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        return load(noted(weights), *args, **kwargs)

    model.load_weights = load_weights


def named_tensors(target: torch.nn.Module, drafter: torch.nn.Module | None, rank: int) -> Iterator[TensorPart]:
    """Every parameter under its checkpoint's name; those the drafter shares with the target appear once."""
    if drafter is not None and type(drafter).__name__ not in _DRAFTERS:
        raise NotImplementedError(f"checkpoint names of {type(drafter).__name__}; known are {', '.join(_DRAFTERS)}")
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    yield from _unfused(target, rank, lambda name: name)
    if drafter is None:
        return
    rename = _DRAFTERS[type(drafter).__name__]
    for held in _unfused(drafter, rank, rename):
        if held.part.data_ptr() not in shared:
            yield replace(held, drafter=True)


def _mimo_drafter(name: str) -> str:
    if name.startswith("model.mtp_block."):
        return "model.mtp_layers.0." + name.removeprefix("model.mtp_block.")
    return re.sub(r"^model\.(\w+_layernorm|input_proj)\.", r"model.mtp_layers.0.\1.", name)


# SGLang's draft class -> its parameter names in the checkpoint.
_DRAFTERS = {"MiMoMTP": _mimo_drafter}


def _unfused(model: torch.nn.Module, rank: int, rename: Any) -> Iterator[TensorPart]:
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            for part, tensor, rows, dim, first in _parts(prefix, module, leaf, parameter.data, rank):
                shape = list(tensor.shape)
                shape[dim] = rows
                yield TensorPart(rename(f"{part}.{leaf}"), tensor, tuple(shape), dim, first)


def _parts(prefix: str, module: Any, leaf: str, data: Tensor, rank: int) -> Iterator[tuple[str, Tensor, int, int, int]]:
    """(checkpoint's module name, tensor, full size along dim, dim, first) of what SGLang stacks into one parameter."""
    stem, _, last = prefix.rpartition(".")
    if last == "qkv_proj":
        head, replicas = module.head_size, module.num_kv_head_replicas
        q, kv = module.q_proj_shard_size, module.kv_proj_shard_size
        total_q, total_kv = module.total_num_heads * head, module.total_num_kv_heads * head
        shares = (("q_proj", q, total_q, rank), ("k_proj", kv, total_kv, rank // replicas))
        shares += (("v_proj", kv, total_kv, rank // replicas),)
        for (name, size, total, index), tensor in zip(shares, data.split([q, kv, kv]), strict=True):
            yield f"{stem}.{name}", tensor, total, 0, size * index
    elif last == "gate_up_proj":
        sizes = module.output_partition_sizes
        for name, total, tensor in zip(("gate_proj", "up_proj"), module.output_sizes, data.split(sizes), strict=True):
            yield f"{stem}.{name}", tensor, total, 0, len(tensor) * rank
    elif hasattr(module, "shard_indices"):  # Vocabularies are padded for the kernels.
        first, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        yield prefix, data[: end - first], module.org_vocab_size, 0, first
    elif leaf == "weight" and hasattr(module, "input_is_parallel"):
        yield prefix, data, module.input_size, 1, module.input_size_per_partition * rank
    else:
        yield prefix, data, len(data), 0, 0


def _signed(mark: int) -> int:
    return mark - (1 << 64) if mark >> 63 else mark


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()

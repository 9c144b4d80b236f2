"""Read the weights that an SGLang engine serves, under the names of their Hugging Face checkpoint.

SGLang stacks several of a checkpoint's tensors into one parameter, and each tensor-parallel rank holds a part of it.
`named_tensors` takes these parameters apart again, for the families whose record says `pushed` (`models/families.py`).
A fingerprint is a sum over a tensor's 8-byte words (`push/fingerprint.py`). So each rank sums over its part, at the
part's place in the full tensor, and only sums and places travel between ranks. `control.py` calls this file for its
commands, and `push/` compares the fingerprints with those of what was sent.

`UnnamedError` is raised for weights whose form is not known here: another family, quantised weights, a layout for
special kernels, ranks of which each holds weights of its own. Such an engine is checked by the tensors that its models'
loaders were given (`Deliveries`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rlspec.models.families import FAMILIES
from megatron_rlspec.push.fingerprint import from_raw_sums, of_parts, raw_sum
from megatron_rlspec.rollout.sglang.scheduler.parallel import parallel

_WORD = 8  # bytes, a fingerprint's unit, as in `push/fingerprint.py`; no word may lie on two ranks
_ELSEWHERE = -1  # `TensorPart.first` of a tensor that other ranks hold
# SGLang's class of a drafter -> pairs (prefix of its parameters, prefix in the checkpoint). The first that fits counts.
_DRAFTERS = {
    record.sglang_drafter: record.sglang_drafter_names
    for record in FAMILIES.values()
    if record.sglang_drafter
}


class UnnamedError(NotImplementedError):
    """The checkpoint's names of an engine's weights are not known. The message is one line."""


@dataclass(frozen=True)
class TensorPart:
    """What one rank holds of one tensor of the checkpoint.

    name     in the checkpoint
    part     this rank's share; empty if only other ranks hold the tensor, as with their experts
    shape    of the full tensor
    dim      the dimension that is split between ranks: 0 (rows) or 1 (columns)
    first    index of the part's first row or column in the full tensor; -1 (`_ELSEWHERE`) if other ranks hold it
    drafter  whether the tensor is the drafter's own
    """

    name: str
    part: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    first: int = 0
    drafter: bool = False

    def pushed_as(self, dtype: torch.dtype | None) -> TensorPart:
        """Return the part in the number type in which it was pushed, if that changes no value; otherwise as it is.

        SGLang stores some tensors in a wider type than the pushed one (routers in float32). A fingerprint depends on
        the bits, so both sides must have the same type. Waits for a GPU if the types differ.

        dtype  None: not known, so the part stays as it is
        """
        if dtype is None or dtype == self.part.dtype:
            return self
        narrow = self.part.to(dtype)
        exact = torch.equal(narrow.to(self.part.dtype), self.part)
        return replace(self, part=narrow) if exact else self

    def placed(self) -> tuple[Tensor, int]:
        """Return (tensor, index of its first element in the full tensor), from which `of_parts` makes the fingerprint.

        Raises ValueError if an 8-byte word crosses the edge between two parts of columns. For parts of rows `of_parts`
        raises it.
        """
        part = self.part
        if tuple(part.shape) == self.shape or not part.numel():
            return part, 0
        if self.dim == 0:
            return part, self.first * part[0].numel()
        width = part.shape[1] * part.element_size()
        if width % _WORD:
            raise ValueError(
                f"{self.name}: a part of {width} bytes a row; expected a multiple of {_WORD}"
            )
        # Some columns are not contiguous in the full tensor. So make a full tensor with zeros elsewhere: zeros add
        # nothing to the sum.
        full = part.new_zeros(self.shape)
        full.narrow(self.dim, self.first, part.shape[self.dim]).copy_(part)
        return full, 0


def marks_of(parts: Sequence[TensorPart], dtypes: Sequence[torch.dtype | None]) -> list[int]:
    """Return what each part adds to its tensor's fingerprint (its share), unsigned 64-bit.

    dtypes  the number type in which each tensor was pushed; None: not known
    """
    # A generator, so that copies in another type are made and freed one by one.
    return of_parts(
        part.pushed_as(dtype).placed() for part, dtype in zip(parts, dtypes, strict=True)
    )


def joined(marks: Sequence[Sequence[int]], firsts: Sequence[Sequence[int]]) -> list[int]:
    """Add up the shares of all ranks to the fingerprints of the full tensors, `[tensors]`.

    marks   `[ranks][tensors]`, by `marks_of`
    firsts  `[ranks][tensors]`, `TensorPart.first`

    A part that several ranks hold counts once if their shares are equal. If they differ, all of them count, so that the
    sum differs from the fingerprint that was pushed. All ranks must have the tensors in the same order. An empty part's
    share is 0.
    """
    totals = []
    for firsts_of_ranks, marks_of_ranks in zip(
        zip(*firsts, strict=True), zip(*marks, strict=True), strict=True
    ):
        # A set, in which a part that several ranks hold is once. Different parts with equal shares differ in `first`.
        parts = set(zip(firsts_of_ranks, marks_of_ranks, strict=True))
        totals.append(sum(mark for _, mark in parts) % (1 << 64))
    return totals


@dataclass
class Deliveries:
    """What a model's loader was last given of each tensor, by the checkpoint's names.

    dtypes  number type of each tensor
    marks   fingerprint of each tensor, unsigned 64-bit; {} unless `watch` is told to make them, which costs a pass over
            all weights
    """

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    # not finished, as `raw_sum` returns them, so that loading does not wait for a GPU
    _marks: dict[str, int | Tensor] = field(default_factory=dict)

    @property
    def marks(self) -> dict[str, int]:
        """Return the fingerprints. Waits once for a GPU."""
        return dict(zip(self._marks, from_raw_sums(list(self._marks.values())), strict=True))

    def watch(self, model: nn.Module, *, fingerprints: bool) -> None:
        """From now on, note every tensor that the loader of `model` is given. Call it once for each model.

        This works for every architecture, and for quantised weights, whose stored form cannot be compared with what was
        pushed.
        """

        def noted(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                self.dtypes[name] = tensor.dtype
                if fingerprints:
                    self._marks[name] = raw_sum(tensor)
                yield name, tensor

        load_through(model, noted)


def load_through(
    model: Any, transform: Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]]
) -> None:
    """From now on, let `model.load_weights` see what `transform` makes of the (name, tensor) pairs that it is given.

    Each call wraps the wrappers of the calls before: the `transform` of the last call sees the tensors first. Nothing
    takes a wrapper off again.
    """
    load = model.load_weights

    def load_weights(tensors: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        return load(transform(tensors), *args, **kwargs)

    model.load_weights = load_weights


def fingerprints(scheduler: Any, target: Deliveries, drafter: Deliveries) -> dict[str, int]:
    """Compute the fingerprint of every tensor of the engine, by name. All tensor-parallel ranks must call it.

    scheduler        SGLang's `Scheduler`
    target, drafter  the deliveries to the two models, of which only the number types (`dtypes`) are read

    Raises UnnamedError.
    """
    parts = list(parts_of_scheduler(scheduler))
    shares = marks_of(
        parts, [(drafter if part.drafter else target).dtypes.get(part.name) for part in parts]
    )
    # [2, tensors] int64: shares and first indices. All ranks have the tensors in the same order.
    mine = torch.tensor([[_signed(mark) for mark in shares], [part.first for part in parts]])
    group = parallel().tp_group.cpu_group
    by_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(by_rank, mine, group=group)
    marks, firsts = zip(*(rank.tolist() for rank in by_rank), strict=True)
    return dict(zip((part.name for part in parts), joined(marks, firsts), strict=True))


def parts_of_scheduler(scheduler: Any) -> Iterator[TensorPart]:
    """Yield what this rank's live models hold. Raises UnnamedError.

    The call itself raises it if ranks hold different layers, or different weights under the same names: their shares
    could not be added up. For an unknown family or layer it is raised while the result is iterated.
    """
    if parallel().pp_size > 1:
        raise UnnamedError(
            "weights of an engine with pipeline parallelism cannot be read; serve with --tp alone"
        )
    arguments = scheduler.server_args
    if arguments.enable_eplb or arguments.ep_num_redundant_experts:
        raise UnnamedError("experts that SGLang places by load (EPLB) cannot be told apart")
    ranks = getattr(arguments, "attn_dp_size", 1)  # of SGLang 0.5.23
    if arguments.enable_dp_attention:
        ranks = max(ranks, arguments.dp_size)
    if ranks > 1:
        raise UnnamedError("weights of ranks under attention data parallelism are not told apart")
    return named_tensors(*models_of(scheduler))


def models_of(scheduler: Any) -> tuple[Any, Any]:
    """Return (target's model, drafter's model) of a scheduler or of its weight updater; the second may be None.

    `control._deliveries` has the same order.
    """
    runner = getattr(getattr(scheduler.draft_worker, "draft_worker", None), "draft_runner", None)
    return scheduler.tp_worker.model_runner.model, None if runner is None else runner.model


def named_tensors(target: nn.Module, drafter: nn.Module | None) -> Iterator[TensorPart]:
    """Yield every parameter under its checkpoint's name. The order is the same on every rank. Raises UnnamedError.

    A parameter that both models share comes once, as the target's.
    """
    name = type(target).__name__
    if name not in FAMILIES or not FAMILIES[name].pushed:
        raise UnnamedError(f"SGLang's {name} stores weights in a form that is not known here")
    if drafter is not None and type(drafter).__name__ not in _DRAFTERS:
        raise UnnamedError(
            f"SGLang's {type(drafter).__name__} stores weights in a form that is not known here"
        )
    yield from _unstacked(target)
    if drafter is None:
        return
    config: Any = target.config
    layers = str(config.num_hidden_layers)
    # In some checkpoints the drafter's layer has the number behind the target's last layer.
    prefixes = [
        (ours, theirs.format(layers=layers)) for ours, theirs in _DRAFTERS[type(drafter).__name__]
    ]
    shared = {id(parameter) for parameter in target.parameters()}
    for part in _unstacked(drafter, shared):
        yield replace(part, name=_renamed(part.name, prefixes), drafter=True)


def _renamed(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """Return the checkpoint's name of a drafter's parameter, by the first prefix that fits."""
    for ours, theirs in prefixes:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise UnnamedError(f"the drafter's {name} has no known name in the checkpoint")


def _unstacked(model: nn.Module, without: Iterable[int] = ()) -> Iterator[TensorPart]:
    """Yield the parts of a model's parameters; `without`: the `id` of parameters to leave out."""
    modules = dict(model.named_modules())
    for prefix, module in modules.items():
        stem, _, last = prefix.rpartition(".")
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in without:
                continue
            # "NoneType": a module that SGLang never quantises has no method.
            method = type(getattr(module, "quant_method", None)).__name__
            if not method.startswith(("Unquantized", "NoneType")):
                raise UnnamedError(f"{prefix} is quantised ({method})")
            if hasattr(module, "moe_tp_rank"):
                yield from _experts(stem, module, leaf, parameter.data)
            elif last == "kv_b_proj":
                yield _columns(
                    f"{prefix}.{leaf}", module, _latent_kv_b(modules[stem], parameter.data)
                )
            elif last == "fused_qkv_a_proj_with_mqa":  # whole on every rank
                sizes = (modules[stem].q_lora_rank, len(parameter) - modules[stem].q_lora_rank)
                for name, part in zip(
                    ("q_a_proj", "kv_a_proj_with_mqa"), parameter.data.split(sizes), strict=True
                ):
                    yield TensorPart(f"{stem}.{name}.{leaf}", part, tuple(part.shape))
            else:
                yield from _of_layer(prefix, module, leaf, parameter.data)


def _of_layer(prefix: str, module: Any, leaf: str, data: Tensor) -> Iterator[TensorPart]:
    """Yield the parts of a parameter outside experts and latent attention.

    SGLang's layers are told apart by their names and attributes. The order of the cases matters: a later case would
    also fit the layers of some earlier ones.
    """
    stem, _, last = prefix.rpartition(".")
    rank = _rank(module)
    if last == "qkv_proj":
        head = module.head_size
        q = module.q_proj_shard_size
        kv = module.kv_proj_shard_size
        # With fewer key-value heads than ranks, several ranks hold the same head.
        kv_rank = rank // module.num_kv_head_replicas
        queries, keys, values = data.split([q, kv, kv])
        yield _rows(f"{stem}.q_proj.{leaf}", queries, module.total_num_heads * head, q * rank)
        yield _rows(f"{stem}.k_proj.{leaf}", keys, module.total_num_kv_heads * head, kv * kv_rank)
        yield _rows(f"{stem}.v_proj.{leaf}", values, module.total_num_kv_heads * head, kv * kv_rank)
    elif last == "gate_up_proj":
        gate, up = data.split(module.output_partition_sizes)
        yield _rows(f"{stem}.gate_proj.{leaf}", gate, module.output_sizes[0], len(gate) * rank)
        yield _rows(f"{stem}.up_proj.{leaf}", up, module.output_sizes[1], len(up) * rank)
    elif hasattr(module, "shard_indices"):  # embedding or output layer, padded for the kernels
        first = module.shard_indices.org_vocab_start_index
        end = module.shard_indices.org_vocab_end_index
        yield _rows(f"{prefix}.{leaf}", data[: end - first], module.org_vocab_size, first)
    elif hasattr(module, "input_is_parallel") and leaf == "weight":
        # split over its inputs, the columns
        shape = (len(data), module.input_size)
        yield TensorPart(f"{prefix}.{leaf}", data, shape, 1, module.input_size_per_partition * rank)
    elif hasattr(module, "output_size_per_partition"):
        if hasattr(module, "output_sizes"):
            raise UnnamedError(f"{prefix} stacks tensors whose names are not known here")
        yield _columns(f"{prefix}.{leaf}", module, data)
    else:
        yield TensorPart(f"{prefix}.{leaf}", data, tuple(data.shape))


def _experts(stem: str, module: Any, leaf: str, data: Tensor) -> Iterator[TensorPart]:
    """Yield each expert's tensors of a `FusedMoE`: w13 [experts, gate and up rows, H], w2 [experts, H, columns].

    Every rank yields all experts, so that all ranks have the same order of names. SGLang may store a shared expert
    behind the routed ones. In a push this expert has its own name all the same.
    """
    if module.use_triton_kernels or module.use_flashinfer_trtllm_moe:
        raise UnnamedError(
            f"{stem}.experts is laid out for another kernel than SGLang's Triton and CUTLASS ones"
        )
    if getattr(module.quant_method, "w13_swiglu_interleaved", False) or leaf not in (
        "w13_weight",
        "w2_weight",
    ):
        raise UnnamedError(f"{stem}.experts holds {leaf} in a form that is not known here")
    width = module.intermediate_size_per_partition
    first = width * module.moe_tp_rank
    total = width * module.moe_tp_size
    up_first = getattr(module.quant_method, "load_up_proj_weight_first", False)
    routed = module._num_global_routed
    for expert in range(routed + module.num_fused_shared_experts):
        slot = module._map_global_expert_id_to_local_expert_id(expert)
        name = f"{stem}.experts.{expert}" if expert < routed else f"{stem}.shared_experts"
        # `slot` -1: only another expert-parallel rank has the expert.
        part = data[slot] if slot >= 0 else data.new_empty(0, data.shape[2])
        start = first if slot >= 0 else _ELSEWHERE
        if leaf == "w2_weight":
            yield TensorPart(f"{name}.down_proj.weight", part, (data.shape[1], total), 1, start)
            continue
        upper, lower = part.chunk(2) if slot >= 0 else (part, part)
        gate, up = (lower, upper) if up_first else (upper, lower)
        yield TensorPart(f"{name}.gate_proj.weight", gate, (total, data.shape[2]), 0, start)
        yield TensorPart(f"{name}.up_proj.weight", up, (total, data.shape[2]), 0, start)


def _latent_kv_b(attention: Any, weight: Tensor) -> Tensor:
    """Return the weight of latent attention's `kv_b_proj`, made from the copies that the decode kernels read, if any.

    SGLang makes these copies after loading: `w_kc` [heads, key rows, rank] and `w_vc` [heads, rank, value rows]. If a
    push did not renew them, the fingerprint of this weight shows it; that of the parameter would not.
    """
    if attention.w_kc is None or attention.w_vc is None:
        return weight
    return torch.cat((attention.w_kc, attention.w_vc.transpose(1, 2)), dim=1).flatten(0, 1)


def _columns(name: str, module: Any, data: Tensor) -> TensorPart:
    """Return the part of a layer that is split over its outputs, as `ColumnParallelLinear`: rows of its weight."""
    return _rows(name, data, module.output_size, len(data) * _rank(module))


def _rows(name: str, data: Tensor, total: int, first: int) -> TensorPart:
    """Return the rows from `first` on of a tensor with `total` rows."""
    return TensorPart(name, data, (total, *data.shape[1:]), 0, first)


def _rank(module: Any) -> int:
    """Return this rank's index among the ranks that share the layer, which may be fewer than all of the engine."""
    group = getattr(module, "tp_group", None)  # of SGLang 0.5.23; layers of 0.5.15 have the number
    return getattr(module, "tp_rank", 0) if group is None else group.rank_in_group


def _signed(mark: int) -> int:
    """Return the signed integer with the same 64 bits: torch's int64 cannot hold the unsigned one."""
    return mark - (1 << 64) if mark >> 63 else mark

"""Let megatron-core run on a machine without CUDA: `install()` replaces functions that ask for CUDA by name.

megatron-core 0.16.1 does so in a few dozen places. Importing this module patches nothing, and on a machine with a GPU
`install()` does nothing. Then the same calls build Transformer Engine layers over NCCL.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Let megatron-core 0.16.1 run on CPU and gloo. Idempotent; does nothing if there is a CUDA device."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    torch.cuda.current_device = lambda: _CPU  # `device=torch.cuda.current_device()`, everywhere
    torch.cuda.synchronize = torch.cpu.synchronize  # point-to-point communication of pipelines
    torch.cuda.Stream = _NoStream  # a class, because annotations of other libraries name it
    torch.cuda.current_stream = _NoStream  # experts' token counts, copied aside
    torch.cuda.stream = torch.cpu.stream
    # 0.16.1 does not define it without Transformer Engine
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Sizes of expert-parallel exchanges become numbers when they leave the GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers
    # gloo gathers and scatters shares of one size only; tensor-parallel ranks have different shares of experts' tokens.
    mappings._gather_along_first_dim = _also_uneven(
        mappings._gather_along_first_dim, _gather_uneven
    )
    mappings._reduce_scatter_along_first_dim = _also_uneven(
        mappings._reduce_scatter_along_first_dim, _scatter_uneven
    )
    # torch.compile would need a C++ compiler and half a minute on a CPU.
    TopKRouter._apply_expert_bias = inspect.unwrap(TopKRouter._apply_expert_bias)
    # Main calls isinstance() with Transformer Engine's classes, which do not exist without it.
    multi_token_prediction.is_inference_column_parallel_linear = lambda _: False
    # Initialisation and recomputation use the CUDA generator's state; on a CPU there is one generator.
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    # Forking the CUDA generator warns that the CPU's changed; here they are the same one.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda r: "CPU RNG state changed" not in r.getMessage()
    )
    _let_cuda_mean_cpu()


def _as_numbers(x: Any, as_numpy: bool = False, **_: Any) -> Any:
    return x.numpy() if as_numpy and isinstance(x, torch.Tensor) else x


def _also_uneven(
    even: Callable[..., Tensor], uneven: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a function that calls `uneven` if the ranks' sizes of dimension 0 are given, else Megatron's `even`."""

    def either(
        x: Tensor, group: dist.ProcessGroup, shares: Any = None, *rest: Any, **named: Any
    ) -> Tensor:
        if shares is None or group.size() == 1:
            return even(x, group, shares, *rest, **named)
        return uneven(x, group, [int(share) for share in shares])

    return either


def _gather_uneven(x: Tensor, group: dist.ProcessGroup, shares: list[int]) -> Tensor:
    padded = x.new_zeros(max(shares), *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in shares]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:share] for part, share in zip(parts, shares, strict=True)])


def _scatter_uneven(x: Tensor, group: dist.ProcessGroup, shares: list[int]) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total.split(shares)[group.rank()]


class _NoStream:
    """A CUDA stream on a CPU: calls have finished when they return, and all streams are equal."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = None

    def record_event(self) -> _NoStream:
        return self

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


def _let_cuda_mean_cpu() -> None:
    """Make torch's functions take `device="cuda"`, `.cuda()` and `pin_memory=True` as the CPU's memory.

    `Tensor.type()` names a CUDA float type, which Megatron's optimizers assert. A torch function mode could do the
    same. It would take a quarter of a small training step, because every call of torch would pass through it.
    """
    # `with torch.device(...)` compares with the functions that it finds at its first use
    _device_constructors()
    for name in _CONSTRUCTORS:
        setattr(torch, name, _without_cuda(getattr(torch, name)))
    to: Any = torch.Tensor.to
    kind: Any = torch.Tensor.type

    @functools.wraps(to)
    def moved(x: Tensor, *args: Any, **named: Any) -> Tensor:
        if _is_cuda(named.get("device")):
            named["device"] = torch.cuda.current_device()
        places = [torch.cuda.current_device() if _is_cuda(arg) else arg for arg in args]
        return to(x, *places, **named)

    @functools.wraps(kind)
    def cuda_type(x: Tensor, *args: Any, **named: Any) -> Any:
        name = kind(x, *args, **named)
        if args or named or name.startswith("torch.cuda."):
            return name
        return name.replace("torch.", "torch.cuda.", 1).replace("DoubleTensor", "FloatTensor")

    # A dry run stays on meta.
    torch.Tensor.cuda = lambda x, *_, **__: x if x.is_meta else x.to(torch.cuda.current_device())
    torch.Tensor.to = moved
    torch.Tensor.type = cuda_type


_CONSTRUCTORS = (
    "arange", "as_tensor", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip


def _without_cuda(construct: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(construct)
    def constructed(*args: Any, **named: Any) -> Tensor:
        if _is_cuda(named.get("device")):
            named["device"] = torch.cuda.current_device()
        if named.get("pin_memory"):
            named["pin_memory"] = False
        return construct(*args, **named)

    return constructed


def _is_cuda(x: Any) -> bool:
    if isinstance(x, str):
        return x.startswith("cuda")
    return isinstance(x, torch.device) and x.type == "cuda"

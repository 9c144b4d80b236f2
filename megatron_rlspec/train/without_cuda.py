"""Let megatron-core run on a machine without CUDA: `install()` replaces functions that ask for CUDA by name.

megatron-core 0.16.1 asks for CUDA in many places. `runtime.init_distributed` calls `install()` in every trainer
process. The replacements are in torch and in Megatron, for the whole process, and there is no way back. Code that
imported one of these functions by name before `install()` keeps the original. Importing this module patches nothing. On
a machine with a GPU `install()` does nothing, and the same calls use CUDA and NCCL.
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
    """Let megatron-core 0.16.1 run on CPU and gloo. Idempotent; does nothing if there is a CUDA device.

    Call it before Megatron's groups and models are built (`runtime.init_distributed`).
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    torch.cuda.current_device = lambda: _CPU  # `device=torch.cuda.current_device()`, everywhere
    torch.cuda.synchronize = torch.cpu.synchronize  # point-to-point communication of pipelines
    torch.cuda.Stream = _NoStream  # a class, because annotations of other libraries name it
    torch.cuda.current_stream = _NoStream  # experts' token counts, copied aside
    torch.cuda.stream = torch.cpu.stream
    # megatron-core 0.16.1 reads this name, but does not define it without Transformer Engine.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Megatron's function copies the sizes of an exchange from the GPU to the host, and returns numpy arrays. It returns
    # a tensor on the CPU as it is, but the callers need an array.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_numpy
    # gloo gathers and scatters only shares of equal size. Tensor-parallel ranks have unequal shares of experts' tokens.
    mappings._gather_along_first_dim = _also_uneven(
        mappings._gather_along_first_dim, _gather_uneven
    )
    mappings._reduce_scatter_along_first_dim = _also_uneven(
        mappings._reduce_scatter_along_first_dim, _scatter_uneven
    )
    # torch.compile would need a C++ compiler and half a minute on a CPU.
    TopKRouter._apply_expert_bias = inspect.unwrap(TopKRouter._apply_expert_bias)
    # Megatron's main branch calls isinstance() with Transformer Engine's classes, which do not exist without it.
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


def _to_numpy(x: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Replace `maybe_move_tensor_to_cpu`: the tensor is on the CPU already."""
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
    """Join the ranks' `x [shares[rank], ...]` along dimension 0, padded to one size on the way."""
    padded = x.new_zeros(max(shares), *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in shares]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:share] for part, share in zip(parts, shares, strict=True)])


def _scatter_uneven(x: Tensor, group: dist.ProcessGroup, shares: list[int]) -> Tensor:
    """Sum the ranks' `x [sum(shares), ...]`, and return this rank's `shares[rank]` rows of the sum."""
    total = x.clone()  # all_reduce writes in place
    dist.all_reduce(total, group=group)
    return total.split(shares)[group.rank()]


class _NoStream:
    """A CUDA stream on a CPU: calls have finished when they return, and all streams are equal."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = None  # as Python does for a class with `__eq__`

    def record_event(self) -> _NoStream:
        return self

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


def _let_cuda_mean_cpu() -> None:
    """Make torch's functions take `device="cuda"`, `.cuda()` and `pin_memory=True` as the CPU's memory.

    `Tensor.type()` then names a CUDA float type, which Megatron's optimizers assert. A torch function mode could do the
    same, but every call of torch would pass through it, which would take a quarter of a small training step.
    """
    # `with torch.device(...)` acts on the functions in the set that this call makes and caches. The set must hold
    # torch's own functions, which the replacements call. So it is made before the functions are replaced.
    _device_constructors()
    for name in _CONSTRUCTORS:
        setattr(torch, name, _without_cuda(getattr(torch, name)))
    torch_to: Any = torch.Tensor.to
    torch_type: Any = torch.Tensor.type

    @functools.wraps(torch_to)
    def moved(x: Tensor, *args: Any, **named: Any) -> Tensor:
        if _is_cuda(named.get("device")):
            named["device"] = torch.cuda.current_device()
        places = [torch.cuda.current_device() if _is_cuda(arg) else arg for arg in args]
        return torch_to(x, *places, **named)

    @functools.wraps(torch_type)
    def cuda_type(x: Tensor, *args: Any, **named: Any) -> Any:
        name = torch_type(x, *args, **named)
        if args or named or name.startswith("torch.cuda."):
            return name
        # Megatron's clipping of gradients asserts FloatTensor; a float64 model must pass it, too.
        return name.replace("torch.", "torch.cuda.", 1).replace("DoubleTensor", "FloatTensor")

    # Meta tensors stay: a dry run has no values to move.
    torch.Tensor.cuda = lambda x, *_, **__: x if x.is_meta else x.to(torch.cuda.current_device())
    torch.Tensor.to = moved
    torch.Tensor.type = cuda_type


# torch's functions that take `device`, as far as Megatron calls them. `_let_cuda_mean_cpu` replaces them.
_CONSTRUCTORS = (
    "arange", "as_tensor", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip


def _without_cuda(construct: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that calls `construct` with the CPU in the place of CUDA."""

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

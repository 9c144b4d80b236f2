"""Differences between CPU and GPU and between versions of megatron-core: start-up, layer specs, CPU substitutes.

megatron-core 0.16.1 asks for CUDA by name in a few dozen places. On a machine without CUDA, `install()` replaces those
functions. Importing this module patches nothing. On a machine with a GPU, `install()` does nothing, and the same calls
build Transformer Engine layers over NCCL.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.utils._device import _device_constructors

from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.host import loopback, ranks
from megatron_rlspec.host.ports import JOBS, free_port
from megatron_rlspec.train.attention import PackedAttention
from megatron_rlspec.train.latent import LatentAttention
from megatron_rlspec.train.layers import DoubleInput, NormBesideEmbedding, RMSNorm, SwiGLU

_CPU = torch.device("cpu")
LEAVING_SECONDS = 10.0  # for `leave`
_installed = False


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def be_deterministic() -> None:
    """Let kernels add in one order, and raise RuntimeError where torch has no such kernel.

    Call it before the first product on a GPU: cuBLAS reads its variable then, and Transformer Engine's attention when
    it is built. With `warn_only` torch's flash attention would stay as it is.
    """
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by its metaclass


def placement() -> dict[str, Any]:
    """Return this rank's data- and context-parallel position, as arguments of `packing.pack.pack`."""
    return {
        "dp_size": parallel_state.get_data_parallel_world_size(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "cp_size": parallel_state.get_context_parallel_world_size(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
    }


def launch_env() -> None:
    """Set torchrun's variables, for a job of one rank, in a process that torchrun did not start."""
    if "RANK" in os.environ:
        return
    port = free_port(JOBS)
    alone = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in alone.items()})


def init_distributed(parallel: ParallelConfig, seed: int = 1) -> None:
    """Join the job, make Megatron's groups if there are none yet, and seed its random streams."""
    install()
    if not parallel_state.model_parallel_is_initialized():
        _create_groups(parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _create_groups(parallel: ParallelConfig) -> None:
    launch_env()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        loopback.bind_stores()
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo", timeout=ranks.PATIENCE
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
    )


def shut_down() -> None:
    """Leave the job: Megatron's groups, then torch's."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def leave() -> None:
    """Destroy the process groups at the end of a command, also after an error. Otherwise NCCL prints a warning.

    After an error the other ranks may not come. So this waits LEAVING_SECONDS at most.
    """

    def act() -> None:
        with contextlib.suppress(Exception):
            # a rank that leaves ends what others still receive from it
            if torch.cuda.is_initialized():
                torch.cuda.synchronize(int(os.environ.get("LOCAL_RANK", "0")))
        with contextlib.suppress(Exception):
            shut_down()

    leaving = threading.Thread(target=act, daemon=True)
    leaving.start()
    leaving.join(LEAVING_SECONDS)


def first_message(message: str) -> str:
    """Return the first rank's message that is not empty; "" if all are. Collective."""
    texts = ranks.job().share(message.encode())
    return next((text for text in texts if text), b"").decode()


def has_transformer_engine() -> bool:
    from megatron.core.models.gpt import gpt_layer_specs

    return torch.cuda.is_available() and gpt_layer_specs.HAVE_TE


def device_options() -> dict[str, Any]:
    """Return the `TransformerConfig` fields that depend on the machine."""
    gpu = torch.cuda.is_available()
    return {
        "use_cpu_initialization": not gpu,
        "bias_activation_fusion": has_transformer_engine(),
        # Named after Transformer Engine, but it means: the activation is given in the layer spec.
        "use_te_activation_func": not has_transformer_engine(),
        "bias_dropout_fusion": gpu,
        "masked_softmax_fusion": False,
        # Megatron's own output layer refuses the option without Apex's kernel, though only other layers would use it.
        "gradient_accumulation_fusion": has_transformer_engine()
        and layers._grad_accum_fusion_available,
        "apply_rope_fusion": has_transformer_engine(),
        "batch_p2p_sync": gpu,
    }


def decoder_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return specs of the policy's layers and final norm on this pipeline stage."""
    first = get_transformer_layer_offset(config)
    count = get_num_layers_to_build(config)
    with_experts = [0] * config.num_layers
    if config.num_moe_experts:
        with_experts = config.moe_layer_freq
    specs = {}
    for experts in set(with_experts):
        specs[experts], norm = _layer_spec(config, experts=bool(experts))
        if not has_transformer_engine():
            specs[experts].submodules.self_attention.submodules.core_attention = PackedAttention
    layers = [specs[experts] for experts in with_experts[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def drafter_spec(config: TransformerConfig) -> MultiTokenPredictionBlockSubmodules:
    """Return specs of the drafter's MTP layers, with experts if the model has any, like its last layer.

    Their core attention is ours on every device: no other one is chain-exact.
    """
    layer, norm = _layer_spec(config, experts=bool(config.num_moe_experts))
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    mtp = get_mtp_layer_spec(layer, use_transformer_engine=has_transformer_engine())
    mtp.submodules.enorm = mtp.submodules.hnorm = mtp.submodules.layer_norm = norm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[mtp] * config.mtp_num_layers)


def _layer_spec(config: TransformerConfig, *, experts: bool) -> tuple[ModuleSpec, type]:
    """Return the spec of one transformer layer, with experts or a plain MLP, and the class of its norm."""
    shared: dict[str, Any] = {
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "num_experts": config.num_moe_experts if experts else None,
    }
    norm: type = RMSNorm
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        layer = copy.deepcopy(
            get_gpt_layer_with_transformer_engine_spec(**shared, moe_grouped_gemm=experts)
        )
    else:
        layer = _local_layer_spec(config, shared)
    if config.multi_latent_attention:
        layer.submodules.self_attention.module = LatentAttention
    return layer, norm


def eagle3_spec(config: TransformerConfig, *, first: bool) -> ModuleSpec:
    """Return the spec of an EAGLE-3 drafter's layer. The first one's attention reads embedding and state side by side.

    It is the local one on every device: Transformer Engine's joined norm and projection read one vector.
    """
    layer = _local_layer_spec(config, {"qk_layernorm": False, "num_experts": None})
    if first:
        layer.submodules.input_layernorm = NormBesideEmbedding
        layer.submodules.self_attention.submodules.linear_qkv = DoubleInput
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer


def _local_layer_spec(config: TransformerConfig, shared: Mapping[str, Any]) -> ModuleSpec:
    experts = shared["num_experts"] is not None
    layer = copy.deepcopy(
        get_gpt_layer_local_spec(**shared, moe_grouped_gemm=False, normalization="RMSNorm")
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    mlp = _submodules(layer.submodules.mlp)
    if experts:
        _submodules(mlp.experts).activation_func = SwiGLU
        _submodules(mlp.shared_experts).activation_func = SwiGLU
    else:
        mlp.activation_func = SwiGLU
    if shared["qk_layernorm"]:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = RMSNorm
        if shared.get("multi_latent_attention"):
            attention.kv_layernorm = RMSNorm
        else:
            attention.k_layernorm = RMSNorm
    return layer


def _submodules(spec: ModuleSpec | functools.partial) -> Any:
    """Return the submodules of a layer spec; some specs of main (0.20) are partial calls."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


@contextlib.contextmanager
def own_random_stream(seed: int) -> Iterator[None]:
    """Seed every generator inside the `with` block, and restore all of them after it."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = dict(tracker.get_states())
    seeds = set(tracker.seeds_)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        tracker.reset()
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            tracker.set_states(states)
            tracker.seeds_ = seeds


def install() -> None:
    """Let megatron-core 0.16.1 run on CPU and gloo. Idempotent; does nothing if there is a CUDA device."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    torch.cuda.current_device = lambda: _CPU  # `device=torch.cuda.current_device()`, everywhere
    torch.cuda.synchronize = lambda *_, **__: None  # point-to-point communication of pipelines
    torch.cuda.Stream = _NoStream
    torch.cuda.current_stream = _NoStream  # experts' token counts, copied aside
    torch.cuda.stream = lambda _: contextlib.nullcontext()
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

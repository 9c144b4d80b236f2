"""Which GPUs of a node have trainer ranks and engines, and what share of its memory an engine gets.

Everything here is arithmetic. A layout that does not fit raises ConfigError, with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_rlspec.config import ConfigError
from megatron_rlspec.memory_estimate import (
    EngineMemory,
    RankMemory,
    check_rank,
    engine_share,
    step_room,
)

Mode = Literal["none", "disaggregated", "colocated"]


@dataclass(frozen=True)
class GpuLayout:
    """Names of GPUs, as in CUDA_VISIBLE_DEVICES.

    train         of the trainer ranks, by local rank
    engines       of each engine, by its tensor-parallel rank; empty where nothing is placed
    colocated     whether engines share the ranks' GPUs, so that they release memory while training
    mem_fraction  share of the memory that an engine finds free, for its weights and KV cache
    tokens        that the KV cache of an engine on the ranks' GPUs holds; 0: all that fit
    kv_tokens     that the KV cache of any engine holds, by the estimate
    """

    mode: Mode = "none"
    train: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()
    mem_fraction: float = 0.0
    tokens: int = 0
    kv_tokens: int = 0

    @property
    def colocated(self) -> bool:
        return self.mode == "colocated"

    def environment(self, engine: int) -> dict[str, str]:
        """Return the variables of the process of the engine with this index."""
        if not self.engines:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.engines[engine])}


def count_parameters(tensors: Any) -> tuple[int, int]:
    """Return the number of all parameters, and of those of routed experts; `tensors` as `read_model` returns them."""
    sizes = {name: math.prod(header.shape) for name, header in tensors.headers.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()), experts


def devices(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or `count` by number."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given else [str(i) for i in range(count)]
    return tuple(names[:count])


def place(
    gpus: Sequence[str],
    ranks: int,
    engines: int,
    tensor: int,
    mode: Literal["auto", "disaggregated", "colocated"],
) -> GpuLayout:
    """Give every GPU to trainer ranks, to an engine, or to both. Raises ConfigError if that does not come out even."""
    if not gpus:
        return GpuLayout()
    if mode == "auto":
        mode = "disaggregated" if ranks < len(gpus) else "colocated"
    wanted = engines * tensor
    sizes = f"rollout.engines={engines} x placement.tensor={tensor}"
    if ranks > len(gpus):
        raise ConfigError(
            f"{ranks} trainer ranks on a node of {len(gpus)} GPUs, one for each rank; expected fewer --ranks"
        )
    if mode == "disaggregated":
        left = len(gpus) - ranks
        if wanted != left:
            raise ConfigError(
                f"placement.mode=disaggregated: {len(gpus)} GPUs less {ranks} trainer ranks leave {left}, "
                f"but {sizes} needs {wanted}; expected the same number (CUDA_VISIBLE_DEVICES leaves GPUs out)"
            )
        free = iter(gpus[ranks:])
    else:
        if not ranks == wanted == len(gpus):
            raise ConfigError(
                f"placement.mode=colocated: expected as many trainer ranks and GPUs of engines as there are GPUs, "
                f"{len(gpus)} (CUDA_VISIBLE_DEVICES leaves GPUs out); there are {ranks} ranks, "
                f"and {sizes} needs {wanted}"
            )
        free = iter(gpus)
    of_engines = tuple(tuple(next(free) for _ in range(tensor)) for _ in range(engines))
    return GpuLayout(mode, tuple(gpus[:ranks]), of_engines)


def check_heads(hf_config: Mapping[str, Any], tensor: int) -> None:
    """Raise ConfigError unless `tensor` GPUs can share the model's attention heads as SGLang shares them."""
    heads = int(hf_config.get("num_attention_heads", tensor))
    kv_heads = int(hf_config.get("num_key_value_heads") or heads)
    if heads % tensor:
        raise ConfigError(
            f"placement.tensor={tensor} does not divide the model's {heads} attention heads"
        )
    if kv_heads % tensor and tensor % kv_heads:
        raise ConfigError(
            f"placement.tensor={tensor} neither divides nor is a multiple of the model's {kv_heads} key and value heads"
        )


def with_memory(
    layout: GpuLayout, gpu: int, trainer: RankMemory, engine: EngineMemory
) -> GpuLayout:
    """Fill in the memory of the engines. Raises ConfigError if GPUs of `gpu` bytes do not hold a rank or an engine.

    Colocated, the trainer keeps weights and optimizer while engines generate, and sleeping engines keep a part.
    """
    room = step_room(gpu, engine if layout.colocated else None)
    check_rank(trainer, room, "a trainer rank, by estimate,")
    share = engine_share(engine, gpu, trainer.between_steps if layout.colocated else None)
    tokens = share.kv_tokens if layout.colocated else 0
    return replace(
        layout, mem_fraction=share.mem_fraction, tokens=tokens, kv_tokens=share.kv_tokens
    )


def check_colocated(staleness: int, overlap: bool) -> None:
    """Raise ConfigError for options that need engines while training, or two processes of NCCL on one GPU."""
    if staleness:
        raise ConfigError(
            "rollout.staleness=1 draws samples while training, but engines on the ranks' GPUs sleep then"
        )
    if overlap:
        raise ConfigError(
            "drafter.overlap=true trains while engines generate, but engines on the ranks' GPUs need the memory"
        )

"""Which GPUs of a node have trainer ranks and engines, and what share of its memory an engine gets.

Disaggregated: the first GPUs have ranks, the others engines. Colocated: every GPU has a rank, and an engine or a part
of one. Everything here is arithmetic on one node. A layout that does not fit raises ConfigError, with the numbers.
`run/loading.py` calls it for a run, and `rollout/start.py` turns a layout into the engines' options.
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
    """Which GPUs of this node have what. GPUs are named as in CUDA_VISIBLE_DEVICES: by number or UUID.

    mode          "none": nothing is placed, as on a machine without GPUs
    train         GPUs of the trainer ranks, by local rank; empty where nothing is trained (`commands/answer.py`)
    engines       GPUs of each engine, by its tensor-parallel rank; empty if nothing is placed
    colocated     whether engines share the ranks' GPUs, so that they release memory while training
    mem_fraction  share of the memory that an engine finds free, for its weights and KV cache; 0: not set

    max_total_tokens     most tokens in the KV cache of a colocated engine; 0: as many as fit
    estimated_kv_tokens  tokens in the KV cache of any engine: only told to the user (`run/loading.py`)
    """

    mode: Mode = "none"
    train: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()
    mem_fraction: float = 0.0
    max_total_tokens: int = 0
    estimated_kv_tokens: int = 0

    @property
    def colocated(self) -> bool:
        return self.mode == "colocated"

    def environment(self, engine: int) -> dict[str, str]:
        """Return the environment variables to add for the process of the engine with this index in `engines`.

        If nothing is placed, there are none, and any index is allowed.
        """
        if not self.engines:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.engines[engine])}


def count_parameters(tensors: Any) -> tuple[int, int]:
    """Return the number of all parameters, and of those of routed experts.

    tensors  the second result of `conversion.drafter_files.read_model`; only its `headers` are read
    """
    sizes = {name: math.prod(header.shape) for name, header in tensors.headers.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()), experts


def devices(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Return the names of the GPUs that this process sees: from CUDA_VISIBLE_DEVICES, or else their numbers from 0.

    count  how many GPUs torch finds. Names behind that are dropped: CUDA_VISIBLE_DEVICES may list GPUs that are not
           there. 0: ()
    """
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
    """Give every GPU to a trainer rank, to an engine, or to both. Raises ConfigError if the numbers do not fit.

    gpus     of this node, as `devices` names them; empty: nothing is placed
    ranks    trainer ranks on this node
    engines  number of engines, each on `tensor` GPUs
    mode     "auto": colocated if every GPU has a rank, else disaggregated

    The layout's fields about memory are still 0: `with_memory` fills them in.
    """
    if not gpus:
        return GpuLayout()
    if mode == "auto":
        mode = "disaggregated" if ranks < len(gpus) else "colocated"
    gpus_needed = engines * tensor
    sizes = f"rollout.engines={engines} x placement.tensor={tensor}"
    if ranks > len(gpus):
        raise ConfigError(
            f"{ranks} trainer ranks on a node of {len(gpus)} GPUs, one for each rank; expected fewer --ranks"
        )
    if mode == "disaggregated":
        gpus_left = len(gpus) - ranks
        if gpus_needed != gpus_left:
            raise ConfigError(
                f"placement.mode=disaggregated: {len(gpus)} GPUs less {ranks} trainer ranks leave {gpus_left}, "
                f"but {sizes} needs {gpus_needed}; expected the same number (CUDA_VISIBLE_DEVICES leaves GPUs out)"
            )
        engine_gpus = iter(gpus[ranks:])
    else:
        if not ranks == gpus_needed == len(gpus):
            raise ConfigError(
                f"placement.mode=colocated: expected as many trainer ranks and GPUs of engines as there are GPUs, "
                f"{len(gpus)} (CUDA_VISIBLE_DEVICES leaves GPUs out); there are {ranks} ranks, "
                f"and {sizes} needs {gpus_needed}"
            )
        engine_gpus = iter(gpus)
    # each engine takes the next `tensor` GPUs
    gpus_of_engines = tuple(tuple(next(engine_gpus) for _ in range(tensor)) for _ in range(engines))
    return GpuLayout(mode, tuple(gpus[:ranks]), gpus_of_engines)


def check_heads(hf_config: Mapping[str, Any], tensor: int) -> None:
    """Raise ConfigError unless `tensor` GPUs can share the model's attention heads as SGLang shares them.

    SGLang gives all GPUs the same number of query heads. With more GPUs than key and value heads it copies these.
    """
    # a config.json without heads passes: there is nothing to compare
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
    """Return the layout with the memory of the engines. Raises ConfigError if a GPU does not hold a rank or an engine.

    gpu      bytes of one GPU's memory
    trainer  what one trainer rank needs, by estimate
    engine   what one engine needs, by estimate

    Colocated, each side must leave room for what the other keeps: a rank keeps weights, and the optimizer unless it is
    offloaded, while engines generate; a sleeping engine keeps CUDA graphs and buffers of its attention.
    """
    room = step_room(gpu, engine if layout.colocated else None)
    check_rank(trainer, room, "a trainer rank, by estimate,")
    share = engine_share(engine, gpu, trainer.between_steps if layout.colocated else None)
    # An engine with GPUs of its own takes all that its share holds. On shared GPUs the estimate is the limit.
    tokens = share.kv_tokens if layout.colocated else 0
    return replace(
        layout,
        mem_fraction=share.mem_fraction,
        max_total_tokens=tokens,
        estimated_kv_tokens=share.kv_tokens,
    )


def check_colocated(staleness: int, overlap: bool) -> None:
    """Raise ConfigError for options under which ranks and engines would work at the same time on shared GPUs."""
    if staleness:
        raise ConfigError(
            "rollout.staleness=1 draws samples while training, but engines on the ranks' GPUs sleep then"
        )
    if overlap:
        raise ConfigError(
            "drafter.overlap=true trains while engines generate, but engines on the ranks' GPUs need the memory"
        )

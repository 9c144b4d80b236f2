"""Which GPUs of a node have trainer ranks and engines, and what share of its memory an engine gets.

Everything here is arithmetic. A layout that does not fit raises ConfigError, with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.host.rank_memory import kept
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.speculation import graphs

GIB = 1 << 30
MIB = 1 << 20
# Of one process on one GPU: CUDA's context, its libraries' kernels and NCCL's buffers. An estimate.
PROCESS_BYTES = 2 * GIB
# Share of the memory that nothing is given where several processes have a GPU: fragments, and what estimates leave out.
SPARE = 0.05
# What SGLang 0.5.23 leaves free when it is given no share (`arg_groups/memory_hook.py`): for its attention, for a token
# of a prefill, a request in a CUDA graph, and graphs of prefills, without and with latent attention; above 60 GiB at
# least FLOOR.
BASE = 512 * MIB
# tokens of a prefill, by bytes of a GPU
PREFILLS = (160 * GIB, 16384), (60 * GIB, 8192), (20 * GIB, 4096), (0, 2048)
PREFILL_TOKEN = 3 * MIB // 2
GRAPH_REQUEST = 2 * MIB
PREFILL_GRAPHS = 512 * MIB, 1536 * MIB
FLOOR = 10 * GIB
# Estimates of what SGLang does not count: float32 rows of logits that a verification holds at once, and activations of
# a prefilled token, in rows of the hidden size.
LOGITS_ROWS = 4
PREFILL_ROWS = 24
# A workspace of FlashInfer's attention for these families. SGLang 0.5.23 takes it on GPUs other than Hopper, and makes
# one for the engine and one for every number of drafts (`EAGLEWorkerV2.build_adaptive_runtime_state`).
WORKSPACE = 512 * MIB

Mode = Literal["none", "apart", "together"]


@dataclass(frozen=True)
class GpuLayout:
    """Names of GPUs, as in CUDA_VISIBLE_DEVICES.

    train         of the trainer ranks, by local rank
    engines       of each engine, by its tensor-parallel rank; empty where nothing is placed
    second        of the engines of a second fleet, which shares devices with the first
    together      whether engines share the ranks' GPUs, so that they release memory while training
    mem_fraction  share of the memory that an engine finds free, for its weights and KV cache
    tokens        that the KV cache of an engine on the ranks' GPUs holds; 0: all that fit
    """

    mode: Mode = "none"
    train: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()
    mem_fraction: float = 0.0
    tokens: int = 0
    second: tuple[tuple[str, ...], ...] = ()
    need: Need | None = None  # what `mem_fraction` was computed for

    @property
    def together(self) -> bool:
        return self.mode == "together"

    def environment(self, engine: int) -> dict[str, str]:
        """Return the variables of the engine's process. Those of the second fleet count after all others."""
        return (
            {"CUDA_VISIBLE_DEVICES": ",".join((*self.engines, *self.second)[engine])}
            if self.engines
            else {}
        )


@dataclass(frozen=True)
class Need:
    """Bytes that a layout has to hold.

    gpu      of one GPU
    train    of a trainer rank while engines generate: weights, gradients, optimizer
    weights  of an engine, target and drafter, over all its GPUs
    token    of one token's KV cache, over all GPUs of an engine
    longest  tokens of one sample
    working  of an engine on one GPU, beside weights and KV cache
    kept     of CUDA graphs and attention's workspaces, which a sleeping engine keeps; a part of `working`
    """

    gpu: int
    train: int
    weights: int
    token: int
    longest: int
    working: int = 0
    kept: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        hf_config: Mapping[str, Any],
        gpu: int,
        parameters: int,
        experts: int,
        world: int,
        hopper: bool = True,
    ) -> Need:
        """Reckon what a run needs.

        parameters, experts  of the model, drafter included: all, and those of routed experts
        world                ranks of the job
        hopper               whether the GPUs are of compute capability 9
        """
        itemsize = getattr(torch, config.model.dtype).itemsize
        shards = config.parallel.tensor * config.parallel.pipeline
        of_rank = (parameters - experts) // shards, experts // (shards * config.parallel.expert)
        stays = graph_bytes(config) + (0 if hopper else workspace_bytes(config))
        return cls(
            gpu,
            kept(config, world, itemsize, *of_rank).total,
            parameters * itemsize,
            token_bytes(config, hf_config, config.placement.tensor),
            config.model.max_length,
            working_bytes(config, hf_config, gpu, stays),
            stays,
        )


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
    mode: Literal["auto", "apart", "together"],
    second: int = 0,
) -> GpuLayout:
    """Give every GPU to trainer ranks, to an engine, or to both. Raises ConfigError if that does not come out even.

    second  GPUs of an engine of the second fleet; 0: there is none
    """
    if not gpus:
        return GpuLayout()
    if mode == "auto":
        mode = "apart" if ranks < len(gpus) else "together"
    wanted = engines * tensor
    sizes = f"rollout.engines={engines} x placement.tensor={tensor}"
    if ranks > len(gpus):
        raise ConfigError(
            f"{ranks} trainer ranks on a node of {len(gpus)} GPUs, one for each rank; expected fewer --ranks"
        )
    if mode == "apart":
        left = len(gpus) - ranks
        if wanted != left:
            more = (
                "more than there are" if wanted > left else f"and {left - wanted} would stay idle"
            )
            ways = _filling(left, engines, tensor)
            if wanted < len(gpus):
                ways.append(f"--ranks {len(gpus) - wanted}")
            if wanted < left:
                ways.append(
                    f"CUDA_VISIBLE_DEVICES={','.join(gpus[: ranks + wanted])}, which leaves the others free"
                )
            raise ConfigError(
                f"placement.mode=apart: {len(gpus)} GPUs less {ranks} trainer ranks leave {left}, "
                f"but {sizes} needs {wanted}, {more}; expected {' or '.join(ways) or 'fewer ranks'}"
            )
        free = iter(gpus[ranks:])
    else:
        if second:
            raise ConfigError(
                f"tail.tp={tensor},{second}: two fleets need GPUs without trainer ranks, and those have all {len(gpus)}"
            )
        if not ranks == wanted == len(gpus):
            free_others = ""
            if ranks < len(gpus):
                free_others = (
                    f"; CUDA_VISIBLE_DEVICES={','.join(gpus[:ranks])} leaves the other GPUs free"
                )
            raise ConfigError(
                f"placement.mode=together: expected as many trainer ranks and GPUs of engines as there are GPUs, "
                f"{len(gpus)}; there are {ranks} ranks, and {sizes} needs {wanted}{free_others}"
            )
        free = iter(gpus)
    of_engines = tuple(tuple(next(free) for _ in range(tensor)) for _ in range(engines))
    shared = [gpu for group in of_engines for gpu in group] if second else []
    of_second = tuple(tuple(shared[i : i + second]) for i in range(0, len(shared), second or 1))
    return GpuLayout(mode, tuple(gpus[:ranks]), of_engines, second=of_second)


def _filling(count: int, engines: int, tensor: int) -> list[str]:
    """Return the options with which engines have `count` GPUs, one of two numbers changed."""
    ways = []
    if count and count % tensor == 0:
        ways.append(f"rollout.engines={count // tensor}")
    if count and count % engines == 0:
        ways.append(f"placement.tensor={count // engines}")
    return ways


def check_heads(
    hf_config: Mapping[str, Any], tensor: int, option: str = "placement.tensor"
) -> None:
    """Raise ConfigError unless `tensor` GPUs can share the model's attention heads as SGLang shares them."""
    heads = int(hf_config.get("num_attention_heads", tensor))
    kv_heads = int(hf_config.get("num_key_value_heads") or heads)
    if heads % tensor:
        raise ConfigError(f"{option}={tensor} does not divide the model's {heads} attention heads")
    if kv_heads % tensor and tensor % kv_heads:
        raise ConfigError(
            f"{option}={tensor} neither divides nor is a multiple of the model's {kv_heads} key and value heads"
        )


def with_memory(layout: GpuLayout, need: Need) -> GpuLayout:
    """Fill in the memory of the engines. Raises ConfigError if weights and one sample do not fit.

    Together, the trainer keeps weights, gradients and optimizer while engines generate; its activations are gone by
    then. SGLang takes `mem_fraction` of what is free when it starts.
    """
    tensor = len(layout.engines[0])
    free = need.gpu - PROCESS_BYTES
    if layout.together or layout.second:
        asleep = need.kept if layout.second else 0
        free = (
            int(need.gpu * (1 - SPARE))
            - 2 * PROCESS_BYTES
            - asleep
            - (need.train if layout.together else 0)
        )
    room = free - need.working
    engine = (need.weights + need.token * need.longest) / tensor
    if engine > room:
        trainer = (
            f", of which a trainer rank keeps {need.train / GIB:.1f}" if layout.together else ""
        )
        raise ConfigError(
            f"an engine does not fit: weights and one sample of {need.longest} tokens need {engine / GIB:.1f} GiB "
            f"on each of its {tensor} GPUs, CUDA graphs, logits and prefills {need.working / GIB:.1f}, "
            f"and {max(free, 0) / GIB:.1f} of {need.gpu / GIB:.1f} GiB are free{trainer}"
        )
    tokens = int((room * tensor - need.weights) // need.token) if layout.together else 0
    return replace(layout, mem_fraction=int(1000 * room / free) / 1000, tokens=tokens, need=need)


def working_bytes(config: Config, hf_config: Mapping[str, Any], gpu: int, kept: int) -> int:
    """Return what an engine needs on a GPU of `gpu` bytes beside weights and KV cache: no less than SGLang leaves.

    kept  bytes of CUDA graphs and workspaces
    """
    batch = config.rollout.max_running_requests
    prefill = next(tokens for least, tokens in PREFILLS if gpu >= least)
    theirs = BASE + prefill * PREFILL_TOKEN + batch * GRAPH_REQUEST
    theirs += (
        PREFILL_GRAPHS[bool(hf_config.get("kv_lora_rank"))] + config.placement.tensor * GIB // 8
    )
    rows = batch * (1 + max(config.spec.steps))
    hidden = prefill * int(hf_config["hidden_size"]) * getattr(torch, config.model.dtype).itemsize
    ours = kept + LOGITS_ROWS * rows * int(hf_config["vocab_size"]) * 4 + PREFILL_ROWS * hidden
    return max(theirs, ours, FLOOR if gpu > 60 * GIB else 0)


def graph_bytes(config: Config) -> int:
    """Return the bytes of an engine's CUDA graphs, as if 0 and every number of drafts were captured at every batch."""
    batch = config.rollout.max_running_requests
    drafting = [steps for steps in config.spec.steps if steps]
    slots = {"1": {"candidate_steps": sorted({0, *drafting})}}
    return (
        int(graphs.gib(graphs.count(slots, batch, min(drafting))) * GIB)
        if drafting
        else batch * GRAPH_REQUEST
    )


def workspace_bytes(config: Config) -> int:
    """Return the bytes of FlashInfer's workspaces in an engine."""
    return WORKSPACE * (1 + sum(1 for steps in config.spec.steps if steps))


def token_bytes(config: Config, hf_config: Mapping[str, Any], tensor: int = 1) -> int:
    """Return the bytes of one token in the KV caches of target and drafter, over the `tensor` GPUs of an engine.

    Latents are on every GPU, and so is a key and value head if there are more GPUs than heads.
    """
    layers = int(hf_config["num_hidden_layers"])
    if config.spec.mode != "off":
        layers += int(hf_config.get(DRAFTER, {}).get("num_hidden_layers", 1))
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    if rank := hf_config.get("kv_lora_rank"):
        return layers * (int(rank) + int(hf_config.get("qk_rope_head_dim", 0))) * itemsize * tensor
    heads = int(hf_config["num_attention_heads"])
    width = int(hf_config.get("head_dim") or hf_config["hidden_size"] // heads)
    return (
        2
        * layers
        * max(int(hf_config.get("num_key_value_heads") or heads), tensor)
        * width
        * itemsize
    )


def check_together(config: Config) -> None:
    """Raise ConfigError for options that need engines while training, or two processes of NCCL on one GPU."""
    if config.rollout.staleness:
        raise ConfigError(
            "rollout.staleness=1 draws samples while training, but engines on the ranks' GPUs sleep then"
        )
    if config.drafter.overlap:
        raise ConfigError(
            "drafter.overlap=true trains while engines generate, but engines on the ranks' GPUs need the memory"
        )
    if config.push.transport == "group":
        raise ConfigError(
            "push.transport=group: NCCL refuses two processes on one GPU, and engines share the ranks' GPUs; "
            "expected ipc or http"
        )

"""What a run chooses by its memory where the user left it open: engines, ZeRO, offloading, recomputation.

`run/loading.py` calls `with_distributed` and then `settled` for a run on this machine. `train/dry_run.py` calls them
for GPUs that are not there. `with_distributed` comes first: it changes how much memory the optimizer takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.memory_estimate import (
    GIB,
    EngineMemory,
    RankMemory,
    activation_bytes,
    engine_memory,
    engine_share,
    needed_tokens,
    step_room,
    trainer_memory,
)


@dataclass(frozen=True)
class Hardware:
    """The GPUs and ranks of a run.

    gpus    number of GPUs of a node
    gpu     bytes of one GPU
    ranks   trainer ranks of a node
    world   trainer ranks of the job, a multiple of parallel.tensor x pipeline (`Config.check_run`)
    hopper  whether the GPUs are of compute capability 9
    """

    gpus: int
    gpu: int
    ranks: int
    world: int
    hopper: bool = True

    def colocated(self, config: Config) -> bool:
        """Return whether engines share the ranks' GPUs. "auto": they do if the ranks leave no GPU of the node."""
        mode = config.placement.mode
        return mode == "colocated" or (mode == "auto" and self.ranks >= self.gpus)


@dataclass(frozen=True)
class Fit:
    """Computes how engines of a model fit beside trainer ranks. It changes nothing, and may be used for any `config`.

    hf_config   config.json of the policy, with an EAGLE-3 drafter's under `models.config.DRAFTER`
    parameters  number of all parameters of the model, drafter included
    experts     number of those that belong to routed experts

    In the methods `kept` is the bytes that a trainer rank keeps on each GPU of an engine while the engine generates;
    None: engines have GPUs of their own.
    """

    hf_config: Mapping[str, Any]
    parameters: int
    machine: Hardware
    experts: int = 0

    def rank(self, config: Config) -> RankMemory:
        """Return what a trainer rank needs, by estimate; all ranks have equal shares."""
        return trainer_memory(
            config, self.hf_config, self.parameters, self.experts, self.machine.world
        )

    def engine(self, config: Config) -> EngineMemory:
        """Return what an engine of `placement.tensor` GPUs needs."""
        gpu = self.machine.gpu
        return engine_memory(config, self.hf_config, gpu, self.parameters, self.machine.hopper)

    def cache_tokens(self, config: Config, kept: int | None) -> int:
        """Return the tokens that an engine's KV cache holds; 0 if the engine does not fit."""
        try:
            return engine_share(self.engine(config), self.machine.gpu, kept).kv_tokens
        except ConfigError:
            return 0

    def with_engines(self, config: Config, kept: int | None) -> Config:
        """Return the configuration with the smallest engines that hold a step's samples, else those that hold most.

        Returns `config` itself if no tensor-parallel size fits the free GPUs and the heads, for example without a free
        GPU.

        Small engines come first: a larger tensor-parallel size costs communication in every layer.
        """
        free = self.machine.gpus
        if kept is None:
            free -= self.machine.ranks
        heads = int(self.hf_config["num_attention_heads"])
        kv_heads = int(self.hf_config.get("num_key_value_heads") or heads)
        best, most = config, 0
        for tensor in (1, 2, 4, 8):
            # Every free GPU gets an engine, and SGLang can split the heads (`rollout/placement.py`, `check_heads`).
            if free < tensor or free % tensor or heads % tensor:
                continue
            if kv_heads % tensor and tensor % kv_heads:
                continue
            number = free // tensor
            changed = _changed(config, "rollout", engines=number)
            changed = _changed(changed, "placement", tensor=tensor)
            tokens = self.cache_tokens(changed, kept)
            if not most or number * tokens > most:
                best, most = changed, number * tokens
            if tokens >= needed_tokens(changed, number):
                return changed
        return best


def with_distributed(config: Config, world: int) -> Config:
    """Return the configuration with optimizer.distributed decided: `auto` is on if parameters have several replicas.

    It stays off for float64: Megatron's distributed optimizer keeps gradients in float32 (`train/optimizer.py`).

    world  ranks of the job
    """
    if config.optimizer.distributed is not None:
        return config
    # data- and context-parallel ranks hold the same parameters
    replicas = world // (config.parallel.tensor * config.parallel.pipeline)
    distributed = replicas > 1 and config.model.dtype != "float64"
    return _changed(config, "optimizer", distributed=distributed)


def settled(
    config: Config, fit: Fit, rank: RankMemory, *, launches: bool, engines_open: bool
) -> tuple[Config, list[str]]:
    """Return the configuration with all that it leaves to the run, and a line for each choice that a user should see.

    The order matters. Engines come first, then offloading for what they lack, then engines again in the memory that
    offloading frees, and last recomputation beside these engines.

    rank          memory of a trainer rank with the options of `config`; `dry_run` counts it, and a run estimates it
    launches      whether the run launches SGLang engines
    engines_open  whether the number and size of engines are free; else rollout.engines and placement.tensor hold. Take
                  it from the configuration as it was loaded (`run/inputs.py`, `leaves_engines_open`): in the copies
                  that are made here these options count as set
    """
    lines = []
    machine = fit.machine
    engines_open = engines_open and launches
    colocated = launches and machine.colocated(config)
    kept = rank.between_steps if colocated else None  # bytes beside an engine, as in `Fit`
    if engines_open:
        config = fit.with_engines(config, kept)
    if config.optimizer.offload is None:
        offload = False
        # only engines on the ranks' GPUs gain by it; `optimizer.offload` moves float32 copies of 16-bit weights
        if kept is not None and config.model.dtype == "bfloat16":
            tokens = fit.cache_tokens(config, kept)
            needed = needed_tokens(config, config.rollout.engines)
            offload = tokens < needed
        if offload:
            lines.append(
                f"optimizer.offload=true: a step's samples need about {needed:,} tokens of an engine's KV cache, which "
                f"has {tokens:,} beside Adam's state"
            )
            kept = replace(rank, offloaded=True).between_steps
            if engines_open:
                config = fit.with_engines(config, kept)
        config = _changed(config, "optimizer", offload=offload)
    if engines_open and machine.gpus > 1:
        lines.append(
            f"rollout.engines={config.rollout.engines} and placement.tensor={config.placement.tensor}, by the KV cache "
            "that they hold"
        )
    if config.parallel.recompute is None:
        total = replace(rank, activations=activation_bytes(config, fit.hf_config)).total
        room = step_room(machine.gpu, fit.engine(config) if colocated else None)
        config = _changed(config, "parallel", recompute=total > room)
        if total > room:
            lines.append(
                f"parallel.recompute=true: without it a rank needs about {total / GIB:.0f} GiB, "
                f"and has {room / GIB:.0f}"
            )
    return config, lines


def _changed(config: Config, section: str, **values: Any) -> Config:
    """Return a copy with other options of a section. `model_copy` checks nothing: the values must be valid."""
    table = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: table})

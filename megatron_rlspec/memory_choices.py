"""What a run chooses by its memory where the user left it open: engines, ZeRO, offloading, recomputation."""

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
    """What a run has: GPUs of a node, bytes of one, trainer ranks of a node and of the job.

    hopper  whether the GPUs are of compute capability 9
    """

    gpus: int
    gpu: int
    ranks: int
    world: int
    hopper: bool = True

    def colocated(self, config: Config) -> bool:
        """Return whether engines share the ranks' GPUs."""
        mode = config.placement.mode
        return mode == "colocated" or (mode == "auto" and self.ranks >= self.gpus)


@dataclass(frozen=True)
class Fit:
    """Fits engines of a model beside trainer ranks.

    parameters, experts  of the model, drafter included: all, and those of routed experts

    `kept`: bytes that a trainer rank keeps on each GPU of an engine; None: engines have GPUs of their own.
    """

    hf_config: Mapping[str, Any]
    parameters: int
    machine: Hardware
    experts: int = 0

    def rank(self, config: Config) -> RankMemory:
        return trainer_memory(
            config, self.hf_config, self.parameters, self.experts, self.machine.world
        )

    def engine(self, config: Config) -> EngineMemory:
        gpu = self.machine.gpu
        return engine_memory(config, self.hf_config, gpu, self.parameters, self.machine.hopper)

    def cache_tokens(self, config: Config, kept: int | None) -> int:
        """Return the tokens that an engine's KV cache holds; 0 if the engine does not fit."""
        try:
            return engine_share(self.engine(config), self.machine.gpu, kept).kv_tokens
        except ConfigError:
            return 0

    def with_engines(self, config: Config, kept: int | None) -> Config:
        """Return the configuration with the smallest engines that hold a step's samples, else those that hold most."""
        free = self.machine.gpus
        if kept is None:
            free -= self.machine.ranks
        heads = int(self.hf_config["num_attention_heads"])
        kv_heads = int(self.hf_config.get("num_key_value_heads") or heads)
        best, most = config, 0
        for tensor in (1, 2, 4, 8):
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
    """Return the configuration with optimizer.distributed, which `auto` switches on for several replicas."""
    if config.optimizer.distributed is not None:
        return config
    replicas = world // (config.parallel.tensor * config.parallel.pipeline)
    distributed = replicas > 1 and config.model.dtype != "float64"
    return _changed(config, "optimizer", distributed=distributed)


def settled(
    config: Config, fit: Fit, rank: RankMemory, *, launches: bool, engines_open: bool
) -> tuple[Config, list[str]]:
    """Return the configuration with what it leaves to the run, and a line for each choice.

    rank          a trainer rank between steps
    launches      whether the run launches engines
    engines_open  whether there may be as many as fit best; else as rollout.engines and placement.tensor say
    """
    lines = []
    machine = fit.machine
    engines_open = engines_open and launches
    colocated = launches and machine.colocated(config)
    kept = rank.between_steps if colocated else None
    if engines_open:
        config = fit.with_engines(config, kept)
    if config.optimizer.offload is None:
        offload = False
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
    table = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: table})

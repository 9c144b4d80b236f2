"""Options that a run chooses by its model and its GPUs, where the user left them open. Every rank chooses alike."""

from __future__ import annotations

import os

import torch

from megatron_rlspec import memory_estimate
from megatron_rlspec.config import Command, Config
from megatron_rlspec.conversion.drafter_files import read_model
from megatron_rlspec.rollout import placement
from megatron_rlspec.run.loading import hardware


def settle(config: Config, command: Command, engines_open: bool) -> Config:
    """Return the configuration with what it leaves to the run; rank 0 prints the choices. On a CPU nothing changes.

    Raises ConfigError if a trainer rank does not fit its GPU.
    """
    if not placement.devices(os.environ, torch.cuda.device_count()):
        return config
    machine = hardware()
    world = machine.world
    config = memory_estimate.with_distributed(config, world)
    hf_config, tensors = read_model(config.model.path, config.drafter.path)
    parameters, experts = placement.count_parameters(tensors)
    rollout = config.rollout
    launches = config.generates(command) and rollout.engine == "sglang" and not rollout.urls
    engines = memory_estimate.engines_of(launches, engines_open)
    rank = placement.trainer_memory(config, hf_config, parameters, experts, world)
    config, lines = memory_estimate.settled(config, hf_config, parameters, rank, machine, engines)
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(f"rlspec {command}: {line}", flush=True)
    if not launches:  # with engines of its own, the placement checks it
        rank = placement.trainer_memory(config, hf_config, parameters, experts, world)
        room = memory_estimate.step_room(machine.gpu)
        memory_estimate.check_rank(rank, room, "a trainer rank, by estimate,")
    return config

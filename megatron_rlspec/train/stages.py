"""The pipeline stages of a job of any size, built in one process, and the memory of their ranks.

The trainer (`step.Trainer`) is that of a real run, on torch's meta device, with torch's fake process group in place of
the other ranks. So no weights are read, and no tensor has values. `dry_run.py` calls `build` and prints the result.

Parameters are counted here. `memory_estimate.py` computes the memory of weights, gradients and optimizer state from
the numbers of parameters, and estimates activations. Workspaces of kernels and fragmentation come on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rlspec.config import Config, ParallelConfig
from megatron_rlspec.memory_estimate import RankMemory, activation_bytes, rank_memory
from megatron_rlspec.models.names import NameTable
from megatron_rlspec.train import runtime, shards
from megatron_rlspec.train.optimizer import Learner
from megatron_rlspec.train.step import Trainer

_META = torch.device("meta")


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: the numbers of its first rank, which are those of every rank of the stage, and of all ranks.

    layers              of the policy, counted from 0 over all stages
    policy_of_rank      number of the policy's parameters on one rank
    drafter_of_rank     number of the drafter's; 0 on all stages but the last
    policy_of_stage     number of the policy's parameters on all ranks of the stage, each one once
    drafter_of_stage    number of the drafter's, counted in the same way
    memory              bytes on one rank
    """

    layers: range
    policy_of_rank: int
    drafter_of_rank: int
    policy_of_stage: int
    drafter_of_stage: int
    memory: RankMemory


def build(config: Config, hf_config: Mapping[str, Any], world: int) -> list[Stage]:
    """Build every stage of a job of `world` ranks, the first one first.

    The process must be as `_fake_rank` says. Raises ConfigError if this layout or model cannot be trained.
    """
    return [_stage(config, hf_config, world, stage) for stage in range(config.parallel.pipeline)]


def parameters(built: list[Stage]) -> tuple[int, int]:
    """Count the parameters of policy and drafter over all stages. A parameter on several ranks counts once."""
    policy = sum(stage.policy_of_stage for stage in built)
    drafter = sum(stage.drafter_of_stage for stage in built)
    return policy, drafter


def _stage(config: Config, hf_config: Mapping[str, Any], world: int, stage: int) -> Stage:
    """Build the first rank of pipeline stage number `stage`. All ranks of a stage have equally many parameters."""
    parallel = config.parallel
    last = stage == parallel.pipeline - 1
    # Megatron numbers ranks stage by stage, so this is the stage's first rank.
    with _fake_rank(config, world, rank=stage * world // parallel.pipeline):
        trainer = Trainer(config, hf_config)
        policy = _count(trainer.name_table, trainer.policy, trainer.model_config)
        drafter = Counter[str]()
        if trainer.drafter is not None:
            drafter = _count(trainer.name_table, trainer.drafter, trainer.model_config)
        policy_of_stage = _count_once(policy, parallel)
        copied = 0  # bytes of weights that are no parameters
        # With several stages the last one can have a copy of the embedding (`train.model.embedding_for_drafter`).
        if stage and last:
            head = trainer.policy.head_weight()
            if trainer.policy.share_embeddings_and_output_weights:
                # A tied embedding: its copy on this stage is a parameter, but the first stage has counted it.
                policy_of_stage -= parallel.tensor * head.numel()
            elif trainer.drafter is not None:
                copied = head.nbytes  # the drafter's copy of the embedding
    experts = policy["experts"] + drafter["experts"]
    memory = rank_memory(config, world, (policy + drafter).total() - experts, experts)
    activations = activation_bytes(config, hf_config, stage)
    per_stage = trainer.model_config.num_layers // parallel.pipeline
    return Stage(
        layers=range(stage * per_stage, (stage + 1) * per_stage),
        policy_of_rank=policy.total(),
        drafter_of_rank=drafter.total(),
        policy_of_stage=policy_of_stage,
        drafter_of_stage=_count_once(drafter, parallel),
        memory=replace(memory, weights=memory.weights + copied, activations=activations),
    )


def _count(table: NameTable, module: nn.Module, config: Any) -> Counter[str]:
    """Count the parameters of a module on this rank, by how they are spread over ranks.

    cut      over tensor-parallel ranks
    whole    on every tensor-parallel rank
    experts  over tensor- and expert-parallel ranks
    """
    sizes = Counter[str]()
    for own_name, parameter in module.named_parameters():
        name = shards.global_name(own_name, config)
        if ".local_experts." in name:  # as in the canonical names of `models/names.py`
            kind = "experts"
        elif table.row(name).cut.dim is not None:
            kind = "cut"
        else:
            kind = "whole"
        sizes[kind] += parameter.numel()
    return sizes


def _count_once(sizes: Counter[str], parallel: ParallelConfig) -> int:
    """Count every parameter of a module once, over the tensor- and expert-parallel ranks; `sizes` by `_count`."""
    return parallel.tensor * (sizes["cut"] + parallel.expert * sizes["experts"]) + sizes["whole"]


def _init_without_optimizer(learner: Any, module: nn.Module, *_: Any, **__: Any) -> None:
    """Replace `Learner.__init__`: no gradient buffers and no optimizer, whose memory `rank_memory` computes.

    Of what `Learner.__init__` sets, `Trainer.__init__` reads only `ddp`. If that changes, set the attribute here, too.
    """
    learner.ddp = module


@contextmanager
def _fake_rank(config: Config, world: int, rank: int) -> Iterator[None]:
    """Make this process one rank of a fake job of `world` ranks, whose trainer has neither values nor optimizers.

    The process must have no other process group, and CUDA_VISIBLE_DEVICES must have been empty when it imported torch.
    """
    parallel = config.parallel
    # The options of the real machine, but layers create their weights on the (fake) GPU and do not fill them.
    options = runtime.device_options()
    options |= {"use_cpu_initialization": False, "perform_initialization": False}
    replaced = [
        (runtime, "device", lambda: _META),
        (runtime, "device_options", options.copy),  # the caller changes what it gets
        (Learner, "__init__", _init_without_optimizer),
        # Megatron's layers create their weights on this device.
        (torch.cuda, "current_device", lambda: _META),
    ]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        ps.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            create_gloo_process_groups=False,
        )
        runtime.init_distributed(parallel, config.train.seed)
        with ExitStack() as stack:
            for owner, name, value in replaced:
                stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(_META)  # the default device of tensors that are built without one
            yield
    finally:
        runtime.shut_down()

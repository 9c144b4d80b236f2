"""The pipeline stages of a job of any size, built in one process, and the memory of their ranks.

The trainer is that of a real run, on torch's meta device, with torch's fake process group in place of the other ranks.
Of the model directory only config.json is read.

The memory is that of weights, gradients, optimizer state, and all tensors of the micro-batches in flight
(`activations.py`). Workspaces of kernels and fragmentation come on top.
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
from megatron_rlspec.memory_estimate import RankMemory, rank_memory
from megatron_rlspec.models.names import NameTable
from megatron_rlspec.train import runtime, shards
from megatron_rlspec.train.activations import Activations, measure_micro_batch, untrained
from megatron_rlspec.train.optimizer import Learner
from megatron_rlspec.train.step import Trainer

_META = torch.device("meta")


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage.

    policy, drafter  parameters on this rank
    counted          parameters of policy and drafter on all ranks of the stage, each one once
    memory           at a step's peak, without activations if they were not asked for
    activations      of one micro-batch
    """

    layers: range
    policy: int
    drafter: int
    counted: tuple[int, int]
    memory: RankMemory
    activations: Activations | None


def build(
    config: Config, hf_config: Mapping[str, Any], world: int, *, activations: bool = False
) -> list[Stage]:
    """Build every stage of a job of `world` ranks. Raises ConfigError if this layout or model cannot be trained."""
    return [
        _stage(config, hf_config, world, stage, activations)
        for stage in range(config.parallel.pipeline)
    ]


def parameters(built: list[Stage]) -> tuple[int, int]:
    """Count the parameters of policy and drafter over all stages. A parameter on several ranks counts once."""
    policy = sum(stage.counted[0] for stage in built)
    drafter = sum(stage.counted[1] for stage in built)
    return policy, drafter


def place(rank: int, parallel: ParallelConfig, world: int) -> dict[str, int]:
    """Return a rank's coordinates in Megatron's order: tensor varies fastest, then context, data, pipeline.

    `expert` is the rank's number among its stage's context and data ranks, modulo `parallel.expert`.
    """
    rank, tensor = divmod(rank, parallel.tensor)
    rank, context = divmod(rank, parallel.context)
    pipeline, data = divmod(rank, replicas(parallel, world))
    expert = (context + parallel.context * data) % parallel.expert
    return {
        "tensor": tensor,
        "context": context,
        "data": data,
        "expert": expert,
        "pipeline": pipeline,
    }


def replicas(parallel: ParallelConfig, world: int) -> int:
    """Return the data-parallel size."""
    return world // (parallel.tensor * parallel.pipeline * parallel.context)


def _stage(
    config: Config, hf_config: Mapping[str, Any], world: int, stage: int, activations: bool
) -> Stage:
    parallel = config.parallel
    last = stage == parallel.pipeline - 1
    with _fake_rank(config, world, rank=stage * world // parallel.pipeline):
        trainer = Trainer(config, hf_config)
        measured = measure_micro_batch(trainer) if activations else None
        policy = _count(trainer.table, trainer.policy, trainer.model_config)
        drafter = Counter[str]()
        if trainer.drafter is not None:
            drafter = _count(trainer.table, trainer.drafter, trainer.model_config)
        counted = _of_all_ranks(policy, parallel)
        copied = 0
        if stage and last:
            head = trainer.policy.head_weight()
            if trainer.policy.share_embeddings_and_output_weights:
                counted -= parallel.tensor * head.numel()  # the first stage has it, too
            elif trainer.drafter is not None:
                copied = head.nbytes  # the drafter's copy of the embedding
    experts = policy["experts"] + drafter["experts"]
    memory = rank_memory(config, world, (policy + drafter).total() - experts, experts)
    in_step = 0
    if measured is not None:
        # of the micro-batches in flight, and of the one that is computed
        in_flight = parallel.pipeline - stage - 1
        in_step = in_flight * measured.after_forward + measured.peak
    each = trainer.model_config.num_layers // parallel.pipeline
    return Stage(
        range(stage * each, (stage + 1) * each),
        policy.total(),
        drafter.total(),
        (counted, _of_all_ranks(drafter, parallel)),
        replace(memory, weights=memory.weights + copied, activations=in_step),
        measured,
    )


def _count(table: NameTable, module: nn.Module, config: Any) -> Counter[str]:
    """Count the parameters of a module on this rank, by how they are spread.

    cut      over tensor-parallel ranks
    whole    on every tensor-parallel rank
    experts  over tensor- and expert-parallel ranks
    """
    sizes = Counter[str]()
    for own_name, parameter in module.named_parameters():
        name = shards.global_name(own_name, config)
        if ".local_experts." in name:
            kind = "experts"
        elif table.row(name).cut.dim is not None:
            kind = "cut"
        else:
            kind = "whole"
        sizes[kind] += parameter.numel()
    return sizes


def _of_all_ranks(sizes: Counter[str], parallel: ParallelConfig) -> int:
    """Count every parameter of a module once."""
    return parallel.tensor * (sizes["cut"] + parallel.expert * sizes["experts"]) + sizes["whole"]


@contextmanager
def _fake_rank(config: Config, world: int, rank: int) -> Iterator[None]:
    """Make this process one rank of a fake job of `world` ranks, whose trainer has neither values nor optimizers.

    The process must have no other process group, and CUDA_VISIBLE_DEVICES must have been empty when it imported torch.
    """
    parallel = config.parallel
    options = runtime.device_options()
    options |= {"use_cpu_initialization": False, "perform_initialization": False}
    replaced = [
        (runtime, "device", lambda: _META),
        (runtime, "device_options", options.copy),
        (Learner, "__init__", untrained),
        # where Megatron's layers put their weights
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
            stack.enter_context(_META)
            yield
    finally:
        runtime.shut_down()

"""The pipeline stages of a job of any size, built in one process, and the memory of their ranks.

Policy and drafter are built with the classes of a real run, on torch's meta device, with torch's fake process group in
place of the other ranks. Of the model directory only config.json is read.

The memory is that of weights, gradients, optimizer state, and all tensors of the micro-batches in flight
(`activations.py`). Workspaces of kernels and fragmentation come on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rlspec.config import Config
from megatron_rlspec.memory_estimate import DTYPE_BYTES, RankMemory, rank_memory
from megatron_rlspec.models.names import NameTable
from megatron_rlspec.train import runtime, shards
from megatron_rlspec.train.activations import Activations, measure_micro_batch
from megatron_rlspec.train.drafter import build_drafter
from megatron_rlspec.train.model import Policy, transformer_config

_META = torch.device("meta")


@dataclass(frozen=True)
class Sizes:
    """Number of parameters of one module on one rank.

    cut      split over tensor-parallel ranks
    whole    on every tensor-parallel rank
    experts  split over tensor- and expert-parallel ranks
    """

    cut: int = 0
    whole: int = 0
    experts: int = 0

    @property
    def here(self) -> int:
        """Return the number of all parameters on this rank."""
        return self.cut + self.whole + self.experts

    def of_all_ranks(self, tensor: int, expert: int) -> int:
        """Count every parameter of the module once."""
        return tensor * (self.cut + expert * self.experts) + self.whole


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage.

    repeated     parameters that another stage holds, too
    activations  of one micro-batch; None if they were not asked for
    """

    layers: range
    policy: Sizes
    drafter: Sizes
    repeated: int = 0
    activations: Activations | None = None


def build(
    config: Config, hf_config: Mapping[str, Any], world: int, *, activations: bool = False
) -> list[Stage]:
    """Build every stage of a job of `world` ranks. Raises ConfigError if this layout or model cannot be trained."""
    return [
        _stage(config, hf_config, world, stage, activations)
        for stage in range(config.parallel.pipeline)
    ]


def parameters(built: list[Stage], tensor: int, expert: int = 1) -> tuple[int, int]:
    """Count the parameters of policy and drafter over all stages. A parameter on several ranks counts once."""
    policy = 0
    drafter = 0
    for stage in built:
        policy += stage.policy.of_all_ranks(tensor, expert) - tensor * stage.repeated
        drafter += stage.drafter.of_all_ranks(tensor, expert)
    return policy, drafter


def memory(
    config: Config, hf_config: Mapping[str, Any], built: list[Stage], stage: int, world: int
) -> RankMemory:
    """Compute what a rank of this stage holds at a step's peak, without activations if they were not counted."""
    here = built[stage]
    experts = here.policy.experts + here.drafter.experts
    dense = here.policy.here + here.drafter.here - experts
    rank = rank_memory(config, world, dense, experts)

    replica = 0
    behind_another = stage > 0 and stage == len(built) - 1
    if behind_another and here.drafter.here and not hf_config.get("tie_word_embeddings", False):
        # the drafter's copy of the embedding
        rows = hf_config["vocab_size"] // config.parallel.tensor
        replica = DTYPE_BYTES[config.model.dtype] * rows * hf_config["hidden_size"]

    activations = 0
    if here.activations is not None:
        waiting = (
            len(built) - stage - 1
        )  # micro-batches in flight, but for the one that is computed
        activations = waiting * here.activations.after_forward + here.activations.peak
    return replace(rank, weights=rank.weights + replica, activations=activations)


def place(rank: int, config: Config, world: int) -> dict[str, int]:
    """Return a rank's coordinates in Megatron's order: tensor varies fastest, then context, data, pipeline.

    `expert` is the rank's number among its stage's context and data ranks, modulo `parallel.expert`.
    """
    parallel = config.parallel
    rank, tensor = divmod(rank, parallel.tensor)
    rank, context = divmod(rank, parallel.context)
    pipeline, data = divmod(rank, replicas(config, world))
    expert = (context + parallel.context * data) % parallel.expert
    return {
        "tensor": tensor,
        "context": context,
        "data": data,
        "expert": expert,
        "pipeline": pipeline,
    }


def replicas(config: Config, world: int) -> int:
    """Return the data-parallel size."""
    parallel = config.parallel
    return world // (parallel.tensor * parallel.pipeline * parallel.context)


def _stage(
    config: Config, hf_config: Mapping[str, Any], world: int, stage: int, activations: bool
) -> Stage:
    parallel = config.parallel
    options = config.drafter
    with _alone(config, world, rank=stage * world // parallel.pipeline):
        shapes_only: dict[str, Any] = {
            "use_cpu_initialization": False,
            "perform_initialization": False,
        }
        described = transformer_config(hf_config, config.model, parallel)
        described = replace(described, **shapes_only)
        table = shards.family(hf_config)
        policy = Policy(described, hf_config, config.model.max_length)
        each = described.num_layers // parallel.pipeline
        drafter = None
        if options.train and stage == parallel.pipeline - 1:
            drafter = build_drafter(described, hf_config, options, config.train.seed)
        tied = (
            stage and stage == parallel.pipeline - 1 and policy.share_embeddings_and_output_weights
        )
        repeated = policy.head_weight().numel() if tied else 0
        return Stage(
            range(stage * each, (stage + 1) * each),
            _count(table, policy, described),
            _count(table, drafter, described) if drafter is not None else Sizes(),
            repeated,
            measure_micro_batch(config, hf_config, policy, drafter) if activations else None,
        )


def _count(table: NameTable, module: nn.Module, config: Any) -> Sizes:
    names: dict[int, str] = {}
    for name, tensor in shards.global_names(module, config).items():
        names[id(tensor)] = name
    sizes = Counter[str]()
    for parameter in module.parameters():
        name = names[id(parameter)]
        if ".local_experts." in name:
            kind = "experts"
        elif table.row(name).cut.dim is not None:
            kind = "cut"
        else:
            kind = "whole"
        sizes[kind] += parameter.numel()
    return Sizes(**sizes)


@contextmanager
def _alone(config: Config, world: int, rank: int) -> Iterator[None]:
    """Make this process one rank of a fake job of `world` ranks; modules are built on the meta device.

    The process must have no other process group, and CUDA_VISIBLE_DEVICES must have been empty when it imported torch.
    """
    parallel = config.parallel
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
        # where Megatron's layers put their weights
        with mock.patch.object(torch.cuda, "current_device", lambda: _META), _META:
            yield
    finally:
        runtime.shut_down()

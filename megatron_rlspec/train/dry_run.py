"""`rlspec train --dry-run`: print parameters, memory and place of every rank of a job, in one process.

It builds policy and drafter once per pipeline stage, with the classes of a real run, on torch's meta device and with
torch's fake process group in place of the other ranks. Of the model directory it reads config.json only.

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

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.memory_estimate import (
    DTYPE_BYTES,
    GIB,
    Hardware,
    RankMemory,
    cache_line,
    check_rank,
    engine_memory,
    engine_share,
    engines_of,
    rank_memory,
    settled,
    step_room,
    with_distributed,
)
from megatron_rlspec.models.names import NameTable
from megatron_rlspec.train import runtime, shards
from megatron_rlspec.train.activations import Activations, measure_micro_batch
from megatron_rlspec.train.drafter import build_drafter
from megatron_rlspec.train.model import Policy, transformer_config

_META = torch.device("meta")
_MEMORY = ("weights", "gradients", "optimizer", "activations", "total")


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


def stages(
    config: Config, hf_config: Mapping[str, Any], world: int, *, activations: bool = False
) -> list[Stage]:
    """Build every stage of a job of `world` ranks. Raises ConfigError if this layout or model cannot be trained."""
    return [
        _build(config, hf_config, world, stage, activations)
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
    pipeline, data = divmod(rank, _replicas(config, world))
    expert = (context + parallel.context * data) % parallel.expert
    return {
        "tensor": tensor,
        "context": context,
        "data": data,
        "expert": expert,
        "pipeline": pipeline,
    }


def report(
    config: Config,
    hf_config: Mapping[str, Any],
    world: int,
    gpu_gib: float | None = None,
    engines_open: bool = False,
) -> Iterator[str]:
    """Yield the lines that `--dry-run` prints.

    engines_open  whether the user said neither how many engines there are nor how large they are

    Raises ConfigError if this layout or model cannot be trained, or if a rank or an engine needs more than `gpu_gib`.
    """
    config = with_distributed(config, world)
    if gpu_gib is not None:
        config, lines = _settled(config, hf_config, world, int(gpu_gib * GIB), engines_open)
        yield from lines
    built = stages(config, hf_config, world, activations=True)
    ranks = [memory(config, hf_config, built, stage, world) for stage in range(len(built))]
    largest = max(range(len(ranks)), key=lambda stage: ranks[stage].total)
    if gpu_gib is not None:
        who = f"--gpu-gib {gpu_gib:g}: a rank of pipeline stage {largest}"
        check_rank(ranks[largest], int(gpu_gib * GIB), who)

    policy, drafter = parameters(built, config.parallel.tensor, config.parallel.expert)
    yield f"{hf_config['architectures'][0]}: {policy:,} parameters, its drafter {drafter:,}"
    yield _layout(config, world)
    tokens = config.train.tokens_per_micro_batch
    yield f"memory in GiB; activations: of micro-batches of {tokens:,} tokens; workspaces and fragmentation come on top"
    yield from _table(config, world, built, ranks)
    if gpu_gib is None:
        return
    most = ranks[largest].total / GIB
    yield f"fits: a rank needs at most {most:.2f} of {gpu_gib:g} GiB, without an engine on the same GPU"
    if config.rollout.engine == "sglang" and not config.rollout.urls:
        yield from _engines(
            config, hf_config, world, int(gpu_gib * GIB), policy + drafter, ranks[largest]
        )


def _settled(
    config: Config, hf_config: Mapping[str, Any], world: int, gpu: int, engines_open: bool
) -> tuple[Config, list[str]]:
    """Return the configuration with what a run on `world` GPUs of one node chooses, and a line for each choice."""
    built = stages(config, hf_config, world)
    rank = memory(config, hf_config, built, len(built) - 1, world)
    all_parameters = sum(parameters(built, config.parallel.tensor, config.parallel.expert))
    launches = config.rollout.engine == "sglang" and not config.rollout.urls
    # With placement.mode=disaggregated the number of GPUs is not known.
    is_open = engines_open and config.placement.mode != "disaggregated"
    machine = Hardware(gpus=world, gpu=gpu, ranks=world, world=world)
    return settled(config, hf_config, all_parameters, rank, machine, engines_of(launches, is_open))


def _replicas(config: Config, world: int) -> int:
    """Return the data-parallel size."""
    parallel = config.parallel
    return world // (parallel.tensor * parallel.pipeline * parallel.context)


def _layout(config: Config, world: int) -> str:
    parallel = config.parallel
    line = (
        f"{world} ranks = tensor {parallel.tensor} x context {parallel.context} x data {_replicas(config, world)} "
        f"x pipeline {parallel.pipeline}"
    )
    if parallel.sequence:
        line += ", sequence parallel"
    if parallel.expert > 1:
        line += f", experts split over {parallel.expert} of context x data"
    if config.optimizer.distributed:
        line += ", optimizer split over replicas"
    return line


def _table(
    config: Config, world: int, built: list[Stage], ranks: list[RankMemory]
) -> Iterator[str]:
    """Yield a line of names, and a line for each rank."""
    axes = ["tensor", "context", "data", "pipeline"]
    if config.parallel.expert > 1:
        axes.insert(3, "expert")
    widths = {"rank": 4}
    widths |= {axis: max(4, len(axis)) for axis in axes}
    widths |= {"layers": 7, "policy": 14, "drafter": 12}
    widths |= {part: max(9, len(part)) for part in _MEMORY}
    yield " ".join(f"{name:>{width}}" for name, width in widths.items())
    for rank in range(world):
        coordinates = place(rank, config, world)
        stage = built[coordinates["pipeline"]]
        needed = ranks[coordinates["pipeline"]]
        cells = {"rank": str(rank)}
        cells |= {axis: str(coordinates[axis]) for axis in axes}
        cells["layers"] = f"{stage.layers.start}-{stage.layers.stop - 1}"
        cells["policy"] = f"{stage.policy.here:,}"
        cells["drafter"] = f"{stage.drafter.here:,}"
        cells |= {part: f"{getattr(needed, part) / GIB:.2f}" for part in _MEMORY}
        yield " ".join(f"{cells[name]:>{width}}" for name, width in widths.items())


def _engines(
    config: Config,
    hf_config: Mapping[str, Any],
    world: int,
    gpu: int,
    model_parameters: int,
    rank: RankMemory,
) -> Iterator[str]:
    """Yield what an engine gets on a Hopper GPU of `gpu` bytes, alone or beside the `rank` that needs most.

    With `placement.mode` auto both ways are shown: which one a run takes depends on the number of its GPUs. Raises
    ConfigError if an engine does not fit in the way that was asked for.
    """
    engine = engine_memory(config, hf_config, gpu, model_parameters)
    trainer = rank.between_steps
    mode = config.placement.mode
    yield (
        f"an engine: weights {engine.weights / GIB:.2f} GiB over its {engine.tensor} GPUs, KV cache {engine.token:,} "
        f"bytes a token; on each GPU CUDA graphs {engine.cuda_graphs / GIB:.2f} GiB, page tables "
        f"{engine.attention / GIB:.2f}, with logits and prefills {engine.working / GIB:.2f}"
    )
    colocated = world == config.rollout.engines * engine.tensor
    ways: dict[str, int | None] = {}
    if mode != "colocated":
        ways["on GPUs of its own"] = None
    if mode == "colocated" or (mode == "auto" and colocated):
        ways[f"beside a trainer rank that keeps {trainer / GIB:.2f} GiB"] = trainer
    for where, of_trainer in ways.items():
        try:
            if of_trainer is not None:
                check_rank(rank, step_room(gpu, engine), "a rank beside a sleeping engine")
            tokens = engine_share(engine, gpu, of_trainer).kv_tokens
        except ConfigError as error:
            if mode != "auto":
                raise
            yield f"{where}: {error}"
            continue
        yield f"{where}: {cache_line(config, tokens)}"


def _build(
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

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

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.host.rank_memory import Bytes, kept
from megatron_rlspec.models.names import NameTable
from megatron_rlspec.train import runtime, shards
from megatron_rlspec.train.activations import Activations, of_micro_batch
from megatron_rlspec.train.drafter import build_drafter
from megatron_rlspec.train.model import DTYPES, Policy, transformer_config

_META = torch.device("meta")
_GIB = 1 << 30


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
    policy = sum(
        stage.policy.of_all_ranks(tensor, expert) - tensor * stage.repeated for stage in built
    )
    drafter = sum(stage.drafter.of_all_ranks(tensor, expert) for stage in built)
    return policy, drafter


def memory(
    config: Config, hf_config: Mapping[str, Any], built: list[Stage], stage: int, world: int
) -> Bytes:
    """Compute what a rank of this stage holds at a step's peak, without activations if they were not counted."""
    parallel = config.parallel
    size = DTYPES[config.model.dtype].itemsize
    here = built[stage]
    experts = here.policy.experts + here.drafter.experts
    rank = kept(config, world, size, here.policy.here + here.drafter.here - experts, experts)
    width = hf_config["hidden_size"]
    replica = 0
    behind_another = stage > 0 and stage == len(built) - 1
    if behind_another and here.drafter.here and not hf_config.get("tie_word_embeddings", False):
        # the drafter's copy of the embedding
        replica = hf_config["vocab_size"] // parallel.tensor * width
    in_flight = len(built) - stage
    one = here.activations or Activations(0, 0)
    activations = (in_flight - 1) * one.held + one.peak
    return replace(rank, weights=rank.weights + size * replica, activations=activations)


def place(rank: int, config: Config, world: int) -> dict[str, int]:
    """Return a rank's coordinates in Megatron's order: tensor varies fastest, then context, data, pipeline.

    `expert` is the rank's number among its stage's context and data ranks, modulo `parallel.expert`.
    """
    parallel = config.parallel
    out: dict[str, int] = {}
    replicas = world // (parallel.tensor * parallel.pipeline * parallel.context)
    for name, size in (
        ("tensor", parallel.tensor),
        ("context", parallel.context),
        ("data", replicas),
    ):
        rank, out[name] = divmod(rank, size)
    expert = (out["context"] + parallel.context * out["data"]) % parallel.expert
    return out | {"expert": expert, "pipeline": rank}


def report(
    config: Config, hf_config: Mapping[str, Any], world: int, gpu_gib: float | None = None
) -> Iterator[str]:
    """Yield the lines that `--dry-run` prints.

    Raises ConfigError if this layout or model cannot be trained, or if a rank needs more than `gpu_gib`.
    """
    parallel = config.parallel
    built = stages(config, hf_config, world, activations=True)
    needed = [memory(config, hf_config, built, stage, world) for stage in range(len(built))]
    if gpu_gib is not None:
        _refuse(needed, gpu_gib)
    policy, drafter = parameters(built, parallel.tensor, parallel.expert)
    replicas = world // (parallel.tensor * parallel.pipeline * parallel.context)
    yield f"{hf_config['architectures'][0]}: {policy:,} parameters, its drafter {drafter:,}"
    yield (
        f"{world} ranks = tensor {parallel.tensor} x context {parallel.context} x data {replicas} x pipeline "
        f"{parallel.pipeline}{', sequence parallel' if parallel.sequence else ''}"
        f"{f', experts split over {parallel.expert} of context x data' if parallel.expert > 1 else ''}"
        f"{', optimizer split over replicas' if config.optimizer.distributed else ''}"
    )
    tokens = config.train.tokens_per_micro_batch
    yield f"memory in GiB; activations: of micro-batches of {tokens:,} tokens; workspaces and fragmentation come on top"
    places = ["tensor", "context", "data", *(["expert"] if parallel.expert > 1 else []), "pipeline"]
    columns = ("rank", *places, "layers", "policy", "drafter")
    parts = ("weights", "gradients", "optimizer", "activations", "total")
    widths = (
        4,
        *(max(4, len(name)) for name in places),
        7,
        14,
        12,
        *(max(9, len(part)) for part in parts),
    )
    yield " ".join(
        f"{name:>{width}}" for name, width in zip((*columns, *parts), widths, strict=True)
    )
    for rank in range(world):
        at = place(rank, config, world)
        here = built[at["pipeline"]]
        needs = needed[at["pipeline"]]
        cells = [
            rank,
            *(at[name] for name in places),
            f"{here.layers.start}-{here.layers.stop - 1}",
        ]
        cells += [f"{here.policy.here:,}", f"{here.drafter.here:,}"]
        cells += [f"{getattr(needs, part) / _GIB:.2f}" for part in parts]
        yield " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    if gpu_gib is not None:
        most = max(needs.total for needs in needed) / _GIB
        yield f"fits: a rank needs at most {most:.2f} of {gpu_gib:g} GiB, without an engine on the same GPU"


def _refuse(needed: list[Bytes], gpu_gib: float) -> None:
    stage = max(range(len(needed)), key=lambda i: needed[i].total)
    most = needed[stage]
    if most.total <= gpu_gib * _GIB:
        return
    parts = ("weights", "gradients", "optimizer", "activations")
    sizes = ", ".join(f"{part} {getattr(most, part) / _GIB:.1f}" for part in parts)
    raise ConfigError(
        f"--gpu-gib {gpu_gib:g}: a rank of pipeline stage {stage} needs {most.total / _GIB:.1f} GiB ({sizes}); "
        "use more ranks, a smaller train.tokens_per_micro_batch, parallel.recompute or optimizer.distributed"
    )


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
        described = replace(transformer_config(hf_config, config), **shapes_only)
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
            _held(table, policy, described),
            _held(table, drafter, described) if drafter is not None else Sizes(),
            repeated,
            of_micro_batch(config, hf_config, policy, drafter) if activations else None,
        )


def _held(table: NameTable, module: nn.Module, config: Any) -> Sizes:
    names = {id(tensor): name for name, tensor in shards.global_names(module, config).items()}
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
    """Make this process one rank of a fake job of `world` ranks; modules are built on the meta device."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "a dry run builds for the CPU: set CUDA_VISIBLE_DEVICES= before torch is imported"
        )
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a process group of its own")
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
        present = torch.cuda.current_device
        torch.cuda.current_device = lambda: _META  # where Megatron's layers put their weights
        try:
            with _META:
                yield
        finally:
            torch.cuda.current_device = present
    finally:
        runtime.shut_down()

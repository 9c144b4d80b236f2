"""`rlspec train --dry-run`: what every rank of a job would hold, told by one process that starts no other.

Policy and drafter are built by the classes that a run builds them by, on the meta device, once per pipeline stage;
torch's fake process group stands in for the other ranks. Nothing is read but config.json.

Memory is what must be there: weights, gradients, optimizer, and the layers' inputs that a backward pass keeps. Other
activations, workspaces of kernels and fragmentation come on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rlspec.config import Config
from megatron_rlspec.train import runtime, shards
from megatron_rlspec.train.drafter import Drafter
from megatron_rlspec.train.model import DTYPES, Policy, rotary_base, transformer_config
from megatron_rlspec.weights.names import Family

_META = torch.device("meta")
_GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """Parameters of one module on one rank. `cut` are a tensor-parallel rank's own, `whole` are on all of them."""

    cut: int = 0
    whole: int = 0

    @property
    def here(self) -> int:
        return self.cut + self.whole


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, the same on all its ranks. `repeated`: parameters that another stage also holds."""

    layers: range
    policy: Sizes
    drafter: Sizes
    repeated: int = 0


@dataclass(frozen=True)
class Bytes:
    """Of one rank."""

    weights: int
    gradients: int
    optimizer: int
    inputs: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.inputs


def stages(config: Config, hf_config: Mapping[str, Any], world: int) -> list[Stage]:
    """Build every stage of a job of `world` ranks. Raises ConfigError where this layout or model is refused."""
    return [_build(config, hf_config, world, stage) for stage in range(config.parallel.pipeline)]


def parameters(built: list[Stage], tensor: int) -> tuple[int, int]:
    """Of policy and drafter, over all stages and tensor-parallel ranks; what several ranks hold counts once."""
    policy = sum(tensor * (s.policy.cut - s.repeated) + s.policy.whole for s in built)
    return policy, sum(tensor * s.drafter.cut + s.drafter.whole for s in built)


def memory(config: Config, hf_config: Mapping[str, Any], built: list[Stage], stage: int, world: int) -> Bytes:
    """What a rank of this stage keeps between steps, and the layer inputs at the height of a step."""
    parallel, dtype = config.parallel, DTYPES[config.model.dtype]
    size, here, last = dtype.itemsize, built[stage], stage == len(built) - 1
    count = here.policy.here + here.drafter.here
    replicas = world // (parallel.tensor * parallel.pipeline)  # data and context ranks share one optimizer
    exact = max(size, 4)
    state = 2 * exact + (4 if size < 4 else 0)  # two moments, and a float32 copy of shorter weights
    width = hf_config["hidden_size"]
    replica = 0
    if last and stage and here.drafter.here and not hf_config.get("tie_word_embeddings", False):
        replica = hf_config["vocab_size"] // parallel.tensor * width  # of the embedding, for the drafter
    split = parallel.context * (parallel.tensor if parallel.sequence else 1)
    tokens = config.train.tokens_per_micro_batch // split
    in_flight = len(built) - stage
    return Bytes(
        weights=size * (count + replica),
        gradients=exact * count,
        optimizer=state * count // (replicas if config.optimizer.distributed else 1),
        inputs=size * in_flight * len(here.layers) * tokens * width,
    )


def place(rank: int, config: Config, world: int) -> dict[str, int]:
    """Where Megatron puts a rank: tensor varies fastest, then context, data, pipeline."""
    parallel, out = config.parallel, {}
    replicas = world // (parallel.tensor * parallel.pipeline * parallel.context)
    for name, size in (("tensor", parallel.tensor), ("context", parallel.context), ("data", replicas)):
        rank, out[name] = divmod(rank, size)
    return out | {"pipeline": rank}


def report(config: Config, hf_config: Mapping[str, Any], world: int) -> Iterator[str]:
    """The lines that `--dry-run` prints. Raises ConfigError where this layout or model is refused."""
    parallel, built = config.parallel, stages(config, hf_config, world)
    policy, drafter = parameters(built, parallel.tensor)
    replicas = world // (parallel.tensor * parallel.pipeline * parallel.context)
    yield f"{hf_config['architectures'][0]}: {policy:,} parameters, its drafter {drafter:,}"
    yield (
        f"{world} ranks = tensor {parallel.tensor} x context {parallel.context} x data {replicas} x pipeline "
        f"{parallel.pipeline}{', sequence parallel' if parallel.sequence else ''}"
        f"{', optimizer cut over replicas' if config.optimizer.distributed else ''}"
    )
    yield "memory in GiB: inputs are the layers' only; other activations and workspaces come on top"
    columns = ("rank", "tensor", "context", "data", "pipeline", "layers", "policy", "drafter")
    parts = ("weights", "gradients", "optimizer", "inputs", "total")
    widths = (4, 6, 7, 4, 8, 7, 14, 12, *(9 for _ in parts))
    yield " ".join(f"{name:>{width}}" for name, width in zip((*columns, *parts), widths, strict=True))
    for rank in range(world):
        at = place(rank, config, world)
        here, needs = built[at["pipeline"]], memory(config, hf_config, built, at["pipeline"], world)
        cells = [rank, *(at[name] for name in columns[1:5]), f"{here.layers.start}-{here.layers.stop - 1}"]
        cells += [f"{here.policy.here:,}", f"{here.drafter.here:,}"]
        cells += [f"{getattr(needs, part) / _GIB:.2f}" for part in parts]
        yield " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _build(config: Config, hf_config: Mapping[str, Any], world: int, stage: int) -> Stage:
    parallel, options = config.parallel, config.drafter
    with _alone(config, world, rank=stage * world // parallel.pipeline):
        described = replace(
            transformer_config(hf_config, config), use_cpu_initialization=False, perform_initialization=False
        )
        table = shards.family(hf_config, 1 if options.repeated_layer else options.depth)
        policy = Policy(described, hf_config, config.model.max_length)
        each = described.num_layers // parallel.pipeline
        drafter = Sizes()
        if options.train and stage == parallel.pipeline - 1:
            drafter = _held(
                table,
                Drafter(
                    described,
                    depth=options.depth,
                    repeated_layer=options.repeated_layer,
                    zero_first_embedding=False,
                    rotary_base=rotary_base(hf_config),
                    seed=config.train.seed,
                ),
                described,
            )
        tied = stage and stage == parallel.pipeline - 1 and policy.share_embeddings_and_output_weights
        repeated = policy.head_weight().numel() if tied else 0
        return Stage(range(stage * each, (stage + 1) * each), _held(table, policy, described), drafter, repeated)


def _held(table: Family, module: nn.Module, config: Any) -> Sizes:
    names = {id(tensor): name for name, tensor in shards.global_names(module, config).items()}
    sizes = {True: 0, False: 0}
    for parameter in module.parameters():
        sizes[table.row(names[id(parameter)]).cut.dim is not None] += parameter.numel()
    return Sizes(sizes[True], sizes[False])


@contextmanager
def _alone(config: Config, world: int, rank: int) -> Iterator[None]:
    """This process as one rank of a job that has no others, building on the meta device."""
    if torch.cuda.is_available():
        raise RuntimeError("a dry run builds for the CPU: hide the GPUs before torch is imported")
    if dist.is_initialized():
        raise RuntimeError("a dry run cannot be made inside a job")
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

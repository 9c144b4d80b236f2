"""Load full Hugging Face tensors into this job's shards, and gather the shards to full tensors.

`Trainer.load_hf` and `Trainer.export` (`step.py`), `cotrainer/` and the integration with slime call it. No file is read
or written here.

The names of tensors, and how each is cut over tensor-parallel ranks, are in the name table (`models/names.py`). This
module knows which rank holds which layers and experts. `export` and `gather_tensors` are collective over Megatron's
process groups; the other functions only ask these groups for this rank's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.models.names import EXPERT, LAYER, NameTable, canonical, later, name_table
from megatron_rlspec.train import experts, runtime
from megatron_rlspec.types import Scope


def job_name_table(hf_config: Mapping[str, Any]) -> NameTable:
    """Return the name table of the policy and of its drafter: one MTP layer, or an EAGLE-3 drafter.

    It fits the layer specs that `layer_specs.py` chooses on this machine.
    """
    spec: Literal["te", "local"] = "te" if runtime.has_transformer_engine() else "local"
    # A checkpoint may have more MTP layers, or none. The job trains one, or an EAGLE-3 drafter in its place.
    layers = 0 if DRAFTER in hf_config else 1
    return name_table({**hf_config, "num_nextn_predict_layers": layers}, spec=spec)


def global_name(name: str, config: TransformerConfig) -> str:
    """Return the canonical name of this rank's parameter `name`, with global layer and expert numbers.

    Megatron numbers the layers of each pipeline stage, and the experts of each rank, from 0.
    """
    offset = get_transformer_layer_offset(config)
    first_expert = ps.get_expert_model_parallel_rank() * _experts_of_a_rank(config)
    name = later(LAYER, canonical(name), offset)
    return later(EXPERT, name, first_expert)


def global_names(module: nn.Module, config: TransformerConfig) -> dict[str, Tensor]:
    """Return this rank's parameters and router biases by `global_name`: the tensors themselves, not copies."""
    tensors = dict(module.named_parameters()) | experts.biases(module)
    return {global_name(name, config): tensor for name, tensor in tensors.items()}


def load(
    table: NameTable,
    modules: list[nn.Module],
    config: TransformerConfig,
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy every tensor that this rank holds a shard of into `modules`, cast to its type. It does not communicate.

    modules  policy, drafter or both; their names differ
    config   Megatron's, of the policy, also for a drafter's module
    tensors  full ones, under Hugging Face names

    Raises CheckpointError if `tensors` lacks a tensor, before any is copied; or at the first one of another shape, when
    earlier ones are copied already. Optimizers keep their old float32 copies: call their `reload_model_params`.
    """
    parameters: dict[str, Tensor] = {}
    for module in modules:
        parameters |= global_names(module, config)
    rank = ps.get_tensor_model_parallel_rank()
    size = ps.get_tensor_model_parallel_world_size()
    missing = [hf for name in parameters for hf in table.row(name).hf if hf not in tensors]
    if missing:
        message = f"the checkpoint has no {missing[0]}"
        if len(missing) > 1:
            message += f" and {len(missing) - 1} more"
        if missing[0] in table.drafter_names:
            message += "; the drafter can also be initialised fresh"
        raise CheckpointError(message)
    for name, parameter in parameters.items():
        row = table.row(name)
        try:
            whole = row.layout.fuse([tensors[hf] for hf in row.hf])
        except CheckpointError as error:
            raise CheckpointError(f"{row.hf[0]}: {error}") from None
        shard = table.shard(name, whole, rank, size)
        if shard.shape != parameter.shape:
            raise CheckpointError(
                f"{row.hf[0]} makes {name} {list(shard.shape)}, but config.json promises {list(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(shard)


def export(
    table: NameTable,
    policy: nn.Module,
    drafter: nn.Module | None,
    config: TransformerConfig,
    scope: Scope = "all",
    live: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors under Hugging Face names, on rank 0; other ranks yield nothing.

    The iterator communicates: every rank must call this with the same `scope`, and exhaust the iterator. No weight may
    change meanwhile.

    drafter  None on all but the last pipeline stage
    config   Megatron's, of the policy
    scope    "target" is the policy only, "drafter" the drafter only
    live     yield tensors on this rank's device that may be parameters: read them before the next step. False: copies
             on the CPU
    """
    # One replica of the experts takes part; without expert parallelism that is one replica of everything. The other
    # ranks form whole process groups, so no collective below waits for them. Rank 0 is in the replica that takes part.
    if ps.get_expert_data_parallel_rank() != 0:
        return
    stages = ps.get_pipeline_model_parallel_world_size()
    for stage in range(stages):
        shards: dict[str, Tensor] = {}
        if stage == ps.get_pipeline_model_parallel_rank():
            if scope != "drafter":
                shards |= global_names(policy, config)
            if scope != "target" and drafter is not None:
                shards |= global_names(drafter, config)
        for name, parts in _gathered(shards, stage, config, runtime.device()):
            if dist.get_rank() != 0:
                continue
            for hf, tensor in table.to_hf(name, table.unshard(name, parts)):
                # An unsharded tensor can be the parameter itself, which the next step changes.
                if not live:
                    tensor = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
                yield hf, tensor.contiguous()


def gather_tensors(
    table: NameTable, shards: Mapping[str, Tensor], config: TransformerConfig, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors under Hugging Face names on `device`, on every rank. Collective over each replica's ranks.

    The iterator communicates, so every rank must exhaust it.

    shards  this rank's, by `global_name`, on any device, of a module of the last pipeline stage; empty on other stages
    """
    last = ps.get_pipeline_model_parallel_world_size() - 1
    for name, parts in _gathered(shards, last, config, device):
        for hf, tensor in table.to_hf(name, table.unshard(name, parts)):
            yield hf, tensor.contiguous()


def _gathered(
    shards: Mapping[str, Tensor], stage: int, config: TransformerConfig, device: torch.device
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield (global name, shards of all tensor-parallel ranks in rank order) of each tensor of a stage, on every rank.

    Collective over the pipeline's, tensor- and expert-parallel ranks.

    shards  this rank's, by global name, if it is one of the stage; else empty

    All ranks of a stage must have the same names in the same order, up to the numbers of experts: they gather tensor by
    tensor. An expert's name stands for the experts at the same local index on all expert-parallel ranks.
    """
    pipeline = ps.get_pipeline_model_parallel_group()
    source = dist.get_process_group_ranks(pipeline)[stage]
    size = ps.get_tensor_model_parallel_world_size()
    # The ranks of other stages need names, shapes and types before they can receive.
    described: list[Any] = [[(name, x.shape, x.dtype) for name, x in shards.items()]]
    if pipeline.size() > 1:
        dist.broadcast_object_list(described, src=source, group=pipeline)
    for name, shape, dtype in described[0]:
        if name in shards:
            shard = shards[name].detach().to(device).contiguous()
        else:
            shard = torch.empty(shape, dtype=dtype, device=device)
        if pipeline.size() > 1:
            dist.broadcast(shard, src=source, group=pipeline)
        # The group that gathers an expert has the expert-parallel ranks, too. In its order, the tensor-parallel ranks
        # of one expert-parallel rank are neighbours: hence the slices below.
        names = _names_on_all_ranks(name, config)
        group = ps.get_tensor_model_parallel_group()
        if len(names) > 1:
            group = ps.get_expert_tensor_and_model_parallel_group()
        parts = [shard]
        if group.size() > 1:
            parts = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(parts, shard, group=group)
        for i, name_on_rank in enumerate(names):
            yield name_on_rank, parts[i * size : (i + 1) * size]


def _names_on_all_ranks(name: str, config: TransformerConfig) -> list[str]:
    """Return, for the expert `name` of this rank, the names on all expert-parallel ranks at the same local index.

    For a tensor that is not an expert's, return [name]: all these ranks hold the same one.
    """
    size = ps.get_expert_model_parallel_world_size()
    if size == 1 or not EXPERT.search(name):
        return [name]
    this_rank = ps.get_expert_model_parallel_rank()
    per_rank = _experts_of_a_rank(config)
    return [later(EXPERT, name, (rank - this_rank) * per_rank) for rank in range(size)]


def _experts_of_a_rank(config: TransformerConfig) -> int:
    """Return the number of routed experts of a layer that each expert-parallel rank holds; 0 for a dense model."""
    return (config.num_moe_experts or 0) // ps.get_expert_model_parallel_world_size()

"""Converted checkpoints in megatron-core's own loader, on four ranks, in every layout: shards, logits, and back."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe_oracles import CONFIGS, IDS, OPTIONS, made
from train_ranks import on_ranks
from weight_oracles import megatron_logits, megatron_model, spelling
from whole_tensors import to_megatron

from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.conversion.torch_dist import TorchDistReader, checkpoint_directory
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.models.names import canonical, name_table


def sharded(network):
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    return network.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group({}))


def in_layout(config, tensors, expected, source: Path, target: Path, tensor: int, pipeline: int, expert: int):
    """Run one rank: load by megatron, compare with our shards and with Transformers' logits, save by megatron."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, expert=expert)
    network = megatron_model(config, parallel, **OPTIONS.get(config["architectures"][0], {}))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(float("nan"))
    state = dist_checkpointing.load({"model": sharded(network)}, str(checkpoint_directory(source)))
    network.load_state_dict(state["model"], strict=False)

    family = name_table(config, spec=spelling())
    full = {canonical(name): tensor for name, tensor in to_megatron(family, tensors)}
    first_layer = get_transformer_layer_offset(network.config)
    experts = (network.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in network.named_parameters():
        parts = canonical(name).split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(int(parts[2]) + first_layer)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + experts * parallel_state.get_expert_model_parallel_rank())
        renumbered = ".".join(parts)
        ours = family.shard(renumbered, full[renumbered], rank, tensor)
        assert torch.equal(parameter, ours), renumbered
    found = megatron_logits(network, IDS, zero_first=family.name == "MiMoForCausalLM")
    if found is not None:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    if dist.get_rank() == 0:
        target.mkdir()
    dist.barrier()
    # One writing thread: more would be processes, each of which imports the test again.
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save({"model": sharded(network)}, str(target), strategy)
    parallel_state.destroy_model_parallel()


def in_layouts(config, tensors, expected, directory: Path, layouts):
    torch.set_num_threads(1)
    for layout in layouts:
        in_layout(config, tensors, expected, directory / "megatron", directory / f"saved-{layout}", *layout)


def prove(model: str, directory: Path, layouts) -> None:
    config, tensors, expected = made(model, directory)
    write_hf(directory / "hf", config, {name: tensor.clone() for name, tensor in tensors.items()})
    convert(plan(directory / "hf", directory / "megatron", spec=spelling()))
    on_ranks(4, in_layouts, config, tensors, expected, directory, layouts)
    family = name_table(config)
    for layout in layouts:
        reader = TorchDistReader(directory / f"saved-{layout}", family)
        for name, full in to_megatron(family, tensors):
            if name in family.rows:
                assert torch.equal(reader[name], full), (layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("model", CONFIGS)
def test_every_layout(model, tmp_path):
    """Test TP 1 and 2 × PP 1 and 2, and EP 2 with experts. What megatron saves in each layout is read again."""
    # megatron-core 0.16.1 cannot describe a tied head beside an MTP layer on a later pipeline stage (it asserts).
    pipelines = (1,) if model == "tied" else (1, 2)
    layouts = [(tensor, pipeline, 1) for tensor in (1, 2) for pipeline in pipelines]
    if CONFIGS[model].get("n_routed_experts"):
        layouts += [(1, 1, 2), (1, 2, 2), (2, 1, 2)]  # TP 2 × PP 2 × EP 2 would need eight ranks
    prove(model, tmp_path, layouts)

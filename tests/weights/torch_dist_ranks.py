"""megatron-core's own save and load of the torch_dist format, in this process or as one rank of several."""

from __future__ import annotations

from pathlib import Path

import torch


def sharded(network: torch.nn.Module) -> dict:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    return network.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group({}))


def load(network: torch.nn.Module, directory: Path) -> None:
    """Every tensor of the network must come from the checkpoint; loading is strict about missing ones."""
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(float("nan"))
    state = dist_checkpointing.load({"model": sharded(network)}, str(directory))
    network.load_state_dict(state["model"], strict=False)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in network.parameters())


def save(network: torch.nn.Module, directory: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    directory.mkdir(exist_ok=True)
    # One writing thread: more would be processes, each of which imports the test again.
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save({"model": sharded(network)}, str(directory), strategy)

"""Resume files: everything a step depends on, bit for bit, for the same layout of ranks.

One safetensors file per distinct shard, and one small JSON that says which layout they belong to. Another layout, dtype
or drafter starts from the exported Hugging Face weights instead. Megatron's own format would reshard, but keeps what
only the last stage knows (the drafter's optimizer) in a file that only rank 0 writes, needs pickle, and gives all
parameters one shared `step` on loading, which AdamW then advances once per parameter (0.16.1).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rlspec.train import experts
from megatron_rlspec.train.optimizer import Learner
from megatron_rlspec.weights.checkpoint import CheckpointError, read_json

LAYOUT = "layout.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save(
    directory: Path, learners: Mapping[str, Learner], layout: Mapping[str, Any], *, generators: bool = True
) -> None:
    """Write `directory` whole or not at all; collective. An older one of that name is replaced.

    `learners` are this rank's, by name; `layout` is what must be equal when loading. Random `generators` are left out
    where somebody else keeps them.
    """
    directory = Path(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    for name, learner in learners.items():
        if _writes(learner):
            save_file(
                {key: t.detach().cpu().clone() for key, t in _tensors(learner).items()}, _file(partial, name, learner)
            )
    if generators and ps.get_data_parallel_rank(with_context_parallel=True) == 0:
        save_file(_generators(), partial / f"generators{_shard()}.safetensors")
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / LAYOUT).write_text(json.dumps(dict(layout), indent=1))
        if directory.exists():
            old = directory.with_name(f".{directory.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(directory, old)
            os.replace(partial, directory)
            shutil.rmtree(old)
        else:
            os.replace(partial, directory)
    dist.barrier()


def load(
    directory: Path, learners: Mapping[str, Learner], layout: Mapping[str, Any], *, generators: bool = True
) -> None:
    """Restore what `save` wrote. Raises CheckpointError: what cannot be read, or the first difference of the layout."""
    directory = Path(directory)
    if not (directory / LAYOUT).exists():
        raise CheckpointError(f"{directory} is no checkpoint: it has no {LAYOUT}")
    written = read_json(directory / LAYOUT)
    for key, value in layout.items():
        if written.get(key) != value:
            raise CheckpointError(
                f"{directory} was written with {key}={written.get(key)}, but this run has {value}: "
                "resume with the same layout, or start from exported weights"
            )
    for name, learner in learners.items():
        with _open(_file(directory, name, learner)) as file, torch.no_grad():
            learner.steps = int(file.get_tensor("steps"))
            _create_moments(learner)
            for key, tensor in _tensors(learner).items():
                tensor.copy_(file.get_tensor(key))
    if not generators:
        return
    with _open(directory / f"generators{_shard()}.safetensors") as file:
        torch.set_rng_state(file.get_tensor("cpu"))
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(file.get_tensor("cuda"))
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.set_states({name: file.get_tensor(f"tracker.{name}") for name in tracker.get_states()})


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"{file}: missing or truncated ({error}); remove {file.parent.name} to go on") from None


def _tensors(learner: Learner) -> dict[str, Tensor]:
    """Every tensor of a learner by name: parameters, routers' biases, the optimizer's copies, moments, step count."""
    module = learner.ddp.module
    out = {f"parameter.{name}": parameter.data for name, parameter in module.named_parameters()}
    out |= {f"bias.{name}": bias for name, bias in experts.biases(module).items()}
    for key, parameter, state in _optimized(learner):
        out[f"main.{key}"] = parameter.data
        out |= {f"{moment}.{key}": state[moment] for moment in _MOMENTS if moment in state}
    return out | {"steps": torch.tensor(learner.steps)}


def _optimized(learner: Learner) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """What the inner optimizer updates: shards or copies of parameters, in an order that the layout fixes."""
    inner = learner.optimizer.optimizer
    for g, group in enumerate(inner.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield f"{g}.{i}", parameter, inner.state[parameter]


def _create_moments(learner: Learner) -> None:
    """Give every parameter a state to load into, or none before the first step.

    torch's AdamW counts steps there, the fused ones in the group.
    """
    if not learner.steps:
        learner.optimizer.optimizer.state.clear()
        return
    counts_in_state = isinstance(learner.optimizer.optimizer, torch.optim.AdamW)
    for _, parameter, state in _optimized(learner):
        if not state:
            state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            if counts_in_state:
                state["step"] = torch.tensor(0.0)
    if not counts_in_state:
        for group in learner.optimizer.param_groups:
            group["step"] = learner.steps


def _generators() -> dict[str, Tensor]:
    states = {f"tracker.{k}": v for k, v in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.clone() for name, state in states.items()}


def _writes(learner: Learner) -> bool:
    """Whether this rank's file is its own: replicas write one, unless the optimizer is cut over them."""
    return learner.adam.distributed or ps.get_data_parallel_rank(with_context_parallel=True) == 0


def _shard() -> str:
    return f"-tensor{ps.get_tensor_model_parallel_rank()}-pipeline{ps.get_pipeline_model_parallel_rank()}"


def _file(directory: Path, name: str, learner: Learner) -> Path:
    replica = f"-replica{ps.get_data_parallel_rank(with_context_parallel=True)}" if learner.adam.distributed else ""
    return directory / f"{name}{_shard()}{replica}.safetensors"

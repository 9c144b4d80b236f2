"""Save and load what one optimizer step depends on, bit for bit, for the same layout of ranks.

A checkpoint is a directory: one safetensors file per distinct shard, and `layout.json`, which names the layout. Under
expert parallelism experts are sharded in their own way, so they have files of their own, one per shard. Every tensor
has a checksum in its file, compared on loading. Another layout, dtype or drafter starts from the exported
Hugging Face weights instead. Megatron's own format would reshard. But it keeps the drafter's optimizer, which only the
last pipeline stage has, in a file that only rank 0 writes; it needs pickle; and on loading it gives all parameters one
shared `step`, which AdamW then advances once per parameter (0.16.1).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_rlspec import files
from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.headers import read_object
from megatron_rlspec.models.hf_files import CheckpointError, publish
from megatron_rlspec.models.tensor_file import TensorFile
from megatron_rlspec.train import experts, runtime
from megatron_rlspec.train.optimizer import Learner, Part

LAYOUT = "layout.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class SaveError(RuntimeError):
    """A checkpoint could not be written. One line: which file, and why. Nothing of it is left."""

    exit_code = 1


def save(
    directory: Path,
    learners: Mapping[str, Learner],
    layout: Mapping[str, Any],
    *,
    generators: bool = True,
) -> None:
    """Write `directory` whole or not at all; an older one of that name is replaced. Collective.

    `learners` are this rank's, by name. `layout` must be equal when loading. `generators=False` leaves out random
    states, for a caller that saves them elsewhere. Raises SaveError on every rank if one cannot write.
    """
    directory = Path(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    main = dist.get_rank() == 0

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def write() -> None:
        for name, learner in learners.items():
            for part in learner.parts:
                first_replica = part.replicas.rank() == 0
                if not (learner.adam.distributed or first_replica):
                    continue
                tensors = _tensors(learner, part)
                copies = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
                tensor_file.save(copies, _file(partial, name, learner, part))
        if generators and ps.get_expert_data_parallel_rank() == 0:
            tensor_file.save(_generators(), _generators_file(partial))

    def finish() -> None:
        files.write(partial / LAYOUT, json.dumps(dict(layout), indent=1))
        publish(partial, directory, replace=True)

    error = on_all_ranks(begin, main) or on_all_ranks(write) or on_all_ranks(finish, main)
    if error:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(error)


def on_all_ranks(act: Callable[[], object], here: bool = True) -> str:
    """Run `act` on the ranks with `here`, wait for all, and return the first rank's OSError; "" if there is none."""
    error = ""
    try:
        if here:
            act()
    except OSError as problem:
        error = f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem)
    return runtime.first_message(error)


def load(
    directory: Path,
    learners: Mapping[str, Learner],
    layout: Mapping[str, Any],
    *,
    generators: bool = True,
) -> None:
    """Restore what `save` wrote. Collective.

    Raises CheckpointError on every rank if one finds a file or tensor missing or damaged, or another layout. The
    learners must not be used after that.
    """
    directory = Path(directory)
    error = ""
    advice = ""
    try:
        _check_layout(directory, layout)
        advice = f"; remove {directory} to go on without it"
        for name, learner in learners.items():
            for part in learner.parts:
                _load_part(_file(directory, name, learner, part), learner, part)
        if generators:
            _load_generators(_generators_file(directory))
    except CheckpointError as problem:
        error = f"{problem}{advice}"
    error = runtime.first_message(error)
    if error:
        raise CheckpointError(error)


def _check_layout(directory: Path, layout: Mapping[str, Any]) -> None:
    if not (directory / LAYOUT).exists():
        raise CheckpointError(f"{directory} is no checkpoint: it has no {LAYOUT}")
    written = read_object(directory / LAYOUT)
    for key, value in layout.items():
        if written.get(key) != value:
            raise CheckpointError(
                f"{directory} was written with {key}={written.get(key)}, but this run has {value}: "
                "resume with the same layout, or start from exported weights"
            )


def _load_part(path: Path, learner: Learner, part: Part) -> None:
    with TensorFile(path) as file, torch.no_grad():
        learner.steps = int(_stored(file, "steps", torch.tensor(0)))
        _create_moments(part, learner.steps)
        tensors = _tensors(learner, part)
        for name in file:
            if name not in tensors:
                raise CheckpointError(f"{path}: has {name}, which this run does not")
        for name, tensor in tensors.items():
            tensor.copy_(_stored(file, name, tensor))


def _create_moments(part: Part, updates: int) -> None:
    """Create the optimizer state to load into: one for every parameter; none if there was no update yet.

    torch's AdamW counts updates in that state, the fused ones count them in the group.
    """
    if not part.groups:
        return
    inner = part.optimizer.optimizer
    if not updates:
        inner.state.clear()
        for group in part.groups:
            group.pop("step", None)
        return
    part.optimizer.init_state_fn(inner)
    if isinstance(inner, torch.optim.AdamW):
        for state in inner.state.values():
            state["step"] = torch.tensor(float(updates))
    else:
        for group in part.groups:
            group["step"] = updates


def _load_generators(path: Path) -> None:
    with TensorFile(path) as file:
        torch.set_rng_state(_stored(file, "cpu", torch.get_rng_state()))
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(_stored(file, "cuda", torch.cuda.get_rng_state()))
        tracker = tensor_parallel.get_cuda_rng_tracker()
        states = {}
        for name, state in tracker.get_states().items():
            states[name] = _stored(file, f"tracker.{name}", state)
        tracker.set_states(states)


def _stored(file: TensorFile, name: str, like: Tensor) -> Tensor:
    """Read a tensor. Raises CheckpointError if it is missing or damaged, or has not the dtype and shape of `like`."""
    tensor = file[name]
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        raise CheckpointError(
            f"{file.path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {like.dtype} {list(like.shape)}"
        )
    return tensor


def _tensors(learner: Learner, part: Part) -> dict[str, Tensor]:
    """Name every tensor of a part: parameters, the optimizer's copies, moments, step count; routers' biases."""
    module = learner.ddp.module
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if part.holds(parameter):
            tensors[f"parameter.{name}"] = parameter.data
    if not part.experts:
        for name, bias in experts.biases(module).items():
            tensors[f"bias.{name}"] = bias
    # What the inner optimizer updates: shards or copies of parameters, in an order that the layout fixes.
    for g, group in enumerate(part.groups):
        for i, parameter in enumerate(group["params"]):
            tensors[f"main.{g}.{i}"] = parameter.data
            state = part.optimizer.optimizer.state[parameter]
            for moment in _MOMENTS:
                if moment in state:
                    tensors[f"{moment}.{g}.{i}"] = state[moment]
    tensors["steps"] = torch.tensor(learner.steps)
    return tensors


def _generators() -> dict[str, Tensor]:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = {f"tracker.{name}": state for name, state in tracker.get_states().items()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.clone() for name, state in states.items()}


def _file(directory: Path, name: str, learner: Learner, part: Part) -> Path:
    replica = f"-replica{part.replicas.rank()}" if learner.adam.distributed else ""
    shard = f"-tensor{ps.get_tensor_model_parallel_rank()}"
    if part.experts:
        shard = f"-experts{_expert_shard()}"
    return directory / f"{name}{shard}{_stage()}{replica}.safetensors"


def _generators_file(directory: Path) -> Path:
    """Return the file of this rank's generators. One of Megatron's differs between expert-parallel ranks."""
    shard = f"-tensor{ps.get_tensor_model_parallel_rank()}"
    if ps.get_expert_model_parallel_world_size() > 1:
        shard = _expert_shard()
    return directory / f"generators{shard}{_stage()}.safetensors"


def _expert_shard() -> str:
    return (
        f"-tensor{ps.get_expert_tensor_parallel_rank()}-expert{ps.get_expert_model_parallel_rank()}"
    )


def _stage() -> str:
    return f"-pipeline{ps.get_pipeline_model_parallel_rank()}"

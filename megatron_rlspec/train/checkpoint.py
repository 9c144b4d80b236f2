"""Save and load what one optimizer step depends on, bit for bit, for the same layout of ranks.

`Trainer.save` and `load` (`step.py`), `cotrainer/cotrainer.py` and the integration with slime call it. When to save,
and the state of the run beside a checkpoint, are decided in `run/checkpoints.py`.

A checkpoint is a directory: one safetensors file per distinct shard, and `layout.json`, which names the layout. Under
expert parallelism experts are sharded in their own way, so they have files of their own, one per shard. Every tensor
has a checksum in its file, compared on loading. A run with another layout, dtype or drafter cannot load a checkpoint;
it starts from exported Hugging Face weights. `conversion/run_checkpoint.py` reads the files, too: it parses their
names, the names of tensors in them and `layout.json`.

Megatron's own format could be loaded into another layout. It is not used for three reasons (0.16.1). It keeps the
drafter's optimizer, which only the last pipeline stage has, in a file that only rank 0 writes. It needs pickle. On
loading it gives all parameters one shared `step`, which AdamW then advances once per parameter.
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
# Keys of AdamW's state of one parameter; fused optimizers have no "step" there. They are parts of names in the files.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class SaveError(RuntimeError):
    """A checkpoint could not be written. One line: which file, and why. Nothing of it is left."""

    exit_code = 1  # of the command (`cli.py`)


def save(
    directory: Path,
    learners: Mapping[str, Learner],
    layout: Mapping[str, Any],
    *,
    generators: bool = True,
) -> None:
    """Write `directory` whole or not at all; an older one of that name is replaced. Collective.

    learners    this rank's, by name, which file names begin with
    layout      JSON values, equal on all ranks; rank 0 writes its own. `load` compares the keys that it is given
    generators  False: leave out random states, for a caller that saves them elsewhere

    Call it between steps, on all ranks, which must share the file system. Raises SaveError on every rank if one cannot
    write.
    """
    directory = Path(directory)
    partial = directory.with_name(f".{directory.name}.partial")  # all ranks share the file system
    is_first_rank = dist.get_rank() == 0

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def write() -> None:
        for name, learner in learners.items():
            for part in learner.parts:
                # Replicas hold the same tensors, unless a distributed optimizer splits its state over them.
                first_replica = part.replicas.rank() == 0
                if not (learner.adam.distributed or first_replica):
                    continue
                tensors = _named_tensors(learner, part)
                # Clones, because parameters can be views of one buffer, and safetensors writes no shared storage.
                copies = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
                tensor_file.save(copies, _shard_file(partial, name, learner, part))
        if generators and ps.get_expert_data_parallel_rank() == 0:
            tensor_file.save(_generator_states(), _generators_file(partial))

    def finish() -> None:
        files.write(partial / LAYOUT, json.dumps(dict(layout), indent=1))
        publish(partial, directory, replace=True)

    # Each call waits for all ranks and returns the same text on all. So no rank writes before the directory is there,
    # it is published only when all files are complete, and after an error all ranks skip the later calls.
    error = (
        on_all_ranks(begin, is_first_rank)
        or on_all_ranks(write)
        or on_all_ranks(finish, is_first_rank)
    )
    if error:
        if is_first_rank:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(error)


def on_all_ranks(act: Callable[[], object], runs_here: bool = True) -> str:
    """Run `act` on the ranks with `runs_here`, wait for all, and return the first rank's OSError; "" if there is none.

    Collective: ranks without `runs_here` must call it, too. Any other error than an OSError is raised on its own rank
    only, and the other ranks then wait until their timeout.
    """
    error = ""
    try:
        if runs_here:
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
    """Restore what `save` wrote; the names of `learners` must be those of `save`. Collective.

    Raises CheckpointError on every rank if one finds a file or tensor missing or damaged, or another layout. The
    learners must not be used after that: some of their tensors are loaded, and others are not.
    """
    directory = Path(directory)
    error = ""
    advice = ""
    try:
        _check_layout(directory, layout)  # before `advice`: this message has an advice of its own
        advice = f"; remove {directory} to go on without it"
        for name, learner in learners.items():
            for part in learner.parts:
                _load_part(_shard_file(directory, name, learner, part), learner, part)
        if generators:
            _load_generators(_generators_file(directory))
    except CheckpointError as problem:
        error = f"{problem}{advice}"
    # An error is raised only after this exchange: a rank that raised earlier would leave the others waiting here.
    error = runtime.first_message(error)
    if error:
        raise CheckpointError(error)


def _check_layout(directory: Path, layout: Mapping[str, Any]) -> None:
    """Raise CheckpointError if `directory` is no checkpoint, or its layout differs in a key of `layout`."""
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
    """Copy a file's tensors into a part, in place; the file and the part must have the same names.

    All parts of a learner have the same `steps`, of which each file has a copy.
    """
    with TensorFile(path) as file, torch.no_grad():
        # `_create_moments` comes before `_named_tensors`, which names only moments that exist.
        learner.steps = int(_stored(file, "steps", torch.tensor(0)))
        _create_moments(part, learner.steps)
        tensors = _named_tensors(learner, part)
        for name in file:
            if name not in tensors:
                raise CheckpointError(f"{path}: has {name}, which this run does not")
        for name, tensor in tensors.items():
            tensor.copy_(_stored(file, name, tensor))


def _create_moments(part: Part, updates: int) -> None:
    """Create the optimizer state to load into, for every parameter; remove it if `updates` is 0.

    torch's AdamW counts updates in the state of each parameter, the fused ones (of Apex and Transformer Engine) in the
    group. The count is set here; the other moments are loaded afterwards.
    """
    if not part.groups:  # a stage without experts
        return
    inner = part.optimizer.optimizer  # below Megatron's optimizer
    if not updates:
        # As in an optimizer that has made no update: its first update creates the state.
        inner.state.clear()
        for group in part.groups:
            group.pop("step", None)
        return
    part.optimizer.init_state_fn(inner)
    if isinstance(inner, torch.optim.AdamW):
        # A tensor of its own for each parameter: AdamW counts up in place, so a shared one would count once per
        # parameter.
        for state in inner.state.values():
            state["step"] = torch.tensor(float(updates))
    else:
        for group in part.groups:
            group["step"] = updates


def _load_generators(path: Path) -> None:
    """Restore what `_generator_states` returned: torch's generators, and Megatron's of tensor-parallel regions."""
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


def _named_tensors(learner: Learner, part: Part) -> dict[str, Tensor]:
    """Return every tensor of a part by its name in the file: parameters, the optimizer's copies, moments, step count.

    The part that is not of experts also has the routers' biases. All but "steps" are the tensors themselves, not
    copies: `_load_part` writes into them. The names are the file format. `conversion/run_checkpoint.py` reads
    "parameter." and "bias.".
    """
    module = learner.ddp.module
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if part.holds(parameter):
            tensors[f"parameter.{name}"] = parameter.data
    if not part.experts:
        for name, bias in experts.biases(module).items():
            tensors[f"bias.{name}"] = bias
    # The inner optimizer updates shards or float32 copies of parameters, which have no names. Their numbers in the
    # optimizer's groups are the same in every job of the same layout, so the numbers serve as names.
    for g, group in enumerate(part.groups):
        for i, parameter in enumerate(group["params"]):
            tensors[f"main.{g}.{i}"] = parameter.data
            state = part.optimizer.optimizer.state[parameter]
            for moment in _MOMENTS:
                if moment in state:
                    tensors[f"{moment}.{g}.{i}"] = state[moment]
    # A new tensor: copying into it changes no learner. So `_load_part` sets `learner.steps` itself.
    tensors["steps"] = torch.tensor(learner.steps)
    return tensors


def _generator_states() -> dict[str, Tensor]:
    """Return copies of the states of all random generators of this rank, by their names in the file."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = {f"tracker.{name}": state for name, state in tracker.get_states().items()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.clone() for name, state in states.items()}


def _shard_file(directory: Path, name: str, learner: Learner, part: Part) -> Path:
    """Return the file of this rank's shard of a part; `name` is the learner's. Equal replicas share one file.

    `conversion/run_checkpoint.py` parses the file's name.
    """
    replica = f"-replica{part.replicas.rank()}" if learner.adam.distributed else ""
    shard = f"-tensor{ps.get_tensor_model_parallel_rank()}"
    if part.experts:
        shard = f"-experts{_expert_shard()}"
    return directory / f"{name}{shard}{_stage()}{replica}.safetensors"


def _generators_file(directory: Path) -> Path:
    """Return the file of this rank's generators. One of Megatron's generators differs between expert-parallel ranks.

    Ranks that differ only in their expert-data-parallel number share a file; rank 0 of these writes it.
    """
    shard = f"-tensor{ps.get_tensor_model_parallel_rank()}"
    if ps.get_expert_model_parallel_world_size() > 1:
        shard = _expert_shard()
    return directory / f"generators{shard}{_stage()}.safetensors"


def _expert_shard() -> str:
    """Return the part of a file's name that says which shard of the experts this rank holds."""
    return (
        f"-tensor{ps.get_expert_tensor_parallel_rank()}-expert{ps.get_expert_model_parallel_rank()}"
    )


def _stage() -> str:
    """Return the part of a file's name that says which pipeline stage this rank is."""
    return f"-pipeline{ps.get_pipeline_model_parallel_rank()}"

"""The moments of the drafter's Adam as full tensors under checkpoint names, so that the next run can go on with them.

`optimizer/MODEL.safetensors` beside an exported checkpoint MODEL holds `exp_avg.NAME` and `exp_avg_sq.NAME` for each
drafter tensor NAME, shaped as that tensor, and `updates`, the number of optimizer updates that made them. It does not
depend on the layout of ranks. It does not lie in the checkpoint, which people upload.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from megatron_rlspec.models.names import NameTable
from megatron_rlspec.models.tensor_file import CheckpointError, TensorFile
from megatron_rlspec.train.optimizer import Learner
from megatron_rlspec.train.shards import global_name

MOMENTS = ("exp_avg", "exp_avg_sq")


def file_of(model: Path) -> Path:
    """Return the path of the moments of the drafter in a model directory."""
    model = model.absolute()
    return model.parent / "optimizer" / f"{model.name}.safetensors"


def find(
    model: Path, family: NameTable, weights: Mapping[str, tuple[int, ...]]
) -> tuple[TensorFile | None, str]:
    """Open the moments of a model directory: (the file, "") or (None, why it is not used); (None, "") without one.

    weights  shapes of the model's tensors by checkpoint name
    """
    path = file_of(model)
    if not path.exists():
        return None, ""
    try:
        file = TensorFile(path)
        if problem := _problem(file, family, weights):
            return None, f"{path}: {problem}; the drafter's optimizer starts without moments"
    except CheckpointError as error:
        return None, f"{error}; the drafter's optimizer starts without moments"
    return file, ""


def _problem(file: TensorFile, family: NameTable, weights: Mapping[str, tuple[int, ...]]) -> str:
    if "updates" not in file or file.shape("updates") != ():
        return "it has no scalar `updates`"
    for name in trained_names(family):
        for moment in MOMENTS:
            key = f"{moment}.{name}"
            if key not in file:
                return f"it has no {key}"
            if file.shape(key) != weights[name]:
                return (
                    f"{key} has shape {list(file.shape(key))}, but {name} has {list(weights[name])}"
                )
    return ""


def trained_names(family: NameTable) -> list[str]:
    """Return the checkpoint names of the drafter tensors that an optimizer updates, so without routers' biases."""
    names: list[str] = []
    for name, row in family.rows.items():
        if family.is_drafter(name) and not name.endswith(".expert_bias"):
            names += row.hf
    return names


def under_canonical_names(learner: Learner, moment: str) -> dict[str, Tensor]:
    """Gather this tensor-parallel rank's moment of each parameter, for `shards.export_stage`.

    By canonical Megatron name. Collective over replicas.
    """
    moments: dict[str, Tensor] = {}
    module = learner.ddp.module
    pieces = dict(learner.optimized())
    for name, parameter in module.named_parameters():
        exact = torch.promote_types(parameter.dtype, torch.float32)
        whole = torch.zeros(parameter.numel(), dtype=exact, device=parameter.device)
        if name in pieces:
            inner, start, state = pieces[name]
            whole[start : start + inner.numel()] = state[moment].flatten()
        if learner.adam.distributed:
            dist.all_reduce(whole, group=learner.part_of(parameter).replicas)
        moments[global_name(name, module.config)] = whole.view(parameter.shape)
    return moments


def take(learner: Learner, family: NameTable, file: Mapping[str, Tensor]) -> None:
    """Put this rank's share of the file's moments into an optimizer that has not stepped yet."""
    rank = ps.get_tensor_model_parallel_rank()
    size = ps.get_tensor_model_parallel_world_size()
    learner.updates_before = int(file["updates"])
    learner.create_moments()
    pieces = dict(learner.optimized())
    module = learner.ddp.module
    for name, _ in module.named_parameters():
        canonical = global_name(name, module.config)
        row = family.row(canonical)
        for moment in MOMENTS:
            full = row.layout.fuse([file[f"{moment}.{hf}"] for hf in row.hf])
            shard = family.shard(canonical, full, rank, size).flatten()
            if name in pieces:
                inner, start, state = pieces[name]
                piece = shard[start : start + inner.numel()]
                state[moment].copy_(piece.view(state[moment].shape))

"""Read a checkpoint of a run, RUN/checkpoints/step-N, as full tensors under canonical Megatron names.

`train/checkpoint.py` writes it: a file for each shard of policy and drafter, numbered by tensor-parallel rank, pipeline
stage and expert-parallel rank, in which layers and experts have the numbers that they have on their rank. The sizes are
those of the model that the run started from, which the run's own config.json names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from megatron_rlspec.models.config import STATED
from megatron_rlspec.models.headers import read_object
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.models.lazy import Lazy, Makers
from megatron_rlspec.models.names import EXPERT, LAYER, NameTable, canonical, later
from megatron_rlspec.models.tensor_file import TensorFile

LAYOUT = "layout.json"  # of every checkpoint of a run
_FILE = re.compile(
    r"((?:policy|drafter)(?:-experts)?-tensor(\d+)(?:-expert(\d+))?-pipeline(\d+))(?:-replica\d+)?\.safetensors"
)
_HELD = ("parameter.", "bias.")


class Layout(NamedTuple):
    """What a checkpoint says of itself.

    drafter  "mtp", "eagle3" or ""
    tensor   the tensor-parallel size of the run
    chosen   what config.json states beside the drafter: the sharpness of drafts
    words    a text with the checksum of the words that an EAGLE-3 drafter drafts from; "" without such a drafter
    """

    drafter: str
    tensor: int
    chosen: dict[str, Any]
    words: str


class Shard(NamedTuple):
    """A file of a checkpoint: its place in the layout, and canonical name -> name in the file."""

    pipeline: int
    expert: int
    tensor: int
    file: TensorFile
    names: dict[str, str]


def is_run_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint of a run."""
    return (path / LAYOUT).is_file()


def model_of(path: Path, moved: Path | None) -> tuple[Path, Path | None]:
    """Return the directories of the model, and of the EAGLE-3 drafter, that the run started from.

    moved  where the model is now, if not where the run's config.json says

    Raises CheckpointError if the run's config.json is not beside the checkpoint, or its model is not there.
    """
    file = path.resolve().parent.parent / "config.json"
    try:
        options = read_object(file)
        model, drafter = Path(options["model"]["path"]), options["drafter"]["path"]
    except (CheckpointError, KeyError, TypeError):
        if moved is not None:
            return moved, None
        raise CheckpointError(
            f"{path}: no config.json of its run at {file}; expected --hf DIR, its model.path"
        ) from None
    if moved is None and not model.is_dir():
        raise CheckpointError(
            f"{path}: the run's model.path={model} is not here; expected --hf DIR, that model"
        )
    return moved or model, Path(drafter) if drafter else None


def layout_of(path: Path) -> Layout:
    """Return the layout of a checkpoint. Raises CheckpointError."""
    layout = read_object(path / LAYOUT)
    sharpness = layout.get("sharpness")
    return Layout(
        drafter=layout.get("drafter") or "",
        tensor=layout.get("tensor", 1),
        chosen={} if sharpness is None else {STATED: sharpness},
        words=layout.get("eagle3") or "",
    )


def spec_of(path: Path) -> Literal["te", "local"]:
    """Return the layer specs of the run's ranks: Transformer Engine's hold norms in layers. Raises CheckpointError."""
    for shard in _shards(path):
        if any(".layer_norm_weight" in own for own in shard.names.values()):
            return "te"
    return "local"


def tensors_of(path: Path, table: NameTable, size: int) -> Lazy:
    """Return the full tensors of `table` that the checkpoint holds, read and joined on access.

    `size`: the tensor-parallel size of the run. Raises CheckpointError if files are missing or damaged.
    """
    parts: dict[str, list[tuple[TensorFile, str]]] = {}
    for shard in _renumbered(_shards(path)):
        for name, own in shard.names.items():
            parts.setdefault(name, []).append((shard.file, own))
    makers: Makers = {}
    for name in table.rows:
        if name not in parts:
            continue
        if len(parts[name]) != size:
            raise CheckpointError(
                f"{path}: {len(parts[name])} parts of {name}, expected {size}: files are missing"
            )
        makers[name] = partial(_joined, table, name, parts[name])
    return Lazy(makers)


def _joined(table: NameTable, name: str, parts: list[tuple[TensorFile, str]]) -> Tensor:
    return table.unshard(name, [file[own] for file, own in parts])


def _shards(path: Path) -> list[Shard]:
    """Open the files of one replica, ordered by pipeline stage, expert-parallel and tensor-parallel rank."""
    shards: dict[str, Shard] = {}
    for path_of_file in sorted(path.glob("*.safetensors")):
        found = _FILE.fullmatch(path_of_file.name)
        if found is None or found[1] in shards:  # every replica holds all parameters
            continue
        file = TensorFile(path_of_file)
        names = {}
        for own in file:
            for prefix in _HELD:
                if own.startswith(prefix):
                    names[canonical(own.removeprefix(prefix))] = own
        tensor, expert, pipeline = (int(number or 0) for number in found.groups()[1:])
        shards[found[1]] = Shard(pipeline, expert, tensor, file, names)
    return sorted(shards.values(), key=lambda shard: shard[:3])


def _renumbered(shards: list[Shard]) -> Iterator[Shard]:
    """Yield the shards with layers and experts numbered over the whole model."""
    layers: dict[int, set[str]] = {}
    for shard in shards:
        layers.setdefault(shard.pipeline, set()).update(_numbers(LAYER, shard.names))
    for shard in shards:
        first_layer = sum(len(layers[stage]) for stage in layers if stage < shard.pipeline)
        experts = len(set(_numbers(EXPERT, shard.names)))
        names = {}
        for name, own in shard.names.items():
            whole = later(LAYER, name, first_layer)
            names[later(EXPERT, whole, shard.expert * experts)] = own
        yield shard._replace(names=names)


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> Iterator[str]:
    return (found[1] for name in names if (found := pattern.search(name)))

"""Read a checkpoint of a run, RUN/checkpoints/step-N, as full tensors under canonical Megatron names.

`convert.py` calls `model_of`, `layout_of` and `spec_of`, then `tensors_of` with the names of the model.

The other side is `train/checkpoint.py`, which writes a file for each shard of policy and drafter. File names and the
prefixes of tensor names below must be those of its `_shard_file` and `_named_tensors`, and the keys of layout.json must
be those of `Trainer.save` and `_layout` in `train/step.py`. In a file, layers and experts have the numbers that they
have on their rank; `_renumbered` turns these into the numbers of the whole model.

The sizes of the model are not in the checkpoint. They are those of the model that the run started from, which the run's
own config.json names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from megatron_rlspec.models.config import SHARPNESS_KEY
from megatron_rlspec.models.headers import read_object
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.models.lazy import Lazy, Makers
from megatron_rlspec.models.names import EXPERT, LAYER, NameTable, canonical, later
from megatron_rlspec.models.tensor_file import TensorFile

LAYOUT = "layout.json"  # of every checkpoint of a run
# Groups: 1 is the shard, which is the same for all replicas; 2 to 4 are its tensor-parallel rank, expert-parallel rank
# and pipeline stage. Files of random states (`generators-...`) do not match.
_FILE = re.compile(
    r"((?:policy|drafter)(?:-experts)?-tensor(\d+)(?:-expert(\d+))?-pipeline(\d+))(?:-replica\d+)?\.safetensors"
)
# Prefixes of the model's own tensors in a file: parameters, and routers' biases. The rest is the optimizer's state.
_MODEL_PREFIXES = ("parameter.", "bias.")


class Layout(NamedTuple):
    """What a checkpoint's layout.json says.

    drafter  the trained drafter: "mtp", "eagle3" or "" (none)
    tensor   the tensor-parallel size of the run
    chosen   keys to add to the drafter's config.json: the sharpness that training chose, under `SHARPNESS_KEY`
    words    not the ids, but a text that ends in the CRC-32, in hex, of the token ids that an EAGLE-3 drafter drafts
             from (`eagle3_identity` in `train/model.py`); "" without such a drafter
    """

    drafter: str
    tensor: int
    chosen: dict[str, Any]
    words: str


class Shard(NamedTuple):
    """A file of a checkpoint.

    pipeline  pipeline stage of the rank that wrote it
    expert    expert-parallel rank, 0 for a file without experts
    tensor    tensor-parallel rank
    file      the open file
    names     canonical name -> name in the file, for the model's tensors, not for those of the optimizer. Layers and
              experts in the keys have the rank's numbers, after `_renumbered` those of the whole model

    The first three fields, in this order, are the sort key of `_shards`.
    """

    pipeline: int
    expert: int
    tensor: int
    file: TensorFile
    names: dict[str, str]


def is_run_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint of a run: whether it has a layout.json. Nothing is read."""
    return (path / LAYOUT).is_file()


def model_of(path: Path, moved: Path | None) -> tuple[Path, Path | None]:
    """Return the directories of the model, and of the EAGLE-3 drafter, that the run started from; None: no drafter.

    path   RUN/checkpoints/step-N; RUN/config.json has the options of the run
    moved  where the model is now, if not where RUN/config.json says. With `moved`, RUN/config.json may be missing: then
           the drafter's directory is unknown (None)

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
        chosen={} if sharpness is None else {SHARPNESS_KEY: sharpness},
        words=layout.get("eagle3") or "",
    )


def spec_of(path: Path) -> Literal["te", "local"]:
    """Return the layer specs of the run's ranks: with Transformer Engine's, linear layers hold the norms before them.

    Raises CheckpointError.
    """
    for shard in _shards(path):
        if any(".layer_norm_weight" in file_name for file_name in shard.names.values()):
            return "te"
    return "local"


def tensors_of(path: Path, table: NameTable, size: int) -> Lazy:
    """Return the full tensors of `table` that the checkpoint holds, read and joined on access.

    table  its layer specs must be those of the run (`spec_of`), because they decide how ranks cut tensors
    size   the tensor-parallel size of the run (`Layout.tensor`)

    Tensors of `table` that no file holds are left out, without an error: `convert.py` compares the names. The files
    stay open as long as the result exists. Raises CheckpointError if files are missing or damaged.
    """
    # canonical name -> its shards (file, name in the file), in the order of tensor-parallel ranks, as `unshard` needs
    parts: dict[str, list[tuple[TensorFile, str]]] = {}
    for shard in _renumbered(_shards(path)):
        for name, file_name in shard.names.items():
            parts.setdefault(name, []).append((shard.file, file_name))
    makers: Makers = {}
    for name in table.rows:
        if name not in parts:
            continue
        # Every tensor, replicated ones too, is in the file of each tensor-parallel rank.
        if len(parts[name]) != size:
            raise CheckpointError(
                f"{path}: {len(parts[name])} parts of {name}, expected {size}: files are missing"
            )
        makers[name] = partial(_joined, table, name, parts[name])
    return Lazy(makers)


def _joined(table: NameTable, name: str, parts: list[tuple[TensorFile, str]]) -> Tensor:
    """Read the shards of one tensor, and return the full one."""
    return table.unshard(name, [file[file_name] for file, file_name in parts])


def _shards(path: Path) -> list[Shard]:
    """Open the files of one replica, ordered by pipeline stage, expert-parallel and tensor-parallel rank.

    A shard without an expert-parallel rank in its name has 0.
    """
    shards: dict[str, Shard] = {}
    for path_of_file in sorted(path.glob("*.safetensors")):
        match = _FILE.fullmatch(path_of_file.name)
        # One replica is enough: with a distributed optimizer each replica has a file, and each file has all parameters.
        if match is None or match[1] in shards:
            continue
        file = TensorFile(path_of_file)
        names = {}
        for file_name in file:
            for prefix in _MODEL_PREFIXES:
                if file_name.startswith(prefix):
                    names[canonical(file_name.removeprefix(prefix))] = file_name
        tensor, expert, pipeline = (int(number or 0) for number in match.groups()[1:])
        shards[match[1]] = Shard(pipeline, expert, tensor, file, names)
    return sorted(shards.values(), key=lambda shard: shard[:3])


def _renumbered(shards: list[Shard]) -> Iterator[Shard]:
    """Yield the shards with layers and experts numbered over the whole model.

    A pipeline stage's layers follow those of the stages before it, so `shards` must be those of all stages. With
    virtual pipeline stages that order would be wrong; runs have none.
    """
    layers: dict[int, set[str]] = {}  # pipeline stage -> numbers of its layers, from all its files
    for shard in shards:
        layers.setdefault(shard.pipeline, set()).update(_numbers(LAYER, shard.names))
    for shard in shards:
        first_layer = sum(len(layers[stage]) for stage in layers if stage < shard.pipeline)
        # Every expert-parallel rank has the same number of experts of a layer.
        experts = len(set(_numbers(EXPERT, shard.names)))
        names = {}
        for name, file_name in shard.names.items():
            whole = later(LAYER, name, first_layer)
            names[later(EXPERT, whole, shard.expert * experts)] = file_name
        yield shard._replace(names=names)


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> Iterator[str]:
    """Yield the number that `pattern` (`LAYER`, `EXPERT`) finds in a name, as text; names without one are skipped."""
    return (found[1] for name in names if (found := pattern.search(name)))

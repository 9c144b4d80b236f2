"""Read a checkpoint of a run, RUN/checkpoints/step-N, as full tensors under canonical Megatron names.

`train/checkpoint.py` writes it: a file for each shard of policy and drafter, numbered by tensor-parallel rank, pipeline
stage and expert-parallel rank, in which layers and experts have the numbers that they have on their rank. The sizes are
those of the model that the run started from, which the run's own config.json names.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_rlspec.models.config import STATED
from megatron_rlspec.models.hf_files import CheckpointError, read_json
from megatron_rlspec.models.names import NameTable, canonical
from megatron_rlspec.models.tensor_file import TensorFile

LAYOUT = "layout.json"  # of every checkpoint of a run
_FILE = re.compile(
    r"(?:policy|drafter)(?:-experts)?-tensor(\d+)(?:-expert(\d+))?-pipeline(\d+)(?:-replica(\d+))?\.safetensors"
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_HELD = ("parameter.", "bias.")


class CheckpointFile(NamedTuple):
    """A file of a checkpoint: its place in the layout, and canonical name -> name in the file."""

    tensor: int
    expert: int
    pipeline: int
    path: Path
    names: dict[str, str]


def is_run_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint of a run."""
    return (path / LAYOUT).is_file()


def model_of(path: Path) -> tuple[Path, Path | None]:
    """Return the directories of the model, and of the EAGLE-3 drafter, that the run started from.

    Raises CheckpointError if the run's config.json is not beside the checkpoint, or its model is not there.
    """
    file = path.resolve().parent.parent / "config.json"
    try:
        options = read_json(file)
        model, drafter = Path(options["model"]["path"]), options["drafter"]["path"]
    except (CheckpointError, KeyError, TypeError):
        raise CheckpointError(
            f"{path}: no config.json of its run at {file}; expected --hf DIR, its model.path"
        ) from None
    if not model.is_dir():
        raise CheckpointError(
            f"{path}: the run's model.path={model} is not here; expected --hf DIR, that model"
        )
    return model, Path(drafter) if drafter else None


def layout_of(path: Path) -> dict[str, Any]:
    """Return `drafter` ("mtp", "eagle3" or ""), `tensor` and `chosen` of a checkpoint.

    chosen  what config.json states beside the drafter: the sharpness of drafts. Raises CheckpointError.
    """
    layout = read_json(path / LAYOUT)
    stated = layout.get("drafter")
    sharpness = layout.get("sharpness")
    return {
        "chosen": {} if sharpness is None else {STATED: sharpness},
        "drafter": "mtp" if stated is True else stated or "",
        "tensor": layout.get("tensor", 1),
    }


def spec_of(path: Path) -> Literal["te", "local"]:
    """Return the layer specs of the run's ranks: Transformer Engine's hold norms in layers. Raises CheckpointError."""
    names = (own for shard in _shards(path, {}) for own in shard.names.values())
    return "te" if any(".layer_norm_weight" in name for name in names) else "local"


class RunTensors(Mapping[str, Tensor]):
    """Maps the canonical names of `table` that the checkpoint holds to full tensors, read and joined on access."""

    def __init__(self, path: Path, table: NameTable, tensor: int) -> None:
        """`tensor`: the tensor-parallel size of the run. Raises CheckpointError if files are missing or damaged."""
        self._table = table
        self._others: dict[str, Tensor] = {}
        self._parts: dict[str, list[tuple[TensorFile, str]]] = {}
        opened: dict[Path, TensorFile] = {}
        for shard in _renumbered(_shards(path, opened)):
            for name, own in shard.names.items():
                if name in table.rows:
                    self._parts.setdefault(name, []).append((opened[shard.path], own))
        for name, parts in self._parts.items():
            if len(parts) != tensor:
                raise CheckpointError(
                    f"{path}: {len(parts)} parts of {name}, expected {tensor}: files are missing"
                )

    def add(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Add tensors that the checkpoint does not hold."""
        self._others |= {name: tensors[name] for name in names}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._others:
            return self._others[name]
        return self._table.unshard(name, [file[own] for file, own in self._parts[name]])

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._table.rows if name in self._parts or name in self._others)

    def __len__(self) -> int:
        return len(self._parts) + len(self._others)


def _shards(path: Path, opened: dict[Path, TensorFile]) -> list[CheckpointFile]:
    """Open the files of the first replica, ordered by pipeline stage, expert-parallel and tensor-parallel rank."""
    first: dict[str, tuple[int, Path]] = {}
    places: dict[Path, tuple[int, int, int]] = {}
    for file in path.glob("*.safetensors"):
        if found := _FILE.fullmatch(file.name):
            tensor, expert, pipeline, replica = (int(number or 0) for number in found.groups())
            places[file] = (tensor, expert, pipeline)
            shard = file.name.split("-replica")[0]
            first[shard] = min(first.get(shard, (replica, file)), (replica, file))
    shards = []
    for _, file in first.values():
        tensor, expert, pipeline = places[file]
        opened[file] = TensorFile(file)
        held = {prefix: [n for n in opened[file] if n.startswith(prefix)] for prefix in _HELD}
        names = {
            canonical(n.removeprefix(prefix)): n for prefix, found in held.items() for n in found
        }
        shards.append(CheckpointFile(tensor, expert, pipeline, file, names))
    return sorted(
        shards, key=lambda shard: (shard.pipeline, shard.expert, shard.tensor, shard.path.name)
    )


def _renumbered(shards: list[CheckpointFile]) -> Iterator[CheckpointFile]:
    """Yield the shards with layers and experts numbered over the whole model."""
    layers: dict[int, set[str]] = {}
    for shard in shards:
        layers.setdefault(shard.pipeline, set()).update(_numbers(_LAYER, shard.names))
    for shard in shards:
        first_layer = sum(len(layers[stage]) for stage in range(shard.pipeline) if stage in layers)
        experts = len(set(_numbers(_EXPERT, shard.names)))
        names = {}
        for name, own in shard.names.items():
            whole = _later(_LAYER, name, first_layer)
            names[_later(_EXPERT, whole, shard.expert * experts)] = own
        yield shard._replace(names=names)


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> Iterator[str]:
    return (found[1] for name in names if (found := pattern.search(name)))


def _later(pattern: re.Pattern[str], name: str, by: int) -> str:
    """Add `by` to the number that `pattern` finds in a name."""
    return pattern.sub(lambda found: found[0].replace(found[1], str(int(found[1]) + by)), name)


def check_words(path: Path, words: Tensor) -> None:
    """Raise CheckpointError unless the checkpoint's EAGLE-3 drafter drafts from these token ids."""
    stated = str(read_json(path / LAYOUT).get("eagle3", ""))
    own = f"{zlib.crc32(words.to(torch.int64).numpy().tobytes()):08x}"
    if stated and own not in stated:
        raise CheckpointError(
            f"{path}: its drafter drafts from other words than drafter.path of its run has now"
        )

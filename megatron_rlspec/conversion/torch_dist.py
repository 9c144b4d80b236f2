"""Read and write Megatron checkpoints of the `torch_dist` format, one tensor at a time, without Megatron.

The format is PyTorch's distributed checkpoint: files of `torch.save`d tensors, and a pickled index (`.metadata`) with
the place of each part of each global tensor. A reader can have other tensor, pipeline and expert parallel sizes than
the writer. `convert.py` calls the reader and the writer; both go by canonical names, and `place` translates them to
Megatron's stored names:

    a dense model's layers are one tensor [L, ...]   decoder.layers.mlp.linear_fc2.weight
    other layers are numbered                        decoder.layers.3.mlp.router.weight, mtp.layers.0.eh_proj.weight
    a layer's experts are one tensor [E, ...]        ....mlp.experts.experts.linear_fc1.weight
    norms may be named as fused                      ....self_attention.linear_qkv.layer_norm_weight

The reader unpickles the index only, with an unpickler that refuses all classes but those of an index
(`torch_dist_index.py`), and checks that it has both tables. Places and sizes in it are checked when a tensor is read.
Then the CRCs in the zip archive of every stored part are compared, too.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rlspec import files
from megatron_rlspec.conversion.torch_dist_index import load_index
from megatron_rlspec.models.hf_files import CheckpointError, write_json
from megatron_rlspec.models.names import EXPERT, FUSED, LAYER, NameTable, canonical
from megatron_rlspec.models.tensor_file import ByName
from megatron_rlspec.texts import first_line

TRACKER = "latest_checkpointed_iteration.txt"
# Files of a step's directory, under the names that Megatron and PyTorch look for.
_INDEX = ".metadata"
_BACKEND = "metadata.json"
_COMMON = "common.pt"
# Megatron stores an (empty) extra state beside each linear layer, and loading fails without it. Under Transformer
# Engine also beside norms that are not fused into a linear layer, and for core attention (`_extra_states`).
_LINEAR = re.compile(r"\.(linear_\w+|eh_proj)\.weight$")
_NORM = re.compile(r"norm\.weight$")


@dataclass(frozen=True)
class Place:
    """The place of a tensor of the model in a checkpoint: in the global tensor `key`, at `indices` of its leading axes.

    The leading axes are layers [L], experts [E], both [L, E], or none: then the global tensor is the tensor itself.

    key      the name under which the checkpoint stores the global tensor
    indices  numbers of layer and expert, one for each leading axis
    sizes    sizes of the leading axes
    """

    key: str
    indices: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def place(family: NameTable, name: str, stacked: bool, spec: str) -> Place:
    """Return the place of a canonical name.

    name     canonical, of `family`
    stacked  all layers form one global tensor, as `uniform` says
    spec     layer specs of Megatron, "te" or "local"
    """
    indices: list[int] = []
    sizes: list[int] = []
    key = _stored_name(family, name, spec)
    # The axis of layers comes before that of experts.
    layer = LAYER.match(key)
    expert = EXPERT.search(key)
    if layer and stacked:
        key = key.replace(layer[0], "decoder.layers.", 1)
        indices.append(int(layer[1]))
        sizes.append(family.geometry.layers)
    if expert:
        key = key.replace(expert[0], ".mlp.experts.experts.", 1)
        indices.append(int(expert[1]))
        sizes.append(family.experts)
    return Place(key, tuple(indices), tuple(sizes))


def _stored_name(family: NameTable, name: str, spec: str) -> str:
    """Return the name under which Megatron stores a canonical name, before layers and experts are stacked.

    Local specs, too, store both norms of a block under the names that they have under Transformer Engine (Megatron's
    `sharded_state_dict_keys_map`), but not with latent attention.
    """
    if spec == "te":
        return family.te_name(name)
    if any("linear_kv_up_proj" in row for row in family.rows):  # a model with latent attention
        return name
    for norm, layer in FUSED[:2]:  # input_layernorm and pre_mlp_layernorm
        name = name.replace(f".{norm}", f".{layer}layer_norm_")
    return name


def uniform(family: NameTable) -> bool:
    """Return whether this model's layers are written stacked: only if all are of one kind and none has experts.

    The writer must do as the reading Megatron does, which would stack layers with experts, too, if its `moe_layer_freq`
    were the number 1: it must be a list. `TorchDistReader` accepts both.
    """
    # number of a layer -> names of its tensors without the layer's prefix
    kinds: dict[str, set[str]] = {}
    for name in family.rows:
        if layer := LAYER.match(name):
            kinds.setdefault(layer[1], set()).add(name.removeprefix(layer[0]))
    return all(kind == kinds["0"] for kind in kinds.values()) and not family.experts


# ---- reading ----------------------------------------------------------------------------------------------------


class TorchDistReader(ByName):
    """Maps canonical Megatron names to full tensors, read on access. The checkpoint may be sharded in any way.

    path    of the checkpoint, or of one step in it
    family  names of the model. Those that the checkpoint lacks are not in `names`

    Raises CheckpointError for a missing or damaged index, and on access for a missing or damaged part. Access by a name
    that is not in `names` raises KeyError.
    """

    def __init__(self, path: str | Path, family: NameTable) -> None:
        self.directory = checkpoint_directory(Path(path))
        index = load_index(self.directory / _INDEX)
        entries = index.state_dict_metadata.items()
        self._stored = {
            k: entry for k, entry in entries if isinstance(entry, TensorStorageMetadata)
        }
        self._storage = index.storage_data
        self._places: dict[str, Place] = {}
        for name in family.rows:
            if where := self._find(family, name):
                self._places[name] = where
        self.names = self._places

    def __getitem__(self, name: str) -> Tensor:
        where = self._places[canonical(name)]
        stored = self._stored[where.key]
        # the number of leading axes, which the global tensor has and the tensor itself has not
        lead = len(where.indices)
        if tuple(stored.size[:lead]) != where.sizes:
            raise CheckpointError(
                f"{self.directory}: {where.key} is stacked {list(stored.size[:lead])}, expected {list(where.sizes)}"
            )
        shape = stored.size[lead:]
        chunks = [chunk for chunk in stored.chunks if _holds(chunk, where.indices)]
        present = sum(math.prod(chunk.sizes[lead:]) for chunk in chunks)
        # Compared before memory is allocated for the size in the index, which may be wrong. This finds missing parts,
        # whose elements `torch.empty` would leave undefined.
        # It does not find parts that overlap: beside them, elements can stay undefined.
        if present != math.prod(shape):
            raise CheckpointError(
                f"{self.directory}: {where.key} is not whole ({present} of {math.prod(shape)} elements)"
            )
        full = torch.empty(shape, dtype=stored.properties.dtype)
        for chunk in chunks:
            part = self._read(where.key, chunk, stored.properties.dtype)
            # The numbers of layer and expert within this part, which may hold several of them. Not strict:
            # `chunk.offsets` has all axes, and only the leading ones count.
            inside = tuple(
                index - start for index, start in zip(where.indices, chunk.offsets, strict=False)
            )
            spans = zip(chunk.offsets[lead:], chunk.sizes[lead:], strict=True)
            target = tuple(slice(start, start + size) for start, size in spans)
            full[target] = part[inside]
        return full

    def _find(self, family: NameTable, name: str) -> Place | None:
        """Return the place of a canonical name; None if the checkpoint lacks it.

        A checkpoint does not state whether layers are stacked, nor the layer specs. So all four places are tried.
        """
        candidates = (
            place(family, name, stacked, spec)
            for stacked in (True, False)
            for spec in ("te", "local")
        )
        return next((c for c in candidates if c.key in self._stored), None)

    def _read(self, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        """Read one stored part. Raises CheckpointError if it is missing or damaged, or has another shape or dtype."""
        # The second key has no offsets: the index may leave them out for a tensor of one part.
        info = self._storage.get(MetadataIndex(key, chunk.offsets)) or self._storage.get(
            MetadataIndex(key)
        )
        if info is None:
            raise CheckpointError(
                f"{self.directory / _INDEX}: no place for the part of {key} at {chunk.offsets}"
            )
        part = _load_part(self._bytes(key, info), f"{self.directory / info.relative_path}: {key}")
        if part.shape != chunk.sizes or part.dtype != dtype:
            raise CheckpointError(
                f"{self.directory / info.relative_path}: {key}: {part.dtype} of shape {list(part.shape)}, "
                f"expected {dtype} of {list(chunk.sizes)}"
            )
        return part

    def _bytes(self, key: str, info: _StorageInfo) -> bytes:
        """Read the bytes of a stored part. Raises CheckpointError."""
        file = self.directory / info.relative_path
        # A damaged or hostile index must not make this read a file elsewhere.
        if Path(info.relative_path).name != info.relative_path or not file.is_file():
            raise CheckpointError(
                f"{self.directory / _INDEX}: places {key} in {info.relative_path}; expected a file beside it"
            )
        end = info.offset + info.length
        if file.stat().st_size < end:
            raise CheckpointError(f"{file}: truncated; {key} should end at byte {end}")
        with file.open("rb") as stream:
            stream.seek(info.offset)
            return stream.read(info.length)


def is_checkpoint(path: Path) -> bool:
    """Return whether `checkpoint_directory` finds a checkpoint there."""
    return (path / TRACKER).exists() or (path / _INDEX).exists()


def checkpoint_directory(path: Path) -> Path:
    """Return the directory with the index: `path`, or the one that its tracker file names. Raises CheckpointError.

    path  of a checkpoint, whose tracker names "release" or the newest step, or of one step. The index is not opened
    """
    tracker = path / TRACKER
    if tracker.exists():
        try:
            step = files.read_text(tracker, most=100).strip()
        except files.FileError as error:
            raise CheckpointError(str(error)) from None
        if not re.fullmatch(r"release|[0-9]{1,9}", step):
            raise CheckpointError(f"{tracker}: {step!r}, expected `release` or a step number")
        path /= "release" if step == "release" else f"iter_{int(step):07d}"
    if not (path / _INDEX).exists():
        raise CheckpointError(
            f"{path}: neither {TRACKER} nor {_INDEX}; expected a torch_dist checkpoint"
        )
    return path


def _load_part(data: bytes, label: str) -> Tensor:
    """Load the tensor of one `torch.save`d part. Raises CheckpointError; `label` names file and tensor in messages.

    `torch.load` itself compares no CRCs, so those of the zip archive are compared first. `weights_only` runs no code.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise CheckpointError(f"{label}: its checksum differs: the file is damaged")
        part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes make zipfile and torch.load raise almost anything
        raise CheckpointError(
            f"{label}: damaged, or something else than a tensor ({first_line(error)})"
        ) from None
    if not isinstance(part, Tensor) or part.is_sparse or part.is_quantized:
        raise CheckpointError(f"{label}: expected a tensor, found {type(part).__name__}")
    return part


def _holds(chunk: ChunkStorageMetadata, indices: tuple[int, ...]) -> bool:
    """Return whether a chunk holds elements at `indices` of the leading axes."""
    lead = zip(indices, chunk.offsets, chunk.sizes, strict=False)
    return all(start <= i < start + size for i, start, size in lead)


# ---- writing ----------------------------------------------------------------------------------------------------


class TorchDistWriter:
    """Writes groups of tensors, each group to a file of its own. The checkpoint is unreadable until `finish` is called.

    directory  of the step. It must not exist (FileExistsError); parents are made
    family     names of the model; its `spec` is that of the Megatron that will read the checkpoint
    """

    def __init__(self, directory: Path, family: NameTable) -> None:
        self.directory = directory
        self.family = family
        self.stacked = uniform(family)
        # Two halves of the index: metadata of each global tensor and each extra state, by key; and file, first byte and
        # length of each part.
        self._parts: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._files = 0
        directory.mkdir(parents=True)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write one group: canonical names and full tensors, read one by one. A checkpoint may get each name once only.

        Raises OSError, and CheckpointError if two layers whose tensors form one global tensor differ in shape.
        """
        file = self.directory / f"__{self._files}_0.distcp"  # as PyTorch names them: rank, number
        self._files += 1
        spec = self.family.spec
        with file.open("wb") as stream:
            for name, tensor in tensors:
                where = place(self.family, name, self.stacked, spec)
                self._write(stream, file.name, where, tensor)
                for state in _extra_states(where.key, spec):
                    # the form of Megatron's `ShardedObject.unique_key`
                    offsets = ".".join(map(str, where.indices or [0]))
                    sizes = ".".join(map(str, where.sizes or [1]))
                    unique_key = f"{state}/shard_{offsets}_{sizes}"
                    self._parts[unique_key] = BytesStorageMetadata()
                    # Megatron stores a list with the state of one module; this one is empty.
                    self._storage[MetadataIndex(unique_key)] = _append(stream, file.name, [None])

    def _write(self, stream: Any, file: str, where: Place, tensor: Tensor) -> None:
        """Write one tensor as a part of its global tensor, and note the part in the index."""
        # The stored tensor has the leading axes of the global tensor, each of size 1. `torch.save` stores the whole
        # storage, so a view is copied first.
        whole = tensor.contiguous().view(*(1 for _ in where.indices), *tensor.shape)
        if whole.untyped_storage().nbytes() != whole.nbytes:
            whole = whole.clone()
        size = torch.Size(where.sizes + tuple(tensor.shape))
        offset = torch.Size(where.indices + (0,) * tensor.dim())
        properties = TensorProperties(dtype=tensor.dtype)
        # The first part of a global tensor makes its entry; parts of other layers and experts are added to it.
        stored = self._parts.setdefault(where.key, TensorStorageMetadata(properties, size, []))
        if stored.size != size:
            raise CheckpointError(
                f"{where.key}: layers differ in shape, {list(stored.size)} and {list(size)}"
            )
        stored.chunks.append(ChunkStorageMetadata(offset, whole.shape))
        self._storage[MetadataIndex(where.key, offset)] = _append(stream, file, whole)

    def finish(self) -> None:
        """Write the index over all groups, and the small files that Megatron expects beside it. Call it last.

        It writes no tracker file: `convert.py` does (`TRACKER`), once the directory is complete.
        """
        index = pickle.dumps(Metadata(self._parts, planner_data=None, storage_data=self._storage))
        files.write(self.directory / _INDEX, index)
        torch.save({"iteration": 0, "checkpoint_version": 3.0}, self.directory / _COMMON)
        versions = {
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        write_json(self.directory / _BACKEND, {"sharded_backend": "torch_dist", **versions})


def _extra_states(key: str, spec: str) -> Iterator[str]:
    """Yield the keys of the extra states that Megatron expects beside the stored tensor `key`."""
    module = key.removesuffix(".weight")
    if _LINEAR.search(key) or (spec == "te" and _NORM.search(key)):
        yield f"{module}._extra_state"
    if spec == "te" and module.endswith(".self_attention.linear_proj"):
        yield f"{module.removesuffix('linear_proj')}core_attention._extra_state"


def _append(stream: Any, file: str, content: Any) -> _StorageInfo:
    """Write one part to the end of `stream`, the file named `file`. Returns file name, first byte and length.

    content  a tensor, or the list of an extra state
    """
    first = stream.tell()
    torch.save(content, stream)
    return _StorageInfo(file, first, stream.tell() - first)

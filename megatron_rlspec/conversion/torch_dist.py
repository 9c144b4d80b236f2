"""Read and write Megatron checkpoints of the `torch_dist` format, one tensor at a time, without Megatron.

The format is PyTorch's distributed checkpoint: files of `torch.save`d tensors, and a pickled index with the place of
each part of each global tensor. A reader can have other tensor, pipeline and expert parallel sizes than the writer.
Megatron's names:

    a dense model's layers are one tensor [L, ...]   decoder.layers.mlp.linear_fc2.weight
    other layers are numbered                        decoder.layers.3.mlp.router.weight, mtp.layers.0.eh_proj.weight
    a layer's experts are one tensor [E, ...]        ....mlp.experts.experts.linear_fc1.weight
    norms may be named as fused                      ....self_attention.linear_qkv.layer_norm_weight

The reader unpickles the index only, with an unpickler that refuses all classes but those of an index, and checks the
result. It compares the CRCs in the zip archive of every stored part.
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
_INDEX = ".metadata"
_BACKEND = "metadata.json"
_COMMON = "common.pt"
# Modules for which Megatron stores an (empty) extra state. Loading fails without it. They are linear layers; under
# Transformer Engine also norms that are not fused into one, and the core attention of MTP layers.
_LINEAR = re.compile(r"\.(linear_\w+|eh_proj)\.weight$")
_NORM = re.compile(r"norm\.weight$")


@dataclass(frozen=True)
class Place:
    """The place of a tensor of the model: slice `at` of the leading axes, of sizes `of`, of the global tensor `key`."""

    key: str
    at: tuple[int, ...] = ()
    of: tuple[int, ...] = ()


def place(family: NameTable, name: str, stacked: bool, spec: str) -> Place:
    """Return the place of a canonical name. `stacked`: all layers form one tensor, as `uniform` says."""
    at: list[int] = []
    of: list[int] = []
    key = _stored_name(family, name, spec)
    layer = LAYER.match(key)
    expert = EXPERT.search(key)
    if layer and stacked:
        key = key.replace(layer[0], "decoder.layers.", 1)
        at.append(int(layer[1]))
        of.append(family.geometry.layers)
    if expert:
        key = key.replace(expert[0], ".mlp.experts.experts.", 1)
        at.append(int(expert[1]))
        of.append(family.experts)
    return Place(key, tuple(at), tuple(of))


def _stored_name(family: NameTable, name: str, spec: str) -> str:
    """Return the stored name. Local specs fuse the names of both norms of a block, except with latent attention."""
    if spec == "te":
        return family.fused(name)
    if any("linear_kv_up_proj" in row for row in family.rows):
        return name
    for norm, layer in FUSED[:2]:
        name = name.replace(f".{norm}", f".{layer}layer_norm_")
    return name


def uniform(family: NameTable) -> bool:
    """Return whether Megatron stacks this model's layers: only if all are of one kind and none has experts."""
    kinds: dict[str, set[str]] = {}
    for name in family.rows:
        if layer := LAYER.match(name):
            kinds.setdefault(layer[1], set()).add(name.removeprefix(layer[0]))
    return all(kind == kinds["0"] for kind in kinds.values()) and not family.experts


# ---- reading ----------------------------------------------------------------------------------------------------


class TorchDistReader(ByName):
    """Maps canonical Megatron names to full tensors, read on access. The checkpoint may be sharded in any way."""

    def __init__(self, path: str | Path, family: NameTable) -> None:
        self.directory = checkpoint_directory(Path(path))
        index = load_index(self.directory / _INDEX)
        entries = index.state_dict_metadata.items()
        self._stored = {
            k: entry for k, entry in entries if isinstance(entry, TensorStorageMetadata)
        }
        self._where = index.storage_data
        self._places: dict[str, Place] = {}
        for name in family.rows:
            if found := self._find(family, name):
                self._places[name] = found
        self.names = self._places

    def __getitem__(self, name: str) -> Tensor:
        where = self._places[canonical(name)]
        stored = self._stored[where.key]
        lead = len(where.at)
        if tuple(stored.size[:lead]) != where.of:
            raise CheckpointError(
                f"{self.directory}: {where.key} is stacked {list(stored.size[:lead])}, expected {list(where.of)}"
            )
        shape = stored.size[lead:]
        chunks = [chunk for chunk in stored.chunks if _holds(chunk, where.at)]
        present = sum(math.prod(chunk.sizes[lead:]) for chunk in chunks)
        # Compared before memory is allocated for the size in the index.
        if present != math.prod(shape):
            raise CheckpointError(
                f"{self.directory}: {where.key} is not whole ({present} of {math.prod(shape)} elements)"
            )
        full = torch.empty(shape, dtype=stored.properties.dtype)
        for chunk in chunks:
            part = self._read(where.key, chunk, stored.properties.dtype)
            inside = tuple(at - start for at, start in zip(where.at, chunk.offsets, strict=False))
            spans = zip(chunk.offsets[lead:], chunk.sizes[lead:], strict=True)
            target = tuple(slice(start, start + size) for start, size in spans)
            full[target] = part[inside]
        return full

    def _find(self, family: NameTable, name: str) -> Place | None:
        candidates = (
            place(family, name, stacked, spec)
            for stacked in (True, False)
            for spec in ("te", "local")
        )
        return next((c for c in candidates if c.key in self._stored), None)

    def _read(self, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        """Read one stored part. Raises CheckpointError if it is missing or damaged, or has another shape or dtype."""
        info = self._where.get(MetadataIndex(key, chunk.offsets)) or self._where.get(
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
    """Return the directory with the index: `path`, or the one that its tracker file names. Raises CheckpointError."""
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


def _load_part(data: bytes, where: str) -> Tensor:
    """Load the tensor of one `torch.save`d part, after comparing the CRCs in its zip archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise CheckpointError(f"{where}: its checksum differs: the file is damaged")
        part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes make zipfile and torch.load raise almost anything
        raise CheckpointError(
            f"{where}: damaged, or something else than a tensor ({first_line(error)})"
        ) from None
    if not isinstance(part, Tensor) or part.is_sparse or part.is_quantized:
        raise CheckpointError(f"{where}: expected a tensor, found {type(part).__name__}")
    return part


def _holds(chunk: ChunkStorageMetadata, at: tuple[int, ...]) -> bool:
    """Return whether a chunk holds slice `at` of the leading axes."""
    lead = zip(at, chunk.offsets, chunk.sizes, strict=False)
    return all(start <= i < start + size for i, start, size in lead)


# ---- writing ----------------------------------------------------------------------------------------------------


class TorchDistWriter:
    """Writes groups of tensors, each to a file of its own that appears complete or not at all. Call `finish` last."""

    def __init__(self, directory: Path, family: NameTable) -> None:
        self.directory = directory
        self.family = family
        self.stacked = uniform(family)
        self._parts: dict[str, Any] = {}
        self._where: dict[MetadataIndex, _StorageInfo] = {}
        self._files = 0
        directory.mkdir(parents=True)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write one group. Tensors are consumed one by one. Raises OSError."""
        file = self.directory / f"__{self._files}_0.distcp"
        self._files += 1
        spec = self.family.spec
        with file.open("wb") as stream:
            for name, tensor in tensors:
                where = place(self.family, name, self.stacked, spec)
                self._write(stream, file.name, where, tensor)
                for key in _extra_states(where.key, spec):
                    at = ".".join(map(str, where.at or [0]))
                    of = ".".join(map(str, where.of or [1]))
                    key = f"{key}/shard_{at}_{of}"
                    self._parts[key] = BytesStorageMetadata()
                    self._where[MetadataIndex(key)] = _append(stream, file.name, [None])

    def _write(self, stream: Any, file: str, where: Place, tensor: Tensor) -> None:
        # The stored tensor has the leading axes of the global tensor. `torch.save` stores the whole storage, so a view
        # is copied first.
        whole = tensor.contiguous().view(*(1 for _ in where.at), *tensor.shape)
        if whole.untyped_storage().nbytes() != whole.nbytes:
            whole = whole.clone()
        size = torch.Size(where.of + tuple(tensor.shape))
        offset = torch.Size(where.at + (0,) * tensor.dim())
        properties = TensorProperties(dtype=tensor.dtype)
        stored = self._parts.setdefault(where.key, TensorStorageMetadata(properties, size, []))
        if stored.size != size:
            raise CheckpointError(
                f"{where.key}: layers differ in shape, {list(stored.size)} and {list(size)}"
            )
        stored.chunks.append(ChunkStorageMetadata(offset, whole.shape))
        self._where[MetadataIndex(where.key, offset)] = _append(stream, file, whole)

    def finish(self) -> None:
        """Write the index over all groups, and the small files that Megatron expects beside it."""
        index = pickle.dumps(Metadata(self._parts, planner_data=None, storage_data=self._where))
        files.write(self.directory / _INDEX, index)
        torch.save({"iteration": 0, "checkpoint_version": 3.0}, self.directory / _COMMON)
        versions = {
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        write_json(self.directory / _BACKEND, {"sharded_backend": "torch_dist", **versions})


def _extra_states(key: str, spec: str) -> Iterator[str]:
    """Yield the keys of the extra states that Megatron looks for where it looks for the tensor `key`."""
    module = key.removesuffix(".weight")
    if _LINEAR.search(key) or (spec == "te" and _NORM.search(key)):
        yield f"{module}._extra_state"
    if spec == "te" and module.endswith(".self_attention.linear_proj"):
        yield f"{module.removesuffix('linear_proj')}core_attention._extra_state"


def _append(stream: Any, file: str, content: Any) -> _StorageInfo:
    """Write one part to `file`. Returns where it lies."""
    first = stream.tell()
    torch.save(content, stream)
    return _StorageInfo(file, first, stream.tell() - first)

"""Megatron distributed checkpoints of the `torch_dist` format, one tensor at a time, without Megatron or a job.

The format is PyTorch's distributed checkpoint: files of `torch.save`d tensors, and a pickled index of which part of
which global tensor lies where. Every reader reshards from it, so the tensor, pipeline and expert parallel sizes of
writer and reader need not match. Megatron's choice of names:

    a dense model's layers are one tensor [L, ...]   decoder.layers.mlp.linear_fc2.weight
    other layers are numbered                        decoder.layers.3.mlp.router.weight, mtp.layers.0.eh_proj.weight
    a layer's experts are one tensor [E, ...]        ....mlp.experts.experts.linear_fc1.weight
    norms may be named as fused                      ....self_attention.linear_qkv.layer_norm_weight

The index is the only pickle that is read, by an unpickler that knows the classes it may hold and refuses any other.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
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

from megatron_rlspec.weights.checkpoint import CheckpointError, read_json, write_json
from megatron_rlspec.weights.names import Family, canonical

TRACKER = "latest_checkpointed_iteration.txt"
_INDEX, _BACKEND, _COMMON = ".metadata", "metadata.json", "common.pt"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
# Modules for which Megatron stores an (empty) extra state, and misses it when it loads.
_LINEAR = re.compile(r"\.(linear_\w+|eh_proj|in_proj|out_proj)\.weight$")


@dataclass(frozen=True)
class Place:
    """Where a tensor of the model lies: slice `at` of the leading axes, of sizes `of`, of the global tensor `key`."""

    key: str
    at: tuple[int, ...] = ()
    of: tuple[int, ...] = ()


def place(family: Family, name: str, stacked: bool, spec: str) -> Place:
    """Of a canonical name. `stacked`: layers form one tensor, as Megatron does for a model whose layers are alike."""
    at: list[int] = []
    of: list[int] = []
    key = _stored_name(family, name, spec)
    layer, expert = _LAYER.match(key), _EXPERT.search(key)
    if layer and stacked:
        key = key.replace(layer[0], "decoder.layers.", 1)
        at.append(int(layer[1]))
        of.append(family.geometry.layers)
    if expert:
        key = key.replace(expert[0], ".mlp.experts.experts.", 1)
        at.append(int(expert[1]))
        of.append(family.experts)
    return Place(key, tuple(at), tuple(of))


def _stored_name(family: Family, name: str, spec: str) -> str:
    """Local specs fuse the names of both norms of every block, and with latent attention none; others as they are."""
    if spec == "te":
        return family.fused(name)
    if any("linear_kv_up_proj" in row for row in family.rows):
        return name
    fused = (("input_layernorm.", "self_attention.linear_qkv."), ("pre_mlp_layernorm.", "mlp.linear_fc1."))
    for norm, layer in fused:
        name = name.replace(f".{norm}", f".{layer}layer_norm_")
    return name


def uniform(family: Family) -> bool:
    """Whether Megatron stacks this model's layers: not where some are dense and some are not, or attend otherwise."""
    kinds = {}
    for name in family.rows:
        if layer := _LAYER.match(name):
            kinds.setdefault(layer[1], set()).add(name.removeprefix(layer[0]))
    return all(kind == kinds["0"] for kind in kinds.values()) and not family.experts


# ---- reading ----------------------------------------------------------------------------------------------------


class TorchDistReader(Mapping[str, Tensor]):
    """canonical Megatron name -> full tensor, read when asked for, from whatever shards the checkpoint has."""

    def __init__(self, path: str | Path, family: Family) -> None:
        self.directory = checkpoint_directory(Path(path))
        if read_json(self.directory / _BACKEND).get("sharded_backend") != "torch_dist":
            raise CheckpointError(f"{self.directory / _BACKEND}: not a checkpoint of the torch_dist format")
        index = _load_index(self.directory / _INDEX)
        self._stored: dict[str, TensorStorageMetadata] = {
            key: entry for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        }
        self._where: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (entry.fqn, tuple(entry.offset)): info for entry, info in index.storage_data.items() if entry.offset
        } | {(entry.fqn, ()): info for entry, info in index.storage_data.items() if not entry.offset}
        self._places = {name: self._find(family, name) for name in family.rows}

    def __getitem__(self, name: str) -> Tensor:
        found = self._places[canonical(name)]
        if found is None:
            raise KeyError(name)
        stored = self._stored[found.key]
        lead = len(found.at)
        full = torch.empty(stored.size[lead:], dtype=stored.properties.dtype)
        filled = 0
        for chunk in stored.chunks:
            first, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            inside = [at - start for at, start in zip(found.at, first[:lead], strict=True)]
            if any(not 0 <= i < size for i, size in zip(inside, sizes[:lead], strict=True)):
                continue
            part = self._read(found.key, first)[tuple(inside)]
            spans = zip(first[lead:], sizes[lead:], strict=True)
            full[tuple(slice(start, start + size) for start, size in spans)] = part
            filled += part.numel()
        if filled != full.numel():
            raise CheckpointError(f"{self.directory}: {found.key} is not whole ({filled} of {full.numel()} elements)")
        return full

    def __iter__(self):
        return (name for name, found in self._places.items() if found is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _find(self, family: Family, name: str) -> Place | None:
        candidates = (place(family, name, stacked, spec) for stacked in (True, False) for spec in ("te", "local"))
        return next((c for c in candidates if c.key in self._stored), None)

    def _read(self, key: str, offset: tuple[int, ...]) -> Tensor:
        info = self._where.get((key, offset)) or self._where[(key, ())]
        file = self.directory / info.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(info.offset)
                data = stream.read(info.length)
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}") from None
        if len(data) != info.length:
            raise CheckpointError(f"{file}: truncated; {key} should end at byte {info.offset + info.length}")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def checkpoint_directory(path: Path) -> Path:
    """The directory with the index: `path` itself, or the one that its tracker file names."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; expected a Megatron checkpoint")
    tracker = path / TRACKER
    if tracker.exists():
        step = tracker.read_text().strip()
        path /= "release" if step == "release" else f"iter_{int(step):07d}"
    if not (path / _INDEX).exists():
        raise CheckpointError(f"{path}: neither {TRACKER} nor {_INDEX}; expected a torch_dist checkpoint")
    return path


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index by name; anything else ends the reading."""

    _MODULES = {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
    }
    _OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
    _DATACLASS = re.compile(r"^_?[A-Z][A-Za-z_]+$")

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_part = module in self._MODULES and self._DATACLASS.match(name)
        if is_dtype or is_part or (module, name) in self._OTHERS:
            return super().find_class(module, name)
        if module.startswith("megatron.core.dist_checkpointing"):
            return type(name, (), {})  # Megatron 0.15 wrapped metadata and plan; nothing of theirs is used here
        raise CheckpointError(f"the index refers to {module}.{name}, which no checkpoint index needs")


def _load_index(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            return _IndexUnpickler(stream).load()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file}: unreadable index: {error}") from None


# ---- writing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """One stored part; `dtype` is empty for a module's extra state."""

    key: str
    at: tuple[int, ...]
    of: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    offset: int
    length: int


class TorchDistWriter:
    """Writes groups of tensors, each a file of its own that appears whole or not at all; then `finish` the index."""

    def __init__(self, directory: Path, family: Family) -> None:
        self.directory, self.family, self.stacked = directory, family, uniform(family)
        directory.mkdir(parents=True, exist_ok=True)

    def has(self, group: int) -> bool:
        return self._note(group).exists()

    def write(self, group: int, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Returns the bytes written. Tensors are consumed one by one."""
        data = self.directory / _file(group)
        partial = data.with_suffix(".partial")
        entries = []
        with partial.open("wb") as stream:
            for name, tensor in tensors:
                where = place(self.family, name, self.stacked, self.family.spec)
                # The leading axes of the global tensor are part of what is stored; and only this tensor's bytes.
                whole = tensor.contiguous().view(*(1 for _ in where.at), *tensor.shape)
                if whole.untyped_storage().nbytes() != whole.nbytes:
                    whole = whole.clone()
                dtype = str(tensor.dtype).removeprefix("torch.")
                entries.append(_append(stream, where, whole, tuple(tensor.shape), dtype))
                if _LINEAR.search(name):
                    stem = where.key.rpartition(".")[0]
                    entries.append(_append(stream, Place(f"{stem}._extra_state", where.at, where.of), [None], (), ""))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, data)
        write_json(self._note(group), {"entries": [asdict(entry) for entry in entries]})
        return sum(entry.length for entry in entries)

    def finish(self, groups: int) -> None:
        """The index over all groups, and the small files that Megatron expects beside it."""
        parts: dict[str, Any] = {}
        where: dict[MetadataIndex, _StorageInfo] = {}
        for group in range(groups):
            for note in read_json(self._note(group))["entries"]:
                entry = _Entry(**{**note, **{f: tuple(note[f]) for f in ("at", "of", "shape")}})
                info = _StorageInfo(_file(group), entry.offset, entry.length)
                if not entry.dtype:
                    at, of = entry.at or (0,), entry.of or (1,)
                    key = f"{entry.key}/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}"
                    parts[key] = BytesStorageMetadata()
                    where[MetadataIndex(key)] = info
                    continue
                offset = torch.Size(entry.at + (0,) * len(entry.shape))
                chunk = ChunkStorageMetadata(offset, torch.Size((1,) * len(entry.at) + entry.shape))
                size = torch.Size(entry.of + entry.shape)
                properties = TensorProperties(dtype=getattr(torch, entry.dtype))
                stored = parts.setdefault(entry.key, TensorStorageMetadata(properties, size, []))
                if stored.size != size:
                    raise CheckpointError(f"{entry.key}: layers differ in shape, {list(stored.size)} and {list(size)}")
                stored.chunks.append(chunk)
                where[MetadataIndex(entry.key, offset)] = info
        with (self.directory / _INDEX).open("wb") as stream:
            pickle.dump(Metadata(parts, planner_data=None, storage_data=where), stream)
        torch.save({"iteration": 0, "checkpoint_version": 3.0}, self.directory / _COMMON)
        versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        write_json(self.directory / _BACKEND, {"sharded_backend": "torch_dist", **versions})
        for group in range(groups):
            self._note(group).unlink()

    def _note(self, group: int) -> Path:
        return self.directory / f"group-{group:05d}.json"


def _append(stream: Any, where: Place, content: Any, shape: tuple[int, ...], dtype: str) -> _Entry:
    first = stream.tell()
    torch.save(content, stream)
    return _Entry(where.key, where.at, where.of, shape, dtype, first, stream.tell() - first)


def _file(group: int) -> str:
    return f"__{group}_0.distcp"

"""Hugging Face checkpoints on disk: read tensor by tensor, write completely or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rlspec import files
from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.directory import read_config
from megatron_rlspec.models.headers import (
    DTYPES,
    INDEX,
    SINGLE,
    Header,
    read_headers,
)
from megatron_rlspec.models.tensor_file import ByName, CheckpointError, TensorFile

SHARD_BYTES = 5_000_000_000  # of a file of tensors, about: Transformers' own habit
# Everything but weights that a reader of the new checkpoint needs from the old one.
_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "preprocessor_config.json",
    "chat_template*",
    "*.model",
    "*.py",
)


class LazyTensors(ByName):
    """Map names to tensors in safetensors files. Every access reads the tensor from disk and checks it.

    Raises CheckpointError for a tensor that is damaged, or holds NaN or infinity.

    headers  of the tensors, by the names that they have here
    """

    def __init__(self, headers: Mapping[str, Header]) -> None:
        self.headers = self.names = headers
        self._open: TensorFile | None = None

    def __getitem__(self, name: str) -> Tensor:
        header = self.headers[name]
        # One file is mapped at a time: closing the last one gives its pages back.
        if self._open is None or self._open.path != header.path:
            self._open = TensorFile(header.path)
        tensor = self._open[header.name]
        if header.part:
            expert, start, end = header.part
            tensor = tensor[expert, start:end]
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel():
            if not all(bound.isfinite() for bound in tensor.aminmax()):
                raise CheckpointError(
                    f"{header.path}: {name} holds NaN or infinity; expected finite numbers"
                )
        return tensor


def read_hf(path: str | Path) -> tuple[dict[str, Any], LazyTensors]:
    """Read config.json and open the tensors by name, unread. Raises CheckpointError.

    Every file is opened once here, so a missing or truncated one is found before anything is done with the others.
    """
    directory = Path(path)
    config = read_config(directory)
    headers = read_headers(directory, tied=bool(config.get("tie_word_embeddings")))
    return config, LazyTensors(headers)


def write_hf(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint directory that appears whole or not at all. Arguments as of `build_hf`."""
    publish(build_hf(path, config, tensors, tokenizer_from, shard_bytes), Path(path))


def build_hf(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    linked: Mapping[str, Header] | None = None,
) -> Path:
    """Write a checkpoint directory beside `path`, and return it: more files can be added, and `publish` names it.

    `tensors` is consumed once; at most one file's worth (`shard_bytes`, and the tensor that overflows it) is held in
    memory. `tokenizer_from`: a checkpoint whose tokenizer and other small files are copied. `linked`: further tensors,
    to whose files the directory has links. What a killed writer leaves behind, `.<name>.partial`, is replaced by the
    next one.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    with building(Path(path)) as partial:
        file_of: dict[str, str] = {}
        links: dict[Path, str] = {}
        for name, header in (linked or {}).items():
            if header.path not in links:
                links[header.path] = f"link-{len(links):05d}.safetensors"
                os.symlink(header.path.resolve(), partial / links[header.path])
            file_of[name] = links[header.path]
        for count, lot in enumerate(_lots(pairs, shard_bytes), 1):
            file = f"shard-{count:05d}.safetensors"
            tensor_file.save(lot, partial / file)
            file_of |= dict.fromkeys(lot, file)
        complete(partial, config, file_of, tokenizer_from)
    return partial


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield a new directory beside `target` for `publish`. It is removed after an error, such as a full disk."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _lots(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors of at least `size` bytes together, ready to be saved."""
    lot: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        # safetensors refuses tensors that share storage, such as a split's views.
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        lot[name] = tensor.detach().to("cpu", copy=not whole).contiguous()
        held += tensor.nbytes
        if held >= size:
            yield lot
            lot, held = {}, 0
    if lot:
        yield lot


def complete(
    partial: Path,
    config: Mapping[str, Any],
    file_of: Mapping[str, str],
    tokenizer_from: str | Path | None = None,
) -> None:
    """Name the shards as Transformers expects, and add the small files."""
    shards = sorted(set(file_of.values()))
    final = {s: f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i, s in enumerate(shards, 1)}
    if len(shards) == 1:
        final = {shards[0]: SINGLE}
    total = 0
    for shard, name in final.items():
        os.rename(partial / shard, partial / name)
        total += (partial / name).stat().st_size
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: final[f] for n, f in file_of.items()},
        }
        write_json(partial / INDEX, index)
    write_json(partial / "config.json", {**config, **_stated_type(partial, config)})
    if tokenizer_from is not None:
        copy_companions(Path(tokenizer_from), partial)


def _stated_type(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the type of most of the weights, by config.json's keys for it: engines compute in the type it states."""
    sizes: Counter[str] = Counter()
    for header in read_headers(directory).values():
        sizes[header.dtype] += math.prod(header.shape)
    stated = [key for key in ("dtype", "torch_dtype") if config.get(key)]
    return dict.fromkeys(stated, DTYPES[max(sizes, key=sizes.__getitem__)])


def companions(source: Path) -> list[Path]:
    """List the tokenizer and the other small files that belong to a checkpoint."""
    found = {file for pattern in _COMPANIONS for file in source.glob(pattern)}
    return sorted(file for file in found if file.is_file())


def copy_companions(source: Path, target: Path) -> None:
    """Copy the tokenizer and the other small files that belong to a checkpoint. Raises OSError."""
    for file in companions(source):
        shutil.copyfile(file, target / file.name)  # without its mode: files follow the umask


def publish(partial: Path, target: Path, *, replace: bool = False) -> None:
    """Give a finished directory its name, once all of it is on the disk. `replace`: an older one of that name goes."""
    for path in sorted(partial.rglob("*"), reverse=True):
        files.sync(path)
    files.sync(partial)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if replace and target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(PermissionError):  # a directory that may be written to but not read
        files.sync(target.parent)


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all. Raises OSError."""
    files.write(file, json.dumps(data, indent=2) + "\n")

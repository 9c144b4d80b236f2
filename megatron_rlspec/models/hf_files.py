"""Hugging Face checkpoints on disk: read tensor by tensor, write completely or not at all.

`read_hf` and `write_hf` are the entries. `write_hf` is `build_hf`, then `publish`; call the two yourself to add files
before the directory gets its name. A checkpoint of another format is written in `building`, then named by `publish`.
"""

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

SHARD_BYTES = 5_000_000_000  # about the size of one file of tensors, as Transformers writes them
# Patterns of the small files that `copy_companions` copies from an old checkpoint to a new one, beside which only
# weights and config.json are needed.
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

    Raises CheckpointError for a tensor that is damaged, or holds NaN or infinity, and KeyError for an unknown name. Not
    thread-safe.

    headers  of the tensors, by the names under which they are read here. `Header.name` may be another name, and the
             tensor a part of what the file holds (`read_headers`)
    """

    def __init__(self, headers: Mapping[str, Header]) -> None:
        self.headers = self.names = headers
        self._open: TensorFile | None = None

    def __getitem__(self, name: str) -> Tensor:
        header = self.headers[name]
        # Only the file read last stays mapped; dropping it gives its pages back. Every change of files opens one, so
        # callers should read tensors file by file.
        if self._open is None or self._open.path != header.path:
            self._open = TensorFile(header.path)
        tensor = self._open[header.name]
        if header.part:
            expert, start, end = header.part
            tensor = tensor[expert, start:end]
        # 8-bit floating-point types are not checked.
        if tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel():
            # NaN propagates into both bounds, so the two show every NaN and infinity.
            if not all(bound.isfinite() for bound in tensor.aminmax()):
                raise CheckpointError(
                    f"{header.path}: {name} holds NaN or infinity; expected finite numbers"
                )
        return tensor


def read_hf(path: str | Path) -> tuple[dict[str, Any], LazyTensors]:
    """Read config.json, and return the tensors by name, each of which is read on access. Raises CheckpointError.

    The headers of all files are read here, so a missing or truncated file is found before any tensor is used. A tied
    head is not among the names: it is the embedding.
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
    """Write a checkpoint directory beside `path`, and return it. `publish` then gives it the name `path`.

    Two processes must not build one path at the same time (`building`).

    config          config.json, of which only the stated number type is replaced, by that of the tensors
    tensors         by Hugging Face name, each name once, consumed once. At least one must be here or in `linked`. At
                    most one file's worth (`shard_bytes`, and the tensor that overflows it) is in memory
    tokenizer_from  a checkpoint whose tokenizer and other small files are copied
    linked          further tensors, which stay in their own files: the directory gets symbolic links to these

    A killed writer leaves `.<name>.partial` behind; the next one replaces it. Raises OSError for a full disk.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    with building(Path(path)) as partial:
        file_of: dict[str, str] = {}  # a tensor's name -> its file; `complete` renames the files
        links: dict[Path, str] = {}
        for name, header in (linked or {}).items():
            if header.path not in links:
                links[header.path] = f"link-{len(links):05d}.safetensors"
                os.symlink(header.path.resolve(), partial / links[header.path])
            file_of[name] = links[header.path]
        for count, part in enumerate(_in_parts(pairs, shard_bytes), 1):
            file = f"shard-{count:05d}.safetensors"
            tensor_file.save(part, partial / file)
            file_of |= dict.fromkeys(part, file)
        complete(partial, config, file_of, tokenizer_from)
    return partial


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield a new directory beside `target`, for `publish` after the block. An error in the block removes it.

    A directory that a killed writer left is removed first. So two processes must not build one target at the same time:
    `conversion/convert.py` takes a lock.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _in_parts(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Yield parts, by name, for one file each: at least `size` bytes, in the last part perhaps fewer.

    Their tensors are on the CPU, contiguous, and no views. Two names for one tensor stay one storage, which safetensors
    refuses: the caller must not yield both.
    """
    part: dict[str, Tensor] = {}
    part_bytes = 0
    for name, tensor in tensors:
        # safetensors refuses tensors that share storage, such as a split's views, so a view is copied.
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        part[name] = tensor.detach().to("cpu", copy=not whole).contiguous()
        part_bytes += tensor.nbytes
        if part_bytes >= size:
            yield part
            part, part_bytes = {}, 0
    if part:
        yield part


def complete(
    partial: Path,
    config: Mapping[str, Any],
    file_of: Mapping[str, str],
    tokenizer_from: str | Path | None = None,
) -> None:
    """Name the files as Transformers expects, and add the index, config.json and the small files.

    partial  the directory, with all files of tensors in it, at least one, under any other names. They are renamed
    file_of  a tensor's name -> the name of its file in `partial`, for all tensors

    Raises OSError, and CheckpointError for a file that is not safetensors.
    """
    # Sorted, so that equal inputs give equal directories. The number of files, which each name contains, is known only
    # now.
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
    """Return the number type that most elements have, under those of config.json's two keys for it that `config` has.

    Engines compute in the type that config.json states, so it must be that of the tensors here. `directory` must have
    its files' final names and the index already: the types are read from it.
    """
    sizes: Counter[str] = Counter()
    for header in read_headers(directory).values():
        sizes[header.dtype] += math.prod(header.shape)
    stated = [key for key in ("dtype", "torch_dtype") if config.get(key)]
    return dict.fromkeys(stated, DTYPES[max(sizes, key=sizes.__getitem__)])


def companions(source: Path) -> list[Path]:
    """List the tokenizer and the other small files that belong to a checkpoint, sorted; config.json is not one."""
    matching = {file for pattern in _COMPANIONS for file in source.glob(pattern)}
    return sorted(file for file in matching if file.is_file())


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files that `companions` lists into the directory `target`, over files of their names. Raises OSError."""
    for file in companions(source):
        shutil.copyfile(file, target / file.name)  # without its mode: files follow the umask


def publish(partial: Path, target: Path, *, replace: bool = False) -> None:
    """Give a finished directory its name, once all of it is on the disk.

    Raises OSError, also without `replace` for a directory of that name that is not empty. A `.<name>.old` beside it is
    removed in any case.

    replace  remove an older directory of that name. It is renamed first, to `.<name>.old`: if this process dies between
             the two renames, no directory has the name, but both are on the disk
    """
    # Children before their directories. After a power failure the name must not stand for files without their bytes.
    for path in sorted(partial.rglob("*"), reverse=True):
        files.sync(path)
    files.sync(partial)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if replace and target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old, ignore_errors=True)
    # so that the new name survives a power failure, too
    with contextlib.suppress(PermissionError):  # a directory that may be written to but not read
        files.sync(target.parent)


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all. Raises OSError."""
    files.write(file, json.dumps(data, indent=2) + "\n")

"""The keys and values of one sample's tokens as files, by which they go from one engine to another.

Every tensor-parallel rank writes its own heads into a file of its own, NAME.RANK, in its engine's folder. A reading
rank takes its heads from the files that have them, so source and target may have different tensor-parallel sizes.
Layout: the size of the header (8 bytes), its CRC-32 (4 bytes), both little-endian, the header as MessagePack, then
the columns, ordered model -> head -> layer -> keys, values -> column, so that a head is one piece, whose
fingerprint the header has. A column is one slot of the KV cache. Nothing is unpickled, and no byte is used before
header, size and checksum are checked.

A head is gathered and summed where the cache is, and crosses between host and device through pinned memory.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from megatron_rlspec.extensions.migration.sglang.folder import Folder
from megatron_rlspec.push.fingerprint import fingerprint, unread
from megatron_rlspec.push.fingerprint import read as values_of
from megatron_rlspec.rollout.sglang.scheduler import bucket_memory

_PREFIX = struct.Struct("<QI")
_MARK = struct.Struct("<Q")


class KvShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of one model's cache that a rank holds.

    heads  the first key/value head, how many, and how many the model has
    sizes  numbers per head of a key and of a value
    """

    layers: int
    heads: tuple[int, int, int]
    sizes: tuple[int, int]

    @property
    def whole(self) -> tuple[int, int, tuple[int, int]]:
        """Return what does not depend on the rank."""
        return self.layers, self.heads[2], self.sizes


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The caches of a rank. Source and target must have `whole` in common.

    ranks   of the engine
    pairs   whether column p holds the drafter's pair (h_p, x_p+1), beside the target's token x_p
    models  the target, then the drafter if there is one
    """

    dtype: str
    ranks: int
    pairs: bool
    models: tuple[KvShape, ...]

    @property
    def whole(self) -> tuple[str, bool, tuple[Any, ...]]:
        """Return what does not depend on the rank."""
        return self.dtype, self.pairs, tuple(model.whole for model in self.models)

    def __str__(self) -> str:
        parts = [
            f"{model.layers} layers of {model.heads[2]} heads of {model.sizes}"
            for model in self.models
        ]
        return f"{self.dtype}, {' and '.join(parts)}{', in pairs' if self.pairs else ''}"

    def head_bytes(self, model: int) -> int:
        """Return the size of one column of one head of a model, of all its layers."""
        return (
            self.models[model].layers
            * sum(self.models[model].sizes)
            * getattr(torch, self.dtype).itemsize
        )

    def column_bytes(self) -> int:
        """Return the size of one column of all models."""
        return sum(model.heads[1] * self.head_bytes(i) for i, model in enumerate(self.models))

    def heads(self) -> Iterator[tuple[int, int]]:
        """Return all (model, head), in the order of a file."""
        for i, model in enumerate(self.models):
            for head in range(model.heads[0], model.heads[0] + model.heads[1]):
                yield i, head


def held_by(rank: int, ranks: int, total: int) -> tuple[int, int, int]:
    """Return `KvShape.heads` of a rank. With fewer heads than ranks, neighbours hold the same one, as in SGLang.

    Raises ValueError unless one of ranks and heads divides the other.
    """
    if total % ranks and ranks % total:
        raise ValueError(
            f"{total} key and value heads do not divide among {ranks} tensor-parallel ranks"
        )
    return rank * total // ranks, max(1, total // ranks), total


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds: columns [first, last) of the sample `id`.

    tokens   all its tokens that the columns below `last` depend on: `last` of them, one more if they are pairs
    version  of the weights that computed the columns
    marks    fingerprint of each head, 8 bytes little-endian, in the order of `KVLayout.heads`
    """

    id: str
    tokens: list[int]
    first: int
    last: int
    version: str
    layout: KVLayout
    marks: bytes = b""

    @property
    def place(self) -> tuple[list[int], int, int]:
        """Return what all ranks' files of one sample have in common."""
        return self.tokens, self.first, self.last


def layout_of(
    pools: Sequence[Any], totals: Sequence[int], rank: int, ranks: int, pairs: bool
) -> KVLayout:
    """Describe SGLang's `MHATokenToKVPool`s of this rank, of models with so many key and value heads.

    Raises ValueError for a cache of another kind.
    """
    for pool in pools:
        if type(pool).__name__ != "MHATokenToKVPool" or pool.kv_cache_layout != "nhd":
            raise ValueError(
                f"the KV cache is a {type(pool).__name__}; only plain keys and values move"
            )
    if len({pool.store_dtype for pool in pools}) != 1:
        raise ValueError("target and drafter hold their KV caches in different types")
    models = []
    for pool, total in zip(pools, totals, strict=True):
        heads = held_by(rank, ranks, total)
        if heads[1] != pool.head_num:
            raise ValueError(
                f"this rank holds {pool.head_num} key and value heads of {total}, expected {heads[1]}"
            )
        models.append(KvShape(pool.layer_num, heads, (pool.head_dim, pool.v_head_dim)))
    return KVLayout(str(pools[0].store_dtype).removeprefix("torch."), ranks, pairs, tuple(models))


def _heads(pools: Sequence[Any], count: int) -> Iterator[tuple[Any, int, int]]:
    """Yield (pool, head, bytes of `count` columns), in the order of `KVLayout.heads`."""
    for pool in pools:
        row = pool.k_buffer[0][0, 0].nbytes + pool.v_buffer[0][0, 0].nbytes
        for head in range(pool.head_num):
            yield pool, head, pool.layer_num * row * count


def _parts(piece: Tensor, pool: Any, head: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every buffer [slots, size] of a head with its part [count, size] of the head's bytes."""
    at = 0
    for layer in range(pool.layer_num):
        for whole in (pool.k_buffer[layer], pool.v_buffer[layer]):
            buffer = whole[:, head]
            size = count * buffer[0].nbytes
            yield buffer, piece[at : at + size].view(buffer.dtype).view(count, buffer.shape[1])
            at += size


def _pieces(columns: Tensor, layout: KVLayout, count: int) -> Iterator[Tensor]:
    """Return the bytes of each head, in the order of `KVLayout.heads`."""
    at = 0
    for model, _ in layout.heads():
        size = layout.head_bytes(model) * count
        yield columns[at : at + size]
        at += size


def _gather(pools: Sequence[Any], slots: Tensor) -> Iterator[tuple[Tensor, int | Tensor]]:
    """Yield each head's columns in host memory, until the next one, and their `unread` fingerprint.

    Raises ValueError if the device has no room for one head.
    """
    try:
        for pool, head, size in _heads(pools, len(slots)):
            piece = torch.empty(size, dtype=torch.uint8, device=slots.device)
            for buffer, part in _parts(piece, pool, head, len(slots)):
                part.copy_(buffer.index_select(0, slots))
            yield (
                bucket_memory.landing(size).copy_(piece) if slots.is_cuda else piece,
                unread(piece),
            )
    except torch.OutOfMemoryError:
        raise ValueError("the GPU has no room to gather the columns of one head") from None


def write(folder: Folder, name: str, header: Header, pools: Sequence[Any], slots: Tensor) -> int:
    """Write the columns in these slots to the file `name`, which appears whole; return their size.

    Raises OSError, and ValueError without room on the device.
    """
    heads = len(list(header.layout.heads()))
    unfinished = f"{name}.part"
    file = folder.create(unfinished)
    try:
        with file:
            file.seek(_PREFIX.size + len(_encoded(header, [0] * heads)))
            marks = []
            for piece, mark in _gather(pools, slots):
                file.write(piece.numpy().data)
                marks.append(mark)
            head = _encoded(header, values_of(marks))
            file.seek(0)
            file.write(_PREFIX.pack(len(head), zlib.crc32(head)) + head)
        folder.rename(unfinished, name)
    except (OSError, ValueError):
        folder.remove(unfinished)
        raise
    return header.layout.column_bytes() * len(slots)


def _encoded(header: Header, marks: Sequence[int]) -> bytes:
    return msgspec.msgpack.encode(
        msgspec.structs.replace(header, marks=b"".join(map(_MARK.pack, marks)))
    )


def read(folder: Folder, name: str, expected: KVLayout) -> tuple[Header, Tensor]:
    """Return a header and the bytes of this rank's columns, from the files NAME.RANK that have its heads.

    Raises ValueError, in one line, unless these files are whole, fit each other, and fit this engine.
    """
    first = _header(folder, f"{name}.0", expected)
    count = first.last - first.first
    columns = torch.empty(expected.column_bytes() * count, dtype=torch.uint8)
    headers = {0: first}
    pieces = _pieces(columns, expected, count)
    for (model, head), piece in zip(expected.heads(), pieces, strict=True):
        # Of ranks that hold the same head, the first one's file is read.
        total, ranks = expected.models[model].heads[2], first.layout.ranks
        rank = head // max(1, total // ranks) * max(1, ranks // total)
        file = f"{name}.{rank}"
        if rank not in headers:
            headers[rank] = _header(folder, file, expected)
            if _common(headers[rank]) != _common(first):
                raise ValueError(
                    f"{file}: columns of another sample or moment than those of rank 0"
                )
        _read_head(folder, file, headers[rank], model, head, piece)
    return first, columns


def _common(header: Header) -> tuple[Any, ...]:
    """Return what the files of all ranks have in common."""
    return header.id, header.place, header.version, header.layout.ranks


def _header(folder: Folder, path: str, expected: KVLayout) -> Header:
    try:
        with folder.open(path) as file:
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size:
                raise ValueError(f"{path}: not the columns of a sample")
            size, checksum = _PREFIX.unpack(prefix)
            whole = os.fstat(file.fileno()).st_size
            content = file.read(size) if size <= whole else b""
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(content) < size or zlib.crc32(content) != checksum:
        raise ValueError(f"{path}: the checksum of its header does not fit")
    try:
        header = msgspec.msgpack.decode(content, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not the columns of a sample: {error}") from None
    if header.layout.whole != expected.whole:
        raise ValueError(
            f"{path}: columns of another kind: {header.layout}; this engine's are {expected}"
        )
    rank = int(path.rpartition(".")[2])
    total = [model.heads[2] for model in expected.models]
    if not 0 <= rank < header.layout.ranks:
        raise ValueError(f"{path}: rank {rank} of {header.layout.ranks}")
    if [model.heads for model in header.layout.models] != [
        held_by(rank, header.layout.ranks, n) for n in total
    ]:
        raise ValueError(
            f"{path}: heads {[model.heads for model in header.layout.models]}, which rank {rank} lacks"
        )
    if not 0 <= header.first <= header.last or len(header.tokens) != header.last + expected.pairs:
        raise ValueError(
            f"{path}: columns {header.first} to {header.last} of {len(header.tokens)} tokens"
        )
    columns = whole - size - _PREFIX.size
    if columns != header.layout.column_bytes() * (header.last - header.first):
        raise ValueError(f"{path}: {columns} bytes for columns {header.first} to {header.last}")
    return header


def _read_head(
    folder: Folder, path: str, header: Header, model: int, head: int, piece: Tensor
) -> None:
    """Read one head's columns into `piece`."""
    index = list(header.layout.heads()).index((model, head))
    count = header.last - header.first
    before = sum(
        header.layout.head_bytes(other) * count for other, _ in list(header.layout.heads())[:index]
    )
    try:
        with folder.open(path) as file:
            file.seek(before - header.layout.column_bytes() * count, os.SEEK_END)
            read = file.readinto(piece.numpy().data)  # type: ignore[attr-defined]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    mark = header.marks[index * _MARK.size : (index + 1) * _MARK.size]
    if read != len(piece) or _MARK.pack(fingerprint(piece)) != mark:
        raise ValueError(f"{path}: the checksum of head {head} does not fit")


def scatter(columns: Tensor, pools: Sequence[Any], slots: Tensor) -> None:
    """Write the last len(slots) of a rank's columns into these slots. A GPU gets one layer of a head at a time."""
    count = len(columns) // sum(size for *_, size in _heads(pools, 1))
    at = 0
    for pool, head, size in _heads(pools, count):
        piece = columns[at : at + size]
        piece = bucket_memory.landing(size).copy_(piece) if slots.is_cuda else piece
        for buffer, part in _parts(piece, pool, head, count):
            buffer.index_copy_(0, slots, part[count - len(slots) :].to(slots.device))
        at += size

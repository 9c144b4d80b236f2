"""The keys and values of one sample's tokens as a file, by which they go from one engine to another.

Every tensor-parallel rank writes and reads the file of its own heads. Layout: the size of the header (8 bytes), the
CRC-32 of all that follows (4 bytes), both little-endian, the header as MessagePack, then the columns, ordered
model -> layer -> keys, values -> column. A column is one slot of the KV cache. Nothing is unpickled, and no byte is
used before header, size and checksum are checked.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from megatron_rlspec.rollout.sglang.server import bucket_file

_PREFIX = struct.Struct("<QI")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of one model's cache that a rank holds.

    heads  the first key/value head, and how many
    sizes  numbers per head of a key and of a value
    """

    layers: int
    heads: tuple[int, int]
    sizes: tuple[int, int]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What source and target must have in common.

    pairs   whether column p holds the drafter's pair (h_p, x_p+1), beside the target's token x_p
    models  the target, then the drafter if there is one
    """

    dtype: str
    pairs: bool
    models: tuple[Model, ...]

    def column_bytes(self) -> int:
        """Return the size of one column of all models."""
        numbers = sum(model.layers * model.heads[1] * sum(model.sizes) for model in self.models)
        return numbers * getattr(torch, self.dtype).itemsize


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds: columns [first, last) of the sample `id`.

    tokens   all its tokens that the columns below `last` depend on: `last` of them, one more if they are pairs
    version  of the weights that computed the columns
    """

    id: str
    tokens: list[int]
    first: int
    last: int
    version: str
    layout: Layout

    @property
    def place(self) -> tuple[list[int], int, int]:
        """Return what all ranks' files of one sample have in common."""
        return self.tokens, self.first, self.last


def layout_of(pools: Sequence[Any], rank: int, pairs: bool) -> Layout:
    """Describe SGLang's `MHATokenToKVPool`s of this rank. Raises ValueError for a cache of another kind."""
    for pool in pools:
        if type(pool).__name__ != "MHATokenToKVPool" or pool.kv_cache_layout != "nhd":
            raise ValueError(f"the KV cache is a {type(pool).__name__}; only plain keys and values move")
    if len({pool.store_dtype for pool in pools}) != 1:
        raise ValueError("target and drafter hold their KV caches in different types")
    models = [
        Model(pool.layer_num, (rank * pool.head_num, pool.head_num), (pool.head_dim, pool.v_head_dim)) for pool in pools
    ]
    return Layout(str(pools[0].store_dtype).removeprefix("torch."), pairs, tuple(models))


def _buffers(pools: Sequence[Any]) -> list[Tensor]:
    """Return all keys and values [slots, heads, size], in the file's order."""
    found: list[Tensor] = []
    for pool in pools:
        for layer in range(pool.layer_num):
            found += [pool.k_buffer[layer], pool.v_buffer[layer]]
    return found


def write(path: str, header: Header, pools: Sequence[Any], slots: Tensor) -> int:
    """Write the columns in these slots; the file appears whole. Returns its columns' bytes. Raises OSError."""
    data = torch.empty(header.layout.column_bytes() * len(slots), dtype=torch.uint8)
    at = 0
    for buffer in _buffers(pools):
        part = buffer[slots].reshape(-1).view(torch.uint8)
        data[at : at + len(part)].copy_(part)
        at += len(part)
    head = msgspec.msgpack.encode(header)
    content = data.numpy().data
    unfinished = f"{path}.part"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(_PREFIX.pack(len(head), zlib.crc32(content, zlib.crc32(head))) + head)
            file.write(content)
        os.rename(unfinished, path)
    except OSError:
        os.unlink(unfinished)
        raise
    return len(data)


def read(path: str, expected: Layout) -> tuple[Header, Tensor]:
    """Return the header and the columns' bytes. Raises ValueError, in one line, unless the file is whole and fits."""
    try:
        with bucket_file.open_regular(path) as file:
            whole = bytearray(file.read())
    except (OSError, bucket_file.NotRegularError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or 'no regular file'}") from None
    if len(whole) < _PREFIX.size:
        raise ValueError(f"{path}: not the columns of a sample")
    size, checksum = _PREFIX.unpack_from(whole)
    content = memoryview(whole)[_PREFIX.size :]
    if size > len(content) or zlib.crc32(content) != checksum:
        raise ValueError(f"{path}: its checksum does not fit what it holds")
    try:
        header = msgspec.msgpack.decode(content[:size], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not the columns of a sample: {error}") from None
    if header.layout != expected:
        raise ValueError(f"{path}: columns of another kind: {header.layout}; this engine's are {expected}")
    if not 0 <= header.first <= header.last or len(header.tokens) != header.last + expected.pairs:
        raise ValueError(f"{path}: columns {header.first} to {header.last} of {len(header.tokens)} tokens")
    columns = torch.frombuffer(whole, dtype=torch.uint8)[_PREFIX.size + size :]
    if len(columns) != expected.column_bytes() * (header.last - header.first):
        raise ValueError(f"{path}: {len(columns)} bytes for columns {header.first} to {header.last}")
    return header, columns


def scatter(columns: Tensor, pools: Sequence[Any], slots: Tensor) -> None:
    """Write the last len(slots) of a file's columns into these slots."""
    buffers = _buffers(pools)
    row = sum(buffer[0].numel() * buffer.element_size() for buffer in buffers)
    count = len(columns) // row
    at = 0
    for buffer in buffers:
        size = count * buffer[0].numel() * buffer.element_size()
        # A copy: the file's header leaves the columns at an address that views of wider types may not have.
        part = columns[at : at + size].clone().view(buffer.dtype).view(count, *buffer.shape[1:])
        buffer[slots] = part[count - len(slots) :].to(buffer.device)
        at += size

"""Read the header of a GGUF file (llama.cpp's format): its metadata, and where each tensor lies.

Every length is compared with the file before anything is read, and tensors must lie as llama.cpp requires: one after
the other, each aligned, up to the end of the file. A damaged size, type or place is therefore found here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_rlspec.models.tensor_file import CheckpointError
from megatron_rlspec.texts import shown

VERSIONS = (2, 3)
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "u1 i1 u2 i2 u4 i4 f4 b1 u8 i8 f8".split(), strict=True))
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Place:
    """One tensor: its name, its shape with the rows first, its type, and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """The metadata by key, and the tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Place]


def read_header(path: Path) -> Header:
    """Read and check the header. Raises CheckpointError, and OSError for a file that cannot be read."""
    with path.open("rb") as file:
        return _Reader(path, file).header()


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size

    def header(self) -> Header:
        if self.take(4) != b"GGUF":
            raise self.wrong("its first bytes are not GGUF")
        version = self.number("<u4")
        if version not in VERSIONS:
            raise self.wrong(f"version {version}; expected {' or '.join(map(str, VERSIONS))}, little-endian")
        count, keys = self.number("<u8"), self.number("<u8")
        self.room(24 * count + 13 * keys, "its numbers of tensors and keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text()
            if key in metadata:
                raise self.wrong(f"the key {key[:60]!r} appears twice")
            metadata[key] = self.value(self.number("<u4"), key)
        return Header(metadata, self.places(count, metadata.get("general.alignment", 32)))

    def places(self, count: int, alignment: Any) -> dict[str, Place]:
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self.wrong(f"general.alignment is {str(alignment)[:60]}; expected a power of two from 8")
        found: dict[str, Place] = {}
        expected = 0
        for _ in range(count):
            place = self.place()
            if place.name in found:
                raise self.wrong(f"the tensor {place.name[:60]!r} appears twice")
            if place.offset != expected:
                raise self.wrong(f"{place.name} begins at {place.offset} of the data; expected {expected}")
            found[place.name] = place
            end = expected + place.bytes
            expected = end + -end % alignment
        begin = self.file.tell()
        begin += -begin % alignment
        if found and not begin + end <= self.size <= begin + expected:
            raise self.wrong(f"{self.size - begin} bytes of tensors; expected {end}")
        moved = {name: Place(name, p.shape, p.kind, begin + p.offset, p.bytes) for name, p in found.items()}
        return moved

    def place(self) -> Place:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.text()
        dimensions = self.number("<u4")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise self.wrong(f"{name} has {dimensions} dimensions; expected 1 to {_MOST_DIMENSIONS}")
        sizes = [self.number("<u8") for _ in range(dimensions)]
        number, offset = self.number("<u4"), self.number("<u8")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.wrong(f"{name} has type {number}, which the package gguf does not know") from None
        block, width = GGML_QUANT_SIZES[kind]
        if sizes[0] % block or 0 in sizes:
            raise self.wrong(f"{name} has rows of {sizes[0]} values; expected a multiple of {block} for {kind.name}")
        values = 1
        for size in sizes:
            values *= size
        return Place(name, tuple(reversed(sizes)), kind, offset, values // block * width)

    def value(self, kind: int, key: str, *, inside: bool = False) -> Any:
        if kind in _SCALARS:
            return self.number(f"<{_SCALARS[kind]}")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or inside:
            what = "an array inside an array" if kind == _ARRAY else f"type {kind}"
            raise self.wrong(f"{key} holds {what}, which no model's metadata has")
        of, count = self.number("<u4"), self.number("<u8")
        if of in _SCALARS:
            form = np.dtype(f"<{_SCALARS[of]}")
            return np.frombuffer(self.take(count * form.itemsize), form).tolist()
        self.room(8 * count, key)
        return [self.value(of, key, inside=True) for _ in range(count)]

    def text(self) -> str:
        return self.take(self.number("<u8")).decode(errors="replace")

    def number(self, form: str) -> Any:
        kind = np.dtype(form)
        return np.frombuffer(self.take(kind.itemsize), kind)[0].item()

    def take(self, count: int) -> bytes:
        self.room(count, f"byte {self.file.tell()}")
        return self.file.read(count)

    def room(self, count: int, what: str) -> None:
        if count > self.size - self.file.tell():
            raise self.wrong(f"{what} leads beyond its end")

    def wrong(self, what: str) -> CheckpointError:
        what = shown(what, str)  # it can quote the file
        return CheckpointError(f"{self.path}: truncated or not GGUF ({what})")

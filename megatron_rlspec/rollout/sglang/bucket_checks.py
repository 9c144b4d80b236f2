"""Check a bucket of weights before anything is loaded: every byte of it has a use, and every tensor a place.

A bucket in a request is a safetensors file (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON
header {name: {dtype, shape, data_offsets}}, and the tensors' bytes. Offsets count from the end of the header. Imports
no SGLang.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_rlspec.rollout.sglang.schemas import Refusal, TensorEntry, TensorsBody, plain, shown
from megatron_rlspec.types import Scope

LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WIDEST = 8  # bytes of one number


@dataclass(frozen=True)
class ServedTensors:
    """The tensors that an engine holds.

    shapes    by the checkpoint's names
    drafter   names of the drafter's tensors
    elements  lower bound of the number of elements of all tensors
    apart     why shared memory does not reach every rank; "" if they do
    unnamed   why there are no shapes; "" if there are. Without shapes only the models' loaders can refuse a tensor
    """

    shapes: Mapping[str, Sequence[int]]
    drafter: frozenset[str]
    elements: int = 0
    unnamed: str = ""
    apart: str = ""

    @property
    def largest_bucket(self) -> int:
        """Return the largest size in bytes that a bucket of all tensors can have."""
        named = sum(math.prod(shape) for shape in self.shapes.values())
        return LONGEST_HEADER + WIDEST * max(named, self.elements)

    def check(self, name: str, shape: Sequence[int], scope: Scope) -> None:
        """Raise Refusal unless the engine holds `name` of this shape and `scope` covers it."""
        if self.unnamed and (scope == "all" or not self.drafter):
            return
        expected = self.shapes.get(name)
        if expected is None and not self.unnamed:
            near = difflib.get_close_matches(name[:200], self.shapes, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Refusal(400, f"the engine has no tensor {plain(name)}{hint}")
        if scope != "all" and (name in self.drafter) != (scope == "drafter"):
            owner = "drafter" if name in self.drafter else "target"
            raise Refusal(400, f"{plain(name)} is the {owner}'s; scope is {scope}")
        if expected is not None and list(shape) != list(expected):
            raise Refusal(400, f"{plain(name)} is {list(shape)}, but the engine's is {list(expected)}")


class Entry(NamedTuple):
    """Bytes `first` to `end` of the bucket, header included, hold the tensor `name`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    end: int


def laid_out(asked: TensorsBody, served: ServedTensors, scope: Scope) -> list[Entry]:
    """Return the position of each tensor of a bucket whose bytes follow one another. Raises Refusal."""
    counts = {len(asked.names), len(asked.dtypes), len(asked.shapes)}
    if len(counts) > 1:
        raise Refusal(
            400,
            f"names, dtypes and shapes have {len(asked.names)}, {len(asked.dtypes)} and {len(asked.shapes)} entries; "
            "expected as many of each",
        )
    if len(set(asked.names)) != len(asked.names):
        raise Refusal(400, "names holds a name twice; expected distinct names")
    entries = []
    first = 0
    for name, kind, shape in zip(asked.names, asked.dtypes, asked.shapes, strict=True):
        served.check(name, shape, scope)
        dtype = getattr(torch, kind)
        if first % dtype.itemsize:
            raise Refusal(
                400, f"{plain(name)} begins at byte {first}; expected a multiple of {dtype.itemsize}: widest first"
            )
        end = first + math.prod(shape) * dtype.itemsize
        entries.append(Entry(name, dtype, tuple(shape), first, end))
        first = end
    return entries


def read_entries(data: memoryview, served: ServedTensors, scope: Scope) -> list[Entry]:
    """Return the position of each tensor in a bucket. Raises Refusal for a malformed file or an unexpected tensor."""
    size = len(data)
    header, begin = _header(data, size)
    entries = []
    for name, value in header.items():
        if name == "__metadata__":
            _check_metadata(value)
            continue
        entries.append(_entry(name, value, begin))
    if not entries:
        raise _malformed(size, "it holds no tensor")
    at = begin
    for entry in sorted(entries, key=lambda entry: (entry.first, entry.end)):
        if entry.first != at:
            problem = "overlaps another tensor" if entry.first < at else "leaves unused bytes before it"
            raise _malformed(size, f"{plain(entry.name)} {problem}")
        at = entry.end
    if at != size:
        raise _malformed(size, f"its tensors end at byte {at}")
    for entry in entries:
        served.check(entry.name, entry.shape, scope)
        if entry.first % entry.dtype.itemsize:
            raise _malformed(
                size, f"{plain(entry.name)} begins at byte {entry.first}; expected a multiple of {entry.dtype.itemsize}"
            )
    return entries


def header_length(data: bytes | memoryview, size: int) -> int:
    """Return the length of the header of a bucket of `size` bytes from its first 8. Raises Refusal."""
    if size < 8 or len(data) < 8:
        raise _malformed(size, "expected 8 bytes of header length and a header")
    length = int.from_bytes(data[:8], "little")
    if length > min(size - 8, LONGEST_HEADER):
        raise _malformed(size, f"its header length is {length} bytes")
    return length


def _header(data: memoryview, size: int) -> tuple[dict[str, Any], int]:
    length = header_length(data, size)
    try:
        header = json.loads(bytes(data[8 : 8 + length]).decode(), object_pairs_hook=_distinct)
    except Refusal:
        raise
    except (ValueError, RecursionError):
        raise _malformed(size, "its header is not JSON in UTF-8") from None
    if not isinstance(header, dict):
        raise _malformed(size, f"its header is {shown(header)}; expected an object")
    return header, 8 + length


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Refusal(400, f"not a safetensors file: {plain(name)} appears twice in the header")
        found[name] = value
    return found


def _check_metadata(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Refusal(400, "not a safetensors file: __metadata__ must map names to strings")


def _entry(name: str, value: Any, begin: int) -> Entry:
    try:
        entry = TensorEntry.model_validate(value)
    except ValueError:
        raise Refusal(
            400,
            f"not a safetensors file: {plain(name)} is {shown(value)}; expected dtype (one of {', '.join(DTYPES)}), "
            "shape and data_offsets in whole, non-negative numbers",
        ) from None
    first, end = entry.data_offsets
    size = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if end - first != size:
        raise Refusal(
            400,
            f"not a safetensors file: {plain(name)} of {entry.dtype} {entry.shape} needs {size} bytes, "
            f"but data_offsets are [{first}, {end}]",
        )
    return Entry(name, DTYPES[entry.dtype], tuple(entry.shape), begin + first, begin + end)


def _malformed(size: int, problem: str) -> Refusal:
    return Refusal(400, f"not a safetensors file of {size} bytes: {problem}")

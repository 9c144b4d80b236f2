"""Check a bucket of weights before anything is loaded: the engine holds each tensor, in this shape.

`read_entries` checks a bucket in a request's body, also that its tensors cover all its bytes. `check_described` checks
one whose bytes come another way. A bucket in a body is a safetensors file
(https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header, and the tensors' bytes.
`push/bucket.py` writes it, and `http/weight_routes.py` calls these checks. No number type is compared with the
engine's. Imports no SGLang.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megatron_rlspec.rollout.sglang.schemas import Refusal, TensorsBody, plain
from megatron_rlspec.types import Scope

LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
# safetensors' names of the types that may be sent -> torch's; the inverse of `_DTYPE_NAMES` in `push/bucket.py`.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class ServedTensors:
    """The tensors that an engine holds, by their names in the checkpoint: the answer of the command `shapes`.

    `_shapes` in `scheduler/control.py` makes the answer.

    shapes   full shapes, without tensor parallelism; {} if `unnamed`
    drafter  names of the drafter's own tensors, also if `unnamed`, where the family's table has them
    unnamed  why the engine cannot name its tensors, so that names and shapes are not checked; "" if it can
    """

    shapes: Mapping[str, Sequence[int]]
    drafter: frozenset[str]
    unnamed: str = ""

    def check(self, name: str, shape: Sequence[int], scope: Scope) -> None:
        """Raise Refusal unless the engine holds `name` of this full shape and `scope` covers it.

        With `unnamed` only the scope is checked, and that only where `drafter` has names.
        """
        if self.unnamed and (scope == "all" or not self.drafter):
            # no shapes are known; and no owner is asked for, or the family's table names none
            return
        expected = self.shapes.get(name)
        if expected is None and not self.unnamed:
            similar = difflib.get_close_matches(name[:200], self.shapes, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise Refusal(400, f"the engine has no tensor {plain(name)}{hint}")
        owner = "drafter" if name in self.drafter else "target"
        if scope not in ("all", owner):
            raise Refusal(400, f"{plain(name)} is the {owner}'s; scope is {scope}")
        if expected is not None and list(shape) != list(expected):
            raise Refusal(
                400, f"{plain(name)} is {list(shape)}, but the engine's is {list(expected)}"
            )


class Entry(NamedTuple):
    """A tensor of a bucket: its bytes are `first` to `end` - 1, counted from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    end: int


def check_described(body: TensorsBody, served: ServedTensors, scope: Scope) -> None:
    """Raise Refusal unless the engine holds every tensor that a request without a safetensors header describes.

    Their bytes are not in the request. `gpu_memory.copy_from_handle` compares their number with the memory of a handle.
    A broadcast is received into memory of the size that shapes and types give. Raises ValueError, and not Refusal, if
    `names` and `shapes` have different lengths.
    """
    for name, shape in zip(body.names, body.shapes, strict=True):
        served.check(name, shape, scope)


def read_entries(data: memoryview, served: ServedTensors, scope: Scope) -> list[Entry]:
    """Return where each tensor's bytes lie in a bucket, ascending; [] for a file without tensors.

    data  the whole safetensors file

    Raises Refusal for a malformed file or a wrong tensor. The safetensors library checks that the tensors cover the
    bytes after the header, without holes and overlaps. So each tensor begins where the one before it ends.
    """
    entries = []
    # The first byte after the header. `_header` checks the length before `first` is used.
    first = 8 + int.from_bytes(data[:8], "little")
    for name, kind, shape in _header(data):
        if kind not in DTYPES:
            raise Refusal(400, f"{plain(name)} is of {kind}; expected dtype {', '.join(DTYPES)}")
        dtype = DTYPES[kind]
        served.check(name, shape, scope)
        # SGLang's loaders view the bytes as numbers, which torch does at a multiple of their size only.
        if first % dtype.itemsize:
            raise Refusal(
                400,
                f"{plain(name)} begins at byte {first}; expected a multiple of {dtype.itemsize}: widest first",
            )
        end = first + math.prod(shape) * dtype.itemsize
        entries.append(Entry(name, dtype, tuple(shape), first, end))
        first = end
    return entries


def _header(data: memoryview) -> list[tuple[str, str, list[int]]]:
    """Return name, type and shape of each tensor of a safetensors file, in the order of their bytes. Raises Refusal.

    The library reads files only. So it gets a file in memory of the bucket's length, in which only the header is
    written: the tensors' bytes are not copied, and take no memory.
    """
    # A length above the limit is refused by the library; without `min` the whole bucket would be copied for that.
    header = data[: 8 + min(int.from_bytes(data[:8], "little"), LONGEST_HEADER)]
    descriptor = os.memfd_create("rlspec-header", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, header)
        # The library compares the file's length with the header.
        os.ftruncate(descriptor, len(data))
        with safe_open(f"/proc/self/fd/{descriptor}", framework="np") as file:
            tensors = [(name, file.get_slice(name)) for name in file.offset_keys()]
            return [(name, tensor.get_dtype(), tensor.get_shape()) for name, tensor in tensors]
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise Refusal(
            400, f"not a safetensors file of {len(data)} bytes: {plain(reason)}"
        ) from None
    finally:
        os.close(descriptor)

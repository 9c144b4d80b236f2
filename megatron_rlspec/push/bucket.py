"""Buckets: tensors that travel together, laid out once in one piece of memory for all engines that take them.

The tensors' bytes follow one another. In memory for requests a safetensors header comes first
(https://huggingface.co/docs/safetensors: 8 bytes of its length, then JSON), so that a bucket is a request's body.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Named = tuple[str, Tensor]

_ATTENTION = ".self_attn."
_ALIGNED = 8  # bytes; the widest number
# Engines refuse tensors of other types.
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def bucket_bytes(memory: Memory | None = None) -> int:
    """Return about how many bytes one bucket in this memory has.

    Without a GPU buckets are small, because the system takes time to fill new pages on both sides. With a GPU they are
    larger, because every request takes a fixed time. In CPU memory they have 512 MiB: engines take them through shared
    memory, of which containers have little. In GPU memory they have up to 2 GiB, but at most a sixteenth of what is
    free: about five such pieces exist at once, here and in an engine on the same GPU.
    """
    if not torch.cuda.is_available():
        return 64 << 20
    if memory is None or memory.device.type == "cpu":
        return 512 << 20
    free, _ = torch.cuda.mem_get_info(memory.device)
    return max(64 << 20, min(2 << 30, free // 16))


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Yield lists of at least one tensor and about `limit` bytes; tensors of one attention module stay in one list.

    SGLang's loaders for latent attention fuse two projections if they come in one call, and drop them if not.
    """
    bucket: list[Named] = []
    gathered_bytes = 0
    last = ""
    for name, tensor in tensors:
        module, attention, _ = name.rpartition(_ATTENTION)
        together = bool(attention) and module == last
        full = gathered_bytes + tensor.nbytes > limit
        if bucket and full and not together:
            yield bucket
            bucket = []
            gathered_bytes = 0
        bucket.append((name, tensor))
        gathered_bytes += tensor.nbytes
        last = module
    if bucket:
        yield bucket


def sizes_of(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of bytes of each tensor. `dtypes` and `shapes` are those of `Bucket.described`."""
    sizes = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        sizes.append(math.prod(shape) * getattr(torch, dtype).itemsize)
    return sizes


def unpacked(
    data: Tensor, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[Named]:
    """Return views of the tensors in `data`, the bytes of a bucket, as `Bucket.described` names them."""
    parts = data.split(sizes_of(dtypes, shapes))
    tensors = []
    for name, part, dtype, shape in zip(names, parts, dtypes, shapes, strict=True):
        tensors.append((name, part.view(getattr(torch, dtype)).view(shape)))
    return tensors


class Memory:
    """Two pieces of memory for buckets, used in turn: one is filled while the other one travels.

    Between pushes CPU memory is kept, pinned if there is a GPU, and GPU memory is returned.

    headed  buckets begin with a safetensors header
    joint   all engines with this memory take a bucket in one call of `send`
    """

    def __init__(
        self, device: str | torch.device = "cpu", headed: bool = False, joint: bool = False
    ) -> None:
        self.device = torch.device(device)
        self.headed = headed
        self.joint = joint
        self._pieces: list[Tensor] = []  # the one that was used last is the last one

    def turn(self, needed: int) -> Tensor:
        """Return the piece that was not used last, of at least `needed` bytes, uint8. Its bucket must have arrived."""
        piece: Tensor | None = None
        if len(self._pieces) == 2:
            piece = self._pieces.pop(0)
        if piece is None or piece.numel() < needed:
            piece = None  # frees it before a larger one is made
            piece = self._make(needed)
        self._pieces.append(piece)
        return piece

    def close(self) -> None:
        """End a push."""
        if self.device.type != "cpu":
            self._pieces.clear()

    def _make(self, needed: int) -> Tensor:
        pinned = self.device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(needed, dtype=torch.uint8, device=self.device, pin_memory=pinned)


class Bucket:
    """Tensors under their checkpoint's names, those of the widest numbers first.

    memory  the tensors are copied into a piece of it, and `tensors` is empty afterwards. None: nothing is copied, and
            `tensors` holds them
    """

    def __init__(self, tensors: Sequence[Named], memory: Memory | None = None) -> None:
        self.tensors = sorted(tensors, key=lambda named: -named[1].element_size())
        self.names = [name for name, _ in self.tensors]
        self.dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in self.tensors]
        self.shapes = [list(tensor.shape) for _, tensor in self.tensors]
        self.bytes = sum(tensor.nbytes for _, tensor in self.tensors)
        self._piece: Tensor | None = None
        self._begin = 0
        self._copied: Any = None
        if memory is not None:
            self._pack(memory)

    def _pack(self, memory: Memory) -> None:
        """Copy the tensors into a piece of `memory`. Returns before a copy from a GPU has ended."""
        header = self._header() if memory.headed else b""
        self._begin = len(header)
        self._piece = memory.turn(self._begin + self.bytes)
        if header:
            self._piece[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        tensors = [tensor.detach() for _, tensor in self.tensors]
        parts = self.data().split([tensor.nbytes for tensor in tensors])
        places = [
            part.view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        torch._foreach_copy_(places, tensors, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            self._copied = torch.cuda.Event()
            self._copied.record()
        self.tensors = []

    @property
    def described(self) -> dict[str, list[Any]]:
        """Say in JSON what `data` holds."""
        return {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}

    def file(self) -> Tensor:
        """Return the safetensors file, uint8 on the CPU, in `headed` memory."""
        return self._packed()[: self._begin + self.bytes]

    def data(self) -> Tensor:
        """Return the tensors' bytes, one after the other."""
        return self._packed()[self._begin : self._begin + self.bytes]

    def _packed(self) -> Tensor:
        assert self._piece is not None, "not packed"
        if self._copied is not None:
            self._copied.synchronize()
        return self._piece

    def _header(self) -> bytes:
        entries = {}
        offset = 0
        for name, tensor in self.tensors:
            place = [offset, offset + tensor.nbytes]
            kind = _NAMES.get(tensor.dtype, str(tensor.dtype))
            entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": place}
            offset += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        return len(text).to_bytes(_ALIGNED, "little") + text

"""Buckets: tensors that travel together, laid out once in one piece of memory for all engines that take them.

The tensors' bytes follow one another, in the order of `Bucket.names`. In `headed` memory a safetensors header comes
first (https://huggingface.co/docs/safetensors: 8 bytes of its length, then JSON), so that a bucket is the body of an
HTTP request.

The other side is in the engines, and must change with this file. `rollout/sglang/bucket_checks.py` reads a bucket with
a header. A bucket without one is described by a request beside it (`Bucket.described`, sent by `client/transport.py`),
and the engine cuts it up by the description: by `unpacked` where it opened the trainer's GPU memory, by SGLang's own
code after a broadcast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Named = tuple[str, Tensor]

_ATTENTION = ".self_attn."  # in the Hugging Face names of all families (`models/families.py`)
# 8 bytes: those of the widest number type, at a multiple of which the data begin; and those of safetensors' field for
# the header's length.
_ALIGNED = 8
# safetensors' names of number types. Engines refuse tensors of other types (`DTYPES` of `bucket_checks.py`).
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def bucket_bytes(memory: Memory | None = None) -> int:
    """Return about how many bytes one bucket in this memory should have.

    memory  None: the engine takes tensors without a copy

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
    """Split the tensors, in their order, into lists of at most `limit` bytes, for one `Bucket` each.

    A list is longer than `limit` if one tensor is, or if it must stay together: tensors of one attention module that
    follow one another stay in one list. SGLang's loader for latent attention fuses `q_a_proj` and
    `kv_a_proj_with_mqa` if both come in one call, and drops a single one.
    """
    bucket: list[Named] = []
    gathered_bytes = 0
    last_module = ""
    for name, tensor in tensors:
        module, attention, _ = name.rpartition(_ATTENTION)  # without attention, `module` is ""
        together = bool(attention) and module == last_module
        full = gathered_bytes + tensor.nbytes > limit
        if bucket and full and not together:
            yield bucket
            bucket = []
            gathered_bytes = 0
        bucket.append((name, tensor))
        gathered_bytes += tensor.nbytes
        last_module = module
    if bucket:
        yield bucket


def sizes_of(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of bytes of each tensor. `dtypes` (such as "bfloat16") and `shapes` as in `Bucket.described`.

    `unpacked` needs it, and `scheduler/bucket_memory.py`, which must know how many bytes to copy from a handle.
    """
    sizes = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        sizes.append(math.prod(shape) * getattr(torch, dtype).itemsize)
    return sizes


def unpacked(
    data: Tensor, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[Named]:
    """Return the tensors of a bucket, named. They are views of `data`, which must stay unchanged while they are used.

    data                   uint8 [sum of `sizes_of`], as `Bucket.data` returns it, on any device
    names, dtypes, shapes  of `Bucket.described`
    """
    parts = data.split(sizes_of(dtypes, shapes))
    tensors = []
    for name, part, dtype, shape in zip(names, parts, dtypes, shapes, strict=True):
        tensors.append((name, part.view(getattr(torch, dtype)).view(shape)))
    return tensors


class Memory:
    """Two pieces of memory for buckets, used in turn: one is filled while the other one travels.

    Between pushes CPU memory is kept, pinned if there is a GPU; GPU memory is given back, since the trainer's step
    needs it. A transport owns it (`rollout/sglang/client/transport.py`), so engines with one transport share it, and
    a bucket is laid out once for all of them. Not thread-safe: `update.py` fills one bucket at a time.

    headed  buckets begin with a safetensors header
    joint   all engines with this memory take a bucket in one call of `RolloutEngine.send`
    """

    def __init__(
        self, device: str | torch.device = "cpu", headed: bool = False, joint: bool = False
    ) -> None:
        self.device = torch.device(device)
        self.headed = headed
        self.joint = joint
        self._pieces: list[Tensor] = []  # at most two; the last one was used last

    def turn(self, needed: int) -> Tensor:
        """Return the piece that was not used last, or a new one: uint8 of at least `needed` bytes, with any content.

        The caller overwrites the piece, in which the last bucket but one lay. So that bucket must have arrived
        everywhere; `Update.send` waits for it.
        """
        piece: Tensor | None = None
        if len(self._pieces) == 2:
            piece = self._pieces.pop(0)
        if piece is None or piece.numel() < needed:
            # Frees a piece that is too small before the new one is made: both may not fit into memory together.
            piece = None
            piece = self._make(needed)
        self._pieces.append(piece)
        return piece

    def close(self) -> None:
        """End a push: give GPU memory back. No bucket in it may still travel. `turn` may be called again afterwards."""
        if self.device.type != "cpu":
            self._pieces.clear()

    def _make(self, needed: int) -> Tensor:
        pinned = self.device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(needed, dtype=torch.uint8, device=self.device, pin_memory=pinned)


class Bucket:
    """Tensors under the names of their Hugging Face checkpoint, those of the widest numbers first; each name once.

    With a `memory` a bucket lasts until the next bucket but one is packed there (`Memory.turn`).

    memory  the tensors are copied into a piece of it, and `tensors` is empty afterwards. None: nothing is copied, and
            `tensors` holds them, for an engine in this process: `file` and `data` may not be called
    names, dtypes, shapes  of the tensors, in the order of their bytes, which need not be that of the argument
    bytes   of all tensors, without a header
    """

    def __init__(self, tensors: Sequence[Named], memory: Memory | None = None) -> None:
        # Widest numbers first: then each tensor begins at a multiple of its numbers' size without padding between
        # tensors. A view of the bytes in the tensor's number type needs that.
        self.tensors = sorted(tensors, key=lambda named: -named[1].element_size())
        self.names = [name for name, _ in self.tensors]
        self.dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in self.tensors]
        self.shapes = [list(tensor.shape) for _, tensor in self.tensors]
        self.bytes = sum(tensor.nbytes for _, tensor in self.tensors)
        self._piece: Tensor | None = None  # uint8; it may be longer than the bucket
        self._header_bytes = 0  # 0 also for memory without headers
        self._copied: Any = None  # the CUDA event after the last copy; None: copied already
        if memory is not None:
            self._pack(memory)

    def _pack(self, memory: Memory) -> None:
        """Copy the tensors into a piece of `memory`. Returns before a copy from a GPU has ended."""
        header = self._header() if memory.headed else b""  # reads `tensors`, which is emptied below
        self._header_bytes = len(header)
        self._piece = memory.turn(self._header_bytes + self.bytes)
        if header:
            self._piece[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        tensors = [tensor.detach() for _, tensor in self.tensors]
        parts = self.data().split([tensor.nbytes for tensor in tensors])
        places = [
            part.view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        # `places` are views of the piece. Copies from a GPU run while the exporter makes the next tensors; `_packed`
        # waits for them by the event.
        torch._foreach_copy_(places, tensors, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            self._copied = torch.cuda.Event()
            self._copied.record()
        self.tensors = []  # so that the exporter's copies can be freed

    @property
    def described(self) -> dict[str, list[Any]]:
        """Return what `data` holds, in its order, for JSON. The keys are fields of `rollout/sglang/schemas.py`."""
        return {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}

    def file(self) -> Tensor:
        """Return the whole safetensors file, uint8. Only for a bucket in `headed` memory."""
        return self._packed()[: self._header_bytes + self.bytes]

    def data(self) -> Tensor:
        """Return the tensors' bytes, one after the other, uint8, without the header."""
        return self._packed()[self._header_bytes : self._header_bytes + self.bytes]

    def _packed(self) -> Tensor:
        """Return the piece of memory, once the copies into it have ended."""
        assert self._piece is not None, "not packed"
        if self._copied is not None:
            self._copied.synchronize()
        return self._piece

    def _header(self) -> bytes:
        """Return the first bytes of a safetensors file: the length of the JSON (8 bytes), then the JSON.

        The JSON is padded, so that the data begin at a multiple of 8 bytes. Offsets in it count from the data's begin.
        """
        entries = {}
        offset = 0
        for name, tensor in self.tensors:
            place = [offset, offset + tensor.nbytes]
            # A type that engines refuse is written, too: then their message names it.
            kind = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": place}
            offset += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        return len(text).to_bytes(_ALIGNED, "little") + text

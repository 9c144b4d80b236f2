"""Memory of the trainer on a GPU that engines on the same machine open, by a handle: 64 bytes, in base64.

The driver's own functions make and open handles. torch's way also sends the name of a file with reference counts, which
the reader opens, and both torch and SGLang send pickles. A piece is filled when its handle is sent, and free again when
the engine has answered, so no event travels. The engine copies a piece to memory of its own, and closes it.
"""

from __future__ import annotations

import base64
import ctypes
from functools import cache

import torch
from torch import Tensor

from megatron_rlspec.push.bucket import Memory

_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the engine's GPU may be another one


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class GpuMemory(Memory):
    """Pieces that engines can open. Their addresses are the driver's, since a handle is of a whole allocation."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self._handles: dict[int, str] = {}  # by a piece's address

    def handle(self, piece: Tensor) -> str:
        """Return the handle of a piece, in base64."""
        return self._handles[piece.data_ptr()]

    def _make(self, needed: int) -> Tensor:
        torch.empty(1, device=self.device)  # makes torch's context this thread's
        allocated = _Allocation(needed)
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), allocated.address)
        self._handles[allocated.address.value] = base64.b64encode(bytes(handle)).decode()
        return torch.as_tensor(allocated, device=self.device)


class _Allocation:
    """Bytes on the current GPU, which torch reads as an array, and which go with the last tensor of them."""

    def __init__(self, size: int) -> None:
        self.address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(size))
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address.value, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self.address.value:
            _driver().cuMemFree_v2(self.address)


def copied(handle: str, size: int, device: torch.device) -> Tensor:
    """Return a copy of a piece's first `size` bytes, uint8. Raises ValueError."""
    landed = torch.empty(size, dtype=torch.uint8, device=device)
    opened = ctypes.c_uint64()
    asked = _Handle.from_buffer_copy(base64.b64decode(handle))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), asked, ctypes.c_uint(_PEERS))
    try:
        base = ctypes.c_uint64()
        allocated = ctypes.c_size_t()
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(allocated), opened)
        if size > allocated.value:
            raise ValueError(
                f"the tensors have {size} bytes, and the trainer's memory has {allocated.value}"
            )
        stream = torch.cuda.current_stream(device)
        target = ctypes.c_uint64(landed.data_ptr())
        queue = ctypes.c_void_p(stream.cuda_stream)
        _call("cuMemcpyDtoDAsync_v2", target, opened, ctypes.c_size_t(size), queue)
        stream.synchronize()
    finally:
        _driver().cuIpcCloseMemHandle(opened)
    return landed


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise ValueError(
            f"CUDA's {name} refuses with code {code}; expected a trainer on this machine whose GPU this one can read; "
            "otherwise push with push.transport=http"
        )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")

"""Memory of the trainer on a GPU that engines on the same machine open, by a handle: 64 bytes, in base64.

`GpuMemory` is the trainer's side: the transport `Handles` (`client/transport.py`) sends its handles.
`copy_from_handle` is the engine's side, in each scheduler process (`scheduler/bucket_memory.py`).

CUDA's driver functions are called directly. torch's own sharing also sends the name of a file with reference counts,
which the reader opens, and both torch and SGLang send pickles. No CUDA event is shared: a piece is filled completely
before its handle is sent, and it is used again only after the engine has answered. The engine copies the piece to
memory of its own and closes it before it answers.
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
    """Pieces of GPU memory that engines can open.

    Each piece is an allocation of CUDA's driver and not of torch: a handle always names a whole allocation, and torch
    puts many tensors into one.
    """

    def __init__(self) -> None:
        super().__init__("cuda")
        # By a piece's address. An address that the driver uses again gets a new entry in `_make`.
        self._handles: dict[int, str] = {}

    def handle(self, piece: Tensor) -> str:
        """Return the handle of a piece that `turn` returned, in base64. Raises KeyError for any other tensor.

        piece  the piece or a view of it from its first byte on. Fill it completely before the handle is sent
        """
        return self._handles[piece.data_ptr()]

    def _make(self, needed: int) -> Tensor:
        """Allocate a piece, `[needed]` uint8, and keep its handle. `Memory.turn` calls it. Raises ValueError."""
        # Makes torch's CUDA context this thread's, in which the driver then allocates.
        torch.empty(1, device=self.device)
        allocated = _Allocation(needed)
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), allocated.address)
        self._handles[allocated.address.value] = base64.b64encode(bytes(handle)).decode()
        return torch.as_tensor(allocated, device=self.device)


class _Allocation:
    """Bytes on the current GPU. `torch.as_tensor` makes a tensor of them without a copy, which keeps this object alive.

    The bytes are freed with the last tensor that views them. An engine must have closed them by then.

    size  in bytes, above 0
    """

    def __init__(self, size: int) -> None:
        self.address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(size))
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address.value, False),  # not read-only
            "version": 3,
        }

    def __del__(self) -> None:
        if self.address.value:  # 0 if the allocation failed
            _driver().cuMemFree_v2(self.address)


def copy_from_handle(handle: str, size: int, device: torch.device) -> Tensor:
    """Return a copy of the first `size` bytes of a piece of another process, `[size]` uint8, on `device`.

    handle  of the piece, 64 bytes in base64
    device  the current GPU of this thread: the driver opens the handle there

    Raises ValueError if CUDA refuses, or if the piece is smaller. The piece is closed again, also after an error.
    """
    copy = torch.empty(size, dtype=torch.uint8, device=device)
    opened = ctypes.c_uint64()  # the piece's address in this process
    ipc_handle = _Handle.from_buffer_copy(base64.b64decode(handle))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), ipc_handle, ctypes.c_uint(_PEERS))
    try:
        base = ctypes.c_uint64()  # where the allocation begins; not used
        allocated = ctypes.c_size_t()
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(allocated), opened)
        if size > allocated.value:
            raise ValueError(
                f"the tensors have {size} bytes, and the trainer's memory has {allocated.value}"
            )
        stream = torch.cuda.current_stream(device)
        target = ctypes.c_uint64(copy.data_ptr())
        queue = ctypes.c_void_p(stream.cuda_stream)
        _call("cuMemcpyDtoDAsync_v2", target, opened, ctypes.c_size_t(size), queue)
        # Before the handle is closed, and before the answer, after which the trainer fills the piece again.
        stream.synchronize()
    finally:
        _driver().cuIpcCloseMemHandle(opened)
    return copy


def _call(name: str, *arguments: object) -> None:
    """Call a function of CUDA's driver. Raises ValueError for another result than 0, which is success."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise ValueError(
            f"CUDA's {name} refuses with code {code}; expected a trainer on this machine whose GPU this one can read; "
            "otherwise push with push.transport=http"
        )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")

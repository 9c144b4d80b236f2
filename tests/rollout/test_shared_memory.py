"""Memory of a trainer that another process maps: the same bytes, after SIGKILL too; and nothing else can be opened."""

import ctypes
import fcntl
import gc
import os
import shutil
import signal
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch

from megatron_rlspec.rollout.sglang import gpu_memory
from megatron_rlspec.rollout.sglang.schemas import HandleBody
from megatron_rlspec.rollout.sglang.shared_memory import NotSharedError, SharedMemory, mapped

NAME = "0123456789abcdef" * 2


def trainer(pipe: Connection) -> None:
    memory = SharedMemory()
    piece = memory.take(100_000)
    piece.copy_(torch.arange(100_000) % 251)
    pipe.send(memory.place(piece))
    pipe.recv()


def test_what_was_mapped_outlives_a_killed_trainer():
    ours, theirs = forked.context().Pipe()
    process = forked.context().Process(target=trainer, args=(theirs,), daemon=True)
    process.start()
    where = ours.recv()
    assert where["process"] == process.pid
    bucket = mapped(**where, size=99_999)
    bucket[5] = 0  # a loader that writes changes its own copy
    assert mapped(**where, size=100_000)[5] == 5
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert torch.equal(bucket[6:], (torch.arange(99_999) % 251).to(torch.uint8)[6:])
    with pytest.raises(NotSharedError, match=r"not within reach \(No such file or directory\); expected a trainer on"):
        mapped(**where, size=100)


def test_pieces_are_kept_between_pushes_and_leave_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    memory = SharedMemory()
    piece = memory.take(1000)
    where = memory.place(piece)
    memory.give(piece)
    memory.close()
    assert memory.place(memory.take(900)) == where
    larger = memory.take(1 << 20)
    assert memory.place(larger) != where
    views = [mapped(**memory.place(larger), size=1 << 20) for _ in range(3)]
    del piece, larger, memory, views
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def of(descriptor: int, name: str = NAME) -> dict[str, object]:
    return {"process": os.getpid(), "descriptor": descriptor, "name": name}


def test_no_other_file_is_opened(tmp_path: Path):
    memory = SharedMemory()
    piece = memory.take(4096)
    where = memory.place(piece)
    for wrong in ({"name": NAME}, {"descriptor": 0}, {"process": os.getppid()}):
        with pytest.raises(NotSharedError) as refused:
            mapped(**{**where, **wrong}, size=4096)
        assert "\n" not in str(refused.value) and "push.transport=group or http" in str(refused.value)
    with pytest.raises(NotSharedError, match="the tensors have 4097 bytes, and the trainer's memory has 4096"):
        mapped(**where, size=4097)
    with pytest.raises(NotSharedError, match="the tensors have 0 bytes"):
        mapped(**where, size=0)
    opened = os.memfd_create(f"rlspec-bucket-{NAME}", os.MFD_ALLOW_SEALING)
    os.ftruncate(opened, 4096)
    with pytest.raises(NotSharedError, match="not sealed"):
        mapped(**of(opened), size=4096)
    fcntl.fcntl(opened, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert mapped(**of(opened), size=4096).numel() == 4096
    os.close(opened)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/etc/passwd"), Path("/dev/zero")):
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(NotSharedError, match="no memory of this push"):
            mapped(**of(opened), size=10)
        os.close(opened)


DRIVER = """
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned char bytes[64]; } handle;
typedef struct { char *address; size_t size; char rest[48]; } place;
static place made;
int opened = 0;
int cuMemAlloc_v2(char **address, size_t size) {
    made.size = size; *address = made.address = calloc(1, size); return 0;
}
int cuMemFree_v2(char *address) { free(address); return 0; }
int cuIpcGetMemHandle(handle *found, char *address) { memcpy(found, &made, 64); return address != made.address; }
int cuIpcOpenMemHandle_v2(char **address, handle asked, unsigned int flags) {
    place there; memcpy(&there, &asked, 64);
    if (flags != 1 || there.address != made.address) return 400;
    opened++; *address = there.address; return 0;
}
int cuMemGetAddressRange_v2(char **base, size_t *size, char *address) { *base = address; *size = made.size; return 0; }
int cuMemcpyDtoDAsync_v2(char *to, char *from, size_t size, void *stream) { memcpy(to, from, size); return 0; }
int cuIpcCloseMemHandle(char *address) { opened--; return address != made.address; }
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver in C over the host's memory, so that calls have the form of the real one's."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "driver.so", tmp_path / "driver.c"], check=True)
    library = ctypes.CDLL(str(tmp_path / "driver.so"))
    monkeypatch.setattr(gpu_memory, "_driver", lambda: library)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return library


def test_a_handle_of_a_gpus_memory_is_64_bytes_and_closed_after_the_copy(driver, monkeypatch):
    """With the driver's stand-in, on the CPU. `test_sglang_gpu.py` pushes through the real one."""

    def read(allocated, device):
        place = allocated.__cuda_array_interface__
        held = (ctypes.c_ubyte * place["shape"][0]).from_address(place["data"][0])
        held.allocated = allocated
        return torch.frombuffer(held, dtype=torch.uint8)

    memory = gpu_memory.GpuMemory()
    memory.device = torch.device("cpu")
    monkeypatch.setattr(torch, "as_tensor", read)
    piece = memory.take(1000)
    piece.copy_(torch.arange(1000) % 251)
    where = HandleBody(**memory.place(piece), names=["x"], dtypes=["float32"], shapes=[[250]])
    opened = ctypes.c_int.in_dll(driver, "opened")
    for size in (1000, 10):
        assert torch.equal(gpu_memory.copied(where.handle, size, memory.device), piece[:size]) and not opened.value
    with pytest.raises(NotSharedError, match="the tensors have 1001 bytes, and the trainer's memory has 1000"):
        gpu_memory.copied(where.handle, 1001, memory.device)
    with pytest.raises(NotSharedError, match="cuIpcOpenMemHandle_v2 refuses with code 400; expected a trainer on"):
        gpu_memory.copied("A" * 86 + "==", 10, memory.device)
    assert not opened.value

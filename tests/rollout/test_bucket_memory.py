"""A bucket of weights reaches an engine from the trainer's GPU memory, and the loaders of both models."""

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.rollout.sglang import gpu_memory
from megatron_rlspec.rollout.sglang.scheduler.drafter_push import load_twice
from megatron_rlspec.rollout.sglang.schemas import HandleBody

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
    piece = memory.turn(1000)
    piece.copy_(torch.arange(1000) % 251)
    where = HandleBody(handle=memory.handle(piece), names=["x"], dtypes=["float32"], shapes=[[250]])
    opened = ctypes.c_int.in_dll(driver, "opened")
    for size in (1000, 10):
        assert (
            torch.equal(gpu_memory.copy_from_handle(where.handle, size, memory.device), piece[:size])
            and not opened.value
        )
    with pytest.raises(ValueError, match="the tensors have 1001 bytes, and the trainer's memory has 1000"):
        gpu_memory.copy_from_handle(where.handle, 1001, memory.device)
    with pytest.raises(ValueError, match="cuIpcOpenMemHandle_v2 refuses with code 400; expected a trainer on"):
        gpu_memory.copy_from_handle("A" * 86 + "==", 10, memory.device)
    assert not opened.value


class Model(torch.nn.Module):
    """Loads the names it knows and skips the others, as SGLang's models do."""

    def __init__(self, *names):
        super().__init__()
        self.weights = dict.fromkeys(names, 0)

    def load_weights(self, weights):
        self.weights |= {name: value for name, value in weights if name in self.weights}


@pytest.mark.parametrize("success", [True, False])
def test_drafter_loads_what_the_target_received(success):
    """SGLang before 0.5.23 gives buckets of a process group to the target only. A failed update changes no drafter."""
    target, drafter = Model("layer", "head"), Model("mtp", "head")
    manager = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
        draft_worker=SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=SimpleNamespace(model=drafter))),
    )

    def target_only(manager, request):
        for bucket in request:  # a generator per bucket: it can be read once only
            target.load_weights(item for item in bucket)
        return SimpleNamespace(success=success)

    loader = target.load_weights
    load_twice(target_only, manager, [[("layer", 1), ("mtp", 2)], [("head", 3)]])
    assert target.weights == {"layer": 1, "head": 3} and target.load_weights == loader
    assert drafter.weights == ({"mtp": 2, "head": 3} if success else {"mtp": 0, "head": 0})

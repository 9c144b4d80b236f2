"""Memory of a trainer that another process maps: the same bytes, after SIGKILL too; and nothing else can be opened."""

import fcntl
import gc
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import forked
import pytest
import torch

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

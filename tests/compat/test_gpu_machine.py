"""What needs the files of a GPU machine and no GPU: a mount namespace with devices, a driver and a small /dev/shm.

The driver is a library that answers one question, torch is a package that says which CUDA it was built for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rlspec.compat import machine

ROOT = Path(__file__).parents[2]
ALLOWED = shutil.which("unshare") and not subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ALLOWED, reason="user and mount namespaces are forbidden here"),
]
# Make a /dev with what Python needs, devices and shared memory, and mount it in place of the machine's.
MACHINE = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$NEW_DEV"
for name in null zero random urandom; do touch "$NEW_DEV/$name"; mount --bind "/dev/$name" "$NEW_DEV/$name"; done
ln -s /proc/self/fd "$NEW_DEV/fd"
mkdir "$NEW_DEV/shm"
mount -t tmpfs -o "size=$SHM_SIZE" tmpfs "$NEW_DEV/shm"
for name in $DEVICES; do touch "$NEW_DEV/$name"; done
mount --rbind "$NEW_DEV" /dev
exec "$@"
"""
DRIVER = """
int cuDriverGetVersion(int *version) { *version = %d; return %d; }
int cuInit(unsigned flags) { __builtin_trap(); }
"""


def on_machine(
    folder: Path, *command: str, shm: str, devices: str = "nvidiactl nvidia0", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on such a machine. `shm`: size of /dev/shm, as mount takes it."""
    (folder / "dev").mkdir(exist_ok=True)
    own = {**os.environ, "NEW_DEV": str(folder / "dev"), "SHM_SIZE": shm, "DEVICES": devices, **environment}
    own["PYTHONPATH"] = str(ROOT)
    started = ["unshare", "-rm", "bash", "-c", MACHINE, "machine", *command]
    return subprocess.run(started, env=own, capture_output=True, text=True, timeout=280)


def driver(folder: Path, version: int, answer: int = 0) -> str:
    """Compile a libcuda.so.1 that states a version, and ends what initialises it; return the directory."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler for a library in place of the driver's")
    (folder / "driver.c").write_text(DRIVER % (version, answer))
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.c")]
    subprocess.run(command, check=True)
    return str(folder)


def doctor(folder: Path, libraries: str, shm: str, devices: str = "nvidiactl nvidia0 nvidia1") -> dict[str, str]:
    """Return the doctor's lines about a machine with a torch for CUDA 13.0, by name."""
    torch = folder / "checkout/torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("")
    (torch / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    command = [sys.executable, "-m", "megatron_rlspec.cli", "doctor", "--gpu", "--path", str(torch.parent)]
    done = on_machine(folder, *command, "--json", "-", shm=shm, devices=devices, LD_LIBRARY_PATH=libraries)
    assert done.returncode == 1, done.stderr  # no Transformer Engine
    return {row["name"]: row["text"] for row in json.loads(done.stdout)}


def test_the_doctor_reads_the_driver_and_shared_memory(tmp_path):
    told = doctor(tmp_path, driver(tmp_path, 13000), "64m")
    assert "gpu-driver" not in told and "gpu-torch" not in told
    assert "/dev/shm holds 64 MiB, but pushing weights to 2 engines needs up to 4096 MiB" in told["gpu-shared-memory"]


def test_enough_shared_memory_is_no_lack(tmp_path):
    told = doctor(tmp_path, driver(tmp_path, 13020), "4g")
    assert "gpu-shared-memory" not in told and "gpu-driver" not in told


def test_an_old_driver_is_named_with_both_versions(tmp_path):
    told = doctor(tmp_path, driver(tmp_path, 12080), "4g")
    assert "torch is built for CUDA 13.0, but the driver runs CUDA up to 12.8" in told["gpu-driver"]


@pytest.mark.parametrize("answers", [True, False], ids=["with an error", "not at all"])
def test_a_driver_that_does_not_answer_is_a_container_without_gpus(tmp_path, answers):
    libraries = driver(tmp_path, 13000, answer=999) if answers else ""
    told = doctor(tmp_path, libraries, "4g")
    assert "libcuda.so.1 does not answer: start the container with --gpus all" in told["gpu-driver"]


def test_without_devices_it_is_an_image_that_is_being_built(tmp_path):
    told = doctor(tmp_path, "", "64m", devices="")
    assert not told.keys() & {"gpu-driver", "gpu-shared-memory"}


# The sizes of MiMo-7B's buckets, in the order given: each is written into the memory that a push over HTTP lands in.
PUSH = """
import json, os, sys
sys.path.insert(0, "benchmarks")
import torch
from bigram_model import config_of
from synthetic import shapes
from megatron_rlspec.rollout.sglang.cpu import stand_ins
from megatron_rlspec.push import bucket

stand_ins.install()
from megatron_rlspec.rollout.sglang.http.weight_routes import _Memory

config = config_of(36, 4096, 151680, 32, 8, 11008, torch.bfloat16)
tensors = [(name, torch.empty(shape, dtype=torch.bfloat16, device="meta")) for name, shape in shapes(config).items()]
if sys.argv[1] == "backwards":
    tensors.reverse()
memory, most, total = _Memory(), 0, 0
for lot in bucket.buckets(tensors, 512 << 20):
    size = sum(tensor.nbytes for _, tensor in lot)
    with memory.piece(size) as piece:
        piece[-1] = 1
        about = os.statvfs("/dev/shm")
        most = max(most, (about.f_blocks - about.f_bfree) * about.f_frsize)
    total += size
memory.trim()
print(json.dumps({"total": total, "most": most}))
"""


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_a_push_of_7b_over_http_needs_less_shared_memory_than_the_doctor_asks_for(tmp_path, order):
    command = [sys.executable, "-c", PUSH, order]
    done = on_machine(tmp_path, *command, shm=str(machine.SHARED_BYTES_PER_GPU), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{found['total'] / 1e9:.1f} GB pushed, at most {found['most'] / (1 << 30):.2f} GiB of /dev/shm")
    assert found["total"] > 15e9 and found["most"] < machine.SHARED_BYTES_PER_GPU
    small = on_machine(tmp_path, *command, shm="1g", OMP_NUM_THREADS="1")
    assert small.returncode != 0, "half of it is not enough"

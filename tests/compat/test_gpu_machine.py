"""What needs the files of a GPU machine and no GPU: a mount namespace with devices, a driver and a small /dev/shm.

The driver is a library that answers one question, torch is a package that says which CUDA it was built for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def doctor(folder: Path, libraries: str, shm: str, devices: str = "nvidiactl nvidia0 nvidia1") -> str:
    """Return what the doctor says about a machine with a torch for CUDA 13.0."""
    torch = folder / "checkout/torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("")
    (torch / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    command = [sys.executable, "-m", "megatron_rlspec.cli", "doctor", "--gpu", "--path", str(torch.parent)]
    done = on_machine(folder, *command, shm=shm, devices=devices, LD_LIBRARY_PATH=libraries)
    assert done.returncode == 1, done.stderr  # no Transformer Engine
    return done.stdout


def test_the_doctor_reads_the_driver_and_shared_memory(tmp_path):
    told = doctor(tmp_path, driver(tmp_path, 13000), "64m")
    assert "driver" not in told and "built without CUDA" not in told
    assert "/dev/shm holds 64 MiB, but pushing weights to 2 engines needs up to 4096 MiB" in told

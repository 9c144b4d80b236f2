"""Find what a machine lacks for training and serving on GPUs.

`gather` reads the facts once. `lacks` compares them with what is needed. `rlspec doctor` (`commands/doctor.py`) prints
the result, also while an image is built. No CUDA context is created, so a running job is not disturbed.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rlspec.compat.installed import locate

# Module -> its distribution. Without one of them, training or serving on GPUs cannot start.
NEEDED = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "transformers": "transformers",
    "sglang": "sglang",
}
# Packages with code that is compiled for one torch and one CUDA. Only an import shows whether it fits those installed.
# Module to import -> its package; a package that is not installed is not imported.
COMPILED = {
    "torch": "torch",
    "transformer_engine.pytorch": "transformer_engine",
    "sgl_kernel": "sgl_kernel",
}
MODULES = (*NEEDED, "transformer_engine")
IMPORT_SECONDS = 300  # for one import
# The room that an engine on each GPU needs in /dev/shm, where it receives weights in one buffer. A buffer has 512 MiB
# (`push/bucket.py`), or the size of the largest tensor, which is an embedding of up to 1.6 GB.
SHARED_BYTES_PER_GPU = 2 << 30
INSTALL_TRANSFORMER_ENGINE = (
    "pip install --no-deps --no-build-isolation -r requirements/transformer-engine.txt"
)


@dataclass(frozen=True)
class Machine:
    """Facts about this machine.

    gpus          of `visible_gpus`; 0 while an image is built
    driver_cuda   newest CUDA version that the driver runs, (major, minor); None if the driver does not answer
    torch_cuda    CUDA version that torch was built for, (major, minor); None for a CPU build, and without torch
    modules       those of MODULES that Python finds
    failures      module of COMPILED -> the last line of the error of its import; only installed ones that fail
    shared_bytes  size of /dev/shm; 0 if there is none
    """

    gpus: int = 0
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: tuple[int, int] | None = None
    modules: frozenset[str] = frozenset()
    failures: Mapping[str, str] = field(default_factory=dict)
    shared_bytes: int = 0


@dataclass(frozen=True)
class Lack:
    """One thing that the machine lacks. `text` is one line: what is wrong and what to do.

    stops  True if training or serving on GPUs cannot start, or runs without its kernels; `rlspec doctor --gpu` then
           ends with 1
    """

    text: str
    stops: bool = True


def lacks(machine: Machine) -> list[Lack]:
    """Return what the machine lacks; [] if nothing. The driver and shared memory count only where a GPU is visible."""
    missing = list(_missing(machine))
    if machine.gpus:
        missing += _driver_and_memory(machine)
    return missing


def _missing(machine: Machine) -> Iterator[Lack]:
    """Yield the packages that are not installed or do not fit."""
    for module, distribution in NEEDED.items():
        if module not in machine.modules:
            yield Lack(f"{distribution} is not installed: see docs/install.md")
    # A torch that does not import is in `failures`, and its CUDA version then says nothing.
    torch_loads = "torch" in machine.modules and "torch" not in machine.failures
    if torch_loads and machine.torch_cuda is None:
        yield Lack("torch is built without CUDA: install the build of requirements/gpu.txt")
    if "transformer_engine" not in machine.modules:
        yield Lack(
            f"Transformer Engine is not installed, so training has no fast attention: {INSTALL_TRANSFORMER_ENGINE}"
        )
    for module, error in machine.failures.items():
        yield Lack(
            f"{module} does not import ({error}): it must be built for the torch and the CUDA that are installed"
        )


def _driver_and_memory(machine: Machine) -> Iterator[Lack]:
    """Yield what the driver and /dev/shm lack for the visible GPUs."""
    if machine.driver_cuda is None:
        yield Lack(
            "a GPU is visible, but the driver's libcuda.so.1 does not answer: start the container with --gpus all"
        )
    # Only major versions are compared: a driver runs every CUDA of its major version.
    elif machine.torch_cuda and machine.driver_cuda[0] < machine.torch_cuda[0]:
        built = ".".join(map(str, machine.torch_cuda))
        runs = ".".join(map(str, machine.driver_cuda))
        yield Lack(
            f"torch is built for CUDA {built}, but the driver runs CUDA up to {runs}: update the driver"
        )
    wanted = SHARED_BYTES_PER_GPU * machine.gpus
    if machine.shared_bytes < wanted:
        yield Lack(
            f"/dev/shm holds {machine.shared_bytes >> 20} MiB, but pushing weights to {machine.gpus} engines needs up "
            f"to {wanted >> 20} MiB: start the container with --ipc=host or --shm-size={wanted >> 30}g",
            stops=False,
        )


def visible_gpus() -> int:
    """Count the devices that NVIDIA's driver shows in /dev. CUDA_VISIBLE_DEVICES does not change the number."""
    return sum(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia*"))


def gather() -> Machine:
    """Read the facts of this machine. It imports each package of COMPILED in a process, one after the other.

    So it takes seconds to minutes, at most `IMPORT_SECONDS` for each.
    """
    driver = _driver_cuda()
    failures: dict[str, str] = {}
    for module, package in COMPILED.items():
        # With `.__init__` only a package counts, and not a file of that name.
        error = _import_error(module) if locate(f"{package}.__init__") else ""
        # While an image is built there is no driver. Then a missing libcuda.so.1 is no fault of the package.
        if error and (driver or "libcuda.so.1" not in error):
            failures[module] = error
    return Machine(
        gpus=visible_gpus(),
        driver_cuda=driver,
        torch_cuda=_torch_cuda(),
        modules=frozenset(module for module in MODULES if locate(f"{module}.__init__")),
        failures=failures,
        shared_bytes=_shared_bytes(),
    )


def _torch_cuda() -> tuple[int, int] | None:
    """Read the CUDA version that torch was built for from its file version.py, without importing torch."""
    file = locate("torch.version")
    source = file.read_text(encoding="utf-8") if file else ""
    built = re.search(r"^cuda\b[^=]*= *'(\d+)\.(\d+)", source, re.M)
    return (int(built[1]), int(built[2])) if built else None


def _driver_cuda() -> tuple[int, int] | None:
    """Ask the driver for the newest CUDA version that it runs. It answers without being initialised."""
    version = ctypes.c_int(0)
    try:
        answered = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    # The number is 1000 * major + 10 * minor: 12040 is CUDA 12.4.
    return (version.value // 1000, version.value % 1000 // 10) if answered == 0 else None


def _shared_bytes() -> int:
    """Return the size of /dev/shm, used or not; 0 if there is none."""
    if not os.path.isdir("/dev/shm"):
        return 0
    shared = os.statvfs("/dev/shm")
    return shared.f_frsize * shared.f_blocks


def _import_error(module: str) -> str:
    """Import a module in a process that sees no GPU, so that it makes no CUDA context.

    Returns the last line of its error; "" if it imports.
    """
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {IMPORT_SECONDS} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]

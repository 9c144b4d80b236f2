"""Find what a machine lacks for training and serving on GPUs.

`gather` reads the facts once. `lacks` is pure: it compares these facts with what is needed. No CUDA context is created,
so a running job is not disturbed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_rlspec.compat.installed import locate
from megatron_rlspec.host import environment

OWN = "megatron-rlspec"
# Distributions whose requirements are compared with what is installed, and the distributions that are compared. Others
# differ in every image, mostly without harm.
ASKING = (
    OWN,
    "sglang",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
    "slime",
)
COMPARED = {
    "torch",
    "transformers",
    "megatron-core",
    "sglang",
    "sglang-kernel",
    "numpy",
    "triton",
    "flashinfer-python",
}
COMPARED |= {
    "transformer-engine",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "transformer-engine-torch",
}
MODULES = (
    "torch",
    "megatron.core",
    "megatron.training",  # slime imports it, and the distribution megatron-core leaves it out
    "transformers",
    "sglang",
    "transformer_engine",
    "apex",
    "apex.optimizers",
    "slime",
)
# Compiled against one torch and one CUDA: an import shows whether they fit. Module -> the module that must be there.
COMPILED = {
    "torch": "torch",
    "transformer_engine.pytorch": "transformer_engine",
    "sgl_kernel": "sgl_kernel",
}
NEEDED = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "transformers": "transformers",
    "sglang": "sglang",
}
# Why train ranks set the variables of environment.RANKS, for a machine where another value is set.
BECAUSE = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "below Blackwell, Megatron's tensor and context parallelism need 1",
    "NCCL_CUMEM_ENABLE": "SGLang's engines on other machines have 0, and push.transport=group needs equal values",
}
IMPORT_SECONDS = 300
# An engine keeps one buffer for weights there: 512 MiB, or the largest tensor, which is an embedding of up to 1.6 GB.
SHARED_BYTES_PER_GPU = 2 << 30
BUILD_ENGINE = "pip install --no-deps --no-build-isolation -r requirements/transformer-engine.txt"


@dataclass(frozen=True)
class Machine:
    """Facts about this machine.

    gpus          GPUs that are visible here; 0 while an image is built
    driver_cuda   newest CUDA version that the driver runs, (major, minor); None if the driver does not answer
    torch_cuda    CUDA version that torch was built for; None for a CPU build
    modules       those of MODULES that Python finds
    versions      distribution -> version
    requirements  distribution -> its requirements on this machine, without extras
    failures      module of COMPILED -> the error of its import
    shared_bytes  size of /dev/shm; None if there is none
    variables     those of environment.RANKS that are set
    """

    gpus: int = 0
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: tuple[int, int] | None = None
    modules: frozenset[str] = frozenset()
    versions: Mapping[str, str] = field(default_factory=dict)
    requirements: Mapping[str, Sequence[str]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    shared_bytes: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lack:
    """One thing that the machine lacks. `text` is one line: what is wrong and what to do.

    stops  True if training or serving on GPUs cannot start, or runs without its kernels
    """

    name: str
    text: str
    stops: bool = False


def lacks(machine: Machine) -> list[Lack]:
    """Return what the machine lacks, first what stops training or serving.

    The driver, shared memory and variables count only where a GPU is visible.
    """
    found = [*_missing(machine), *_unfit(machine), *_apex(machine)]
    if machine.gpus:
        found += [*_driver(machine), *_surroundings(machine)]
    return sorted(found, key=lambda lack: not lack.stops)


def _missing(machine: Machine) -> Iterator[Lack]:
    for requirement, version in _unmet(machine, OWN):
        state = f"{version} is installed" if version else "is not installed"
        yield Lack(
            "gpu-dependency",
            f"{requirement} is needed, {state}: see docs/install.md for this machine",
            True,
        )
    for module, distribution in NEEDED.items():
        if module not in machine.modules:
            yield Lack(
                f"gpu-{distribution}", f"{distribution} is not installed: see docs/install.md", True
            )
    if (
        "torch" in machine.modules
        and "torch" not in machine.failures
        and machine.torch_cuda is None
    ):
        version = machine.versions.get("torch", "")
        yield Lack(
            "gpu-torch",
            f"torch {version} is built without CUDA: install the build of requirements/gpu.txt",
            True,
        )
    if "transformer_engine" not in machine.modules:
        yield Lack(
            "gpu-transformer-engine",
            f"Transformer Engine is not installed, so training has no fast attention: {BUILD_ENGINE}",
            True,
        )
    if "slime" in machine.modules and "megatron.training" not in machine.modules:
        yield Lack(
            "gpu-megatron-training",
            "slime is installed, but megatron.training is not found: export PYTHONPATH=/path/to/Megatron-LM",
            True,
        )
    for module, error in machine.failures.items():
        yield Lack(
            f"gpu-{module}",
            f"{module} does not import ({error}): it must be built for the torch and the CUDA that are installed"
            + (f": {BUILD_ENGINE}" if module.startswith("transformer_engine") else ""),
            True,
        )


def _unfit(machine: Machine) -> Iterator[Lack]:
    for distribution in ASKING[1:]:
        for requirement, version in _unmet(machine, distribution):
            if canonicalize_name(requirement.name) not in COMPARED:
                continue
            asking = f"{distribution} {machine.versions[distribution]} asks for {requirement}"
            yield Lack(
                "gpu-versions",
                f"{asking}, but {f'{version} is' if version else 'none is'} installed",
            )


def _apex(machine: Machine) -> Iterator[Lack]:
    if "apex" in machine.modules and "apex.optimizers" not in machine.modules:
        version = machine.versions.get("apex", "")
        yield Lack(
            "gpu-apex",
            f"apex {version} is not NVIDIA's Apex but another project of that name: pip uninstall apex",
        )
    elif "apex" not in machine.modules and "slime" in machine.modules:
        yield Lack(
            "gpu-apex",
            "NVIDIA's Apex is not installed, which slime's recipes use for gradient accumulation: build it as slime's "
            "image does, or add --no-gradient-accumulation-fusion",
        )


def _driver(machine: Machine) -> Iterator[Lack]:
    if machine.driver_cuda is None:
        yield Lack(
            "gpu-driver",
            "a GPU is visible, but the driver's libcuda.so.1 does not answer: start the container with --gpus all",
            True,
        )
    elif machine.torch_cuda and machine.driver_cuda[0] < machine.torch_cuda[0]:
        built = ".".join(map(str, machine.torch_cuda))
        runs = ".".join(map(str, machine.driver_cuda))
        yield Lack(
            "gpu-driver",
            f"torch is built for CUDA {built}, but the driver runs CUDA up to {runs}: update the driver, or take an "
            f"image for CUDA {machine.driver_cuda[0]}",
            True,
        )


def _surroundings(machine: Machine) -> Iterator[Lack]:
    wanted = SHARED_BYTES_PER_GPU * machine.gpus
    if machine.shared_bytes is None or machine.shared_bytes < wanted:
        size = (
            "is missing"
            if machine.shared_bytes is None
            else f"holds {machine.shared_bytes >> 20} MiB"
        )
        yield Lack(
            "gpu-shared-memory",
            f"/dev/shm {size}, but pushing weights to {machine.gpus} engines needs up to {wanted >> 20} MiB: start the "
            f"container with --ipc=host or --shm-size={wanted >> 30}g",
        )
    for name, expected in environment.RANKS.items():
        if (value := machine.variables.get(name, expected)) != expected:
            yield Lack(
                "gpu-environment",
                f"{name} is {value} in this environment, and train ranks keep it, but {BECAUSE[name]}: unset {name}",
            )


def _unmet(machine: Machine, distribution: str) -> Iterator[tuple[Requirement, str | None]]:
    """Yield the requirements of a distribution that are not met, with the version that is installed, or None."""
    for text in machine.requirements.get(distribution, ()):
        requirement = Requirement(text)
        version = machine.versions.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield requirement, version


def visible_gpus() -> int:
    """Count the devices that NVIDIA's driver shows in /dev."""
    return sum(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia*"))


def gather(path: Sequence[str] = ()) -> Machine:
    """Read the facts of this machine. `path`: directories of checkouts to look in first."""
    found = frozenset(module for module in MODULES if locate(f"{module}.__init__", path))
    torch_version = locate("torch.version", path)
    source = torch_version.read_text(encoding="utf-8") if torch_version else ""
    built = re.search(r"^cuda\b[^=]*= *'(\d+)\.(\d+)", source, re.M)
    installed: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            installed.setdefault(canonicalize_name(name), distribution.version)
    compiled = [module for module, there in COMPILED.items() if locate(f"{there}.__init__", path)]
    driver = _driver_cuda()
    with ThreadPoolExecutor(len(COMPILED)) as threads:
        errors = dict(
            zip(
                compiled,
                threads.map(lambda module: _import_error(module, path), compiled),
                strict=True,
            )
        )
    failures = {module: error for module, error in errors.items() if error}
    # as while an image is built: a missing libcuda.so.1 is then no fault of the package
    if driver is None:
        failures = {
            module: error for module, error in failures.items() if "libcuda.so.1" not in error
        }
    return Machine(
        gpus=visible_gpus(),
        driver_cuda=driver,
        torch_cuda=(int(built[1]), int(built[2])) if built else None,
        modules=found,
        versions=installed,
        requirements={name: _requirements(name) for name in ASKING if name in installed},
        failures=failures,
        shared_bytes=_shared_bytes(),
        variables={name: os.environ[name] for name in environment.RANKS if name in os.environ},
    )


def _requirements(distribution: str) -> list[str]:
    wanted = map(Requirement, importlib.metadata.requires(distribution) or ())
    return [str(one) for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def _driver_cuda() -> tuple[int, int] | None:
    """Ask the driver for the CUDA version that it runs. It answers without being initialised."""
    version = ctypes.c_int(0)
    try:
        answered = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if answered == 0 else None


def _shared_bytes() -> int | None:
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return None
    return shared.f_frsize * shared.f_blocks


def _import_error(module: str, path: Sequence[str]) -> str:
    """Import a module in a process that sees no GPU. Returns the last line of its error, or an empty text."""
    paths = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {IMPORT_SECONDS} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]

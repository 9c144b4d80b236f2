"""Make SGLang importable on a CPU machine without two packages that it imports: sgl_kernel and torchvision.

`install()` replaces those of them that are not installed; call it before SGLang is imported. `sgl_kernel` and
`torch.ops.sgl_kernel` then have the functions of `operators.py`. Every other name in both packages can be imported, but
fails when it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

import torch

from megatron_rlspec.rollout.sglang.cpu import operators as cpu_ops

# SGLANG_USE_CPU_ENGINE tells SGLang that it runs on a CPU. Without TORCHDYNAMO_DISABLE torch compiles for tens of
# seconds at the first batches.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}


class _Absent:
    """A name that can be imported, and fails when it is called: models and kernels that this engine does not use.

    Its attributes are such names, too, and it can be a base class.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.__name__ = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):  # Python's own protocols must find that it has none of them
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{self._name} is not available on this machine")

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()  # `class X(absent)` becomes a class without this base


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `package` and everything below it as modules whose attributes are `_Absent`.

    attributes  real attributes of the module `package` itself, by name; all its other attributes are `_Absent`
    """

    def __init__(self, package: str, attributes: dict[str, object]) -> None:
        self.package = package
        self.attributes = attributes

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == self.package or name.startswith(self.package + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == self.package:
            vars(module).update(self.attributes)
        absent = _Absent(module.__name__)
        # PEP 562: Python asks this function for names that the module lacks.
        vars(module)["__getattr__"] = absent.__getattr__


def is_replaced(package: str) -> bool:
    """Return whether `install` replaced the package in this process."""
    return any(
        isinstance(finder, _Finder) and finder.package == package for finder in sys.meta_path
    )


def install() -> list[str]:
    """Make SGLang's CPU engine importable in this process and in those forked from it (`serve._fork_children`).

    Returns the names of the packages that it replaced. Also sets `ENVIRONMENT`, even if it replaces none. A
    second call replaces nothing and returns []: `find_spec` then finds the stand-ins of the first.
    """
    os.environ.update(ENVIRONMENT)
    names = [
        name for name in ("sgl_kernel", "torchvision") if importlib.util.find_spec(name) is None
    ]
    if "sgl_kernel" in names:
        sys.meta_path.append(_Finder("sgl_kernel", dict(cpu_ops.FUNCTIONS)))
        # Set as attributes and not registered with torch: plain functions need no schema.
        for name, function in cpu_ops.OPERATORS.items():
            # SGLang asks some operators for their `.default` overload.
            function.default = function  # type: ignore[attr-defined]
            setattr(torch.ops.sgl_kernel, name, function)
    if "torchvision" in names:
        # Transformers and others parse the version, so it must not be an `_Absent`.
        sys.meta_path.append(_Finder("torchvision", {"__version__": "0.0"}))
    return names

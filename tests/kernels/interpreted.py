"""Run the kernels in Triton's interpreter, which is chosen when Triton is imported: from a second import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch


def _again(name: str) -> bool:
    """Whether a module is imported a second time. What is compiled cannot be."""
    ours = name.startswith("megatron_rlspec.kernels.") and not name.endswith(".chosen")
    return ours or (f"{name}.".startswith("triton.") and "._C" not in name)


class Interpreter:
    """The kernels in Triton's interpreter. Arrays go in and out as numpy's."""

    def __init__(self, reads: list[np.ndarray], writes: list[np.ndarray]) -> None:
        self.sampling = importlib.import_module("megatron_rlspec.kernels.sampling")
        self.losses = importlib.import_module("megatron_rlspec.kernels.losses")
        self._reads, self._writes = reads, writes

    def sample(self, sizes: dict[str, int], **arrays: np.ndarray) -> SimpleNamespace:
        """Set BLOCK and MANY_PARTS; return tokens, logprobs, and reads [N, V]: how often the kernel read each logit."""
        for name, value in sizes.items():
            setattr(self.sampling, name, value)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
        self.forget()
        with np.errstate(all="ignore"):
            tokens, logprobs = self.sampling.sample(**tensors)
        reads = self.traffic(tensors["logits"])[0]
        return SimpleNamespace(tokens=tokens.numpy(), logprobs=logprobs.numpy(), reads=reads)

    def forget(self) -> None:
        """Count from here on."""
        self._reads.clear()
        self._writes.clear()

    def traffic(self, tensor: torch.Tensor) -> list[np.ndarray]:
        """Return how often each element of a tensor was read, and how often it was written."""
        found = []
        for addresses in (self._reads, self._writes):
            places = np.concatenate([*addresses, np.zeros(0, np.uint64)]).astype(np.int64) - tensor.data_ptr()
            places //= tensor.element_size()
            inside = places[(places >= 0) & (places < tensor.numel())]
            found.append(np.bincount(inside, minlength=tensor.numel()).reshape(tensor.shape))
        return found


_second: dict[str, Any] = {}  # the modules of the second import, which serves all files: a third one counts nothing
_made: list[Interpreter] = []


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    importlib.import_module("megatron_rlspec.kernels.losses")  # compiled, as another test may have left it
    kept = _exchanged(_second)
    try:
        with mock.patch.dict("os.environ", TRITON_INTERPRET="1"):
            if not _made:
                _made.append(Interpreter(*_prepare()))
            yield _made[0]
    finally:
        _second.update(_exchanged(kept))


def _exchanged(others: dict[str, Any]) -> dict[str, Any]:
    """Put modules in the place of those that are imported twice, and return those."""
    found = {name: module for name, module in sys.modules.items() if _again(name)}
    for name in found:
        del sys.modules[name]
        package, last = _place(name)
        if hasattr(package, last):  # `from package import module` would find it there
            delattr(package, last)
    sys.modules.update(others)
    for name, module in others.items():
        package, last = _place(name)
        if package is not None:
            setattr(package, last, module)
    return found


def _place(name: str) -> tuple[Any, str]:
    """Return the package of a module, if it is imported, and the module's name there."""
    package, _, last = name.rpartition(".")
    return sys.modules.get(package), last


def _prepare() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Replace the functions of Triton's language once instead of in every call, and note what is read and written."""
    tl = importlib.import_module("triton.language")
    runtime = importlib.import_module("triton.runtime.interpreter")
    patch = runtime._patch_lang
    patched: set[int] = set()
    forever = SimpleNamespace(restore=lambda: None)

    def once(function: Any) -> Any:
        languages = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if not languages <= patched:
            patched.update(languages)
            patch(function)
        return forever

    reads: list[np.ndarray] = []
    writes: list[np.ndarray] = []
    builder = runtime.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store

    def loaded(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        reads.append(np.ravel(pointers.data)[np.ravel(mask.data)])
        return load(pointers, mask, *rest, **named)

    def stored(pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        writes.append(np.ravel(pointers.data)[np.ravel(mask.data)])
        return store(pointers, value, mask, *rest, **named)

    builder.create_masked_load, builder.create_masked_store = loaded, stored
    builder.options = runtime.InterpreterOptions(sanitize_overflow=False)
    runtime._patch_lang = once
    return reads, writes

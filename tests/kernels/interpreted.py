"""Run the sampling kernels in Triton's interpreter, which is chosen when Triton is imported: from a second import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch


def _again(name: str) -> bool:
    """Whether a module is imported a second time. What is compiled cannot be."""
    ours = ("megatron_rlspec.kernels.keyed_draw", "megatron_rlspec.kernels.sampling")
    return name in ours or (f"{name}.".startswith("triton.") and "._C" not in name)


class Interpreter:
    """The kernels in Triton's interpreter. Arrays go in and out as numpy's."""

    def __init__(self, sampling: ModuleType, reads: list[np.ndarray]) -> None:
        self.sampling = sampling
        self._reads = reads

    def given(self, sizes: dict[str, int], arrays: dict[str, np.ndarray]) -> tuple[torch.Tensor, Any]:
        """Set BLOCK, STAIRS and PARTS, and return logits and `Draws`."""
        for name, value in sizes.items():
            setattr(self.sampling, name, value)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
        return tensors.pop("logits"), self.sampling.Draws(**tensors)

    def sample(self, sizes: dict[str, int], **arrays: np.ndarray) -> SimpleNamespace:
        """Return tokens, logprobs, and reads [N, V]: how often each logit was read."""
        logits, draws = self.given(sizes, arrays)
        self._reads.clear()
        with np.errstate(all="ignore"):
            tokens, logprobs = self.sampling.sample(logits, draws)
        places = (np.concatenate(self._reads).astype(np.int64) - logits.data_ptr()) // logits.element_size()
        inside = places[(places >= 0) & (places < logits.numel())]
        counts = np.bincount(inside, minlength=logits.numel()).reshape(logits.shape)
        return SimpleNamespace(tokens=tokens.numpy(), logprobs=logprobs.numpy(), reads=counts)


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    kept = {name: module for name, module in sys.modules.items() if _again(name)}
    for name in kept:
        del sys.modules[name]
    try:
        with mock.patch.dict("os.environ", TRITON_INTERPRET="1"):
            reads = _prepare()
            yield Interpreter(importlib.import_module("megatron_rlspec.kernels.sampling"), reads)
    finally:
        for name in [name for name in sys.modules if _again(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


def _prepare() -> list[np.ndarray]:
    """Replace the functions of Triton's language once instead of in every call, and note the addresses of loads."""
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
    builder = runtime.interpreter_builder
    load = builder.create_masked_load

    def noted(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        reads.append(np.ravel(pointers.data)[np.ravel(mask.data)])
        return load(pointers, mask, *rest, **named)

    builder.create_masked_load = noted
    builder.options = runtime.InterpreterOptions(sanitize_overflow=False)
    runtime._patch_lang = once
    return reads

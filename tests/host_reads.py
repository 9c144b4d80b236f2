"""Find where code would wait for a GPU, on a machine without one.

`HostReads` runs code on CPU tensors and remembers which of them would be on the GPU: those that code asked for with
`device="cuda"` or moved there, and what operators make of them. Their `device` reads "cuda:0", so code takes its GPU
branch. Each time the host needs a value of such a tensor, it would wait for all kernels before it: `found` counts
these places. A copy to the GPU waits for them, too, unless it is `non_blocking`. The values are real, so control flow
is, too.

    with HostReads() as reads:
        model = Model().to("cuda")
        reads.found.clear()
        model(batch.to("cuda"))
    assert reads.found == {"package/file.py:function: item": 1}

What it cannot see: waits that no tensor shows (locks, events, collectives), and code that hands a CPU tensor to C++
beside torch.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
TESTS = Path(__file__).parent
ROOTS = ("megatron_rlspec", "megatron", "sglang")  # packages whose functions are named; else the nearest function is
READERS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "equal": "equal",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
}


class HostReads(TorchFunctionMode):
    """Count reads of GPU tensors by the host, as `path:function: what`, in `found`.

    misplaced  places where one operator got tensors of both devices, which a GPU refuses
    operators  what to run instead of an operator that has GPU kernels only: its name, then a function
    """

    def __init__(self, operators: dict[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.misplaced: Counter[str] = Counter()
        self._operators = _Operators(self, operators or {})
        self._storages: set[int] = set()
        self._replaced = (torch.cuda.current_device, torch.autograd._engine_run_backward)

    def __enter__(self) -> HostReads:
        super().__enter__()
        self._operators.__enter__()
        torch.cuda.current_device = lambda: GPU
        torch.autograd._engine_run_backward = self._run_backward
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.current_device, torch.autograd._engine_run_backward = self._replaced
        self._operators.__exit__(*error)
        super().__exit__(*error)

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass inside this mode; torch has left the mode for the call that starts it."""
        if self in _get_current_function_mode_stack():
            return self._replaced[1](*args, **kwargs)
        super().__enter__()
        try:
            return self._replaced[1](*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def holds(self, x: torch.Tensor) -> bool:
        """Return whether the tensor would be on the GPU."""
        return x.untyped_storage()._cdata in self._storages

    def put(self, *values: Any) -> None:
        """Say that tensors, and parameters and buffers of modules, are on the GPU."""
        for value in tree_leaves(values):
            if isinstance(value, torch.nn.Module):
                self.put(list(value.parameters()), list(value.buffers()))
            elif isinstance(value, torch.Tensor) and not self.holds(value):
                storage = value.untyped_storage()
                key = storage._cdata
                self._storages.add(key)
                weakref.finalize(storage, self._storages.discard, key)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy that is on the CPU."""
        x = x.clone()
        self._storages.discard(x.untyped_storage()._cdata)
        return x

    def record(self, what: str) -> None:
        """Count a read at the innermost function of `ROOTS`."""
        self.found[f"{_caller()}: {what}"] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        here = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func == torch.Tensor.device.__get__:
            return GPU if self.holds(here) else func(*args)
        if func in (torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__):
            return self.holds(here) == (func == torch.Tensor.is_cuda.__get__)
        if func is torch.Tensor.pin_memory:
            return here
        if here is not None and name in ("tolist", "numpy", "__array__") and self.holds(here):
            self.record(name.strip("_"))
        target, args, kwargs = self._destination(func, args, kwargs)
        if here is not None and func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu) and target is not None:
            return self._moved(func, here, target, args, kwargs)
        out = func(*args, **kwargs)
        if target == GPU:
            if here is None and name in ("tensor", "as_tensor", "asarray"):
                self.record("waiting copy to the GPU")
            self.put(out)
        return out

    def _destination(self, func: Any, args: tuple, kwargs: dict) -> tuple[torch.device | None, tuple, dict]:
        """Return the device that a call asks for, GPU or CPU, and its arguments with the CPU instead."""
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return (GPU if func is torch.Tensor.cuda else CPU), args[:1], {}
        target = None
        if kwargs.get("device") is not None:
            target = _device(kwargs["device"])
            kwargs["device"] = CPU if target is not None else kwargs["device"]
        elif func is torch.Tensor.to and len(args) > 1:
            if isinstance(args[1], torch.Tensor):
                target = GPU if self.holds(args[1]) else CPU
            elif not isinstance(args[1], torch.dtype):
                target = _device(args[1])
                args = (args[0], CPU, *args[2:])
        return target, args, kwargs

    def _moved(self, func: Any, x: torch.Tensor, target: torch.device, args: tuple, kwargs: dict) -> torch.Tensor:
        was = GPU if self.holds(x) else CPU
        out = x if func in (torch.Tensor.cuda, torch.Tensor.cpu) else func(*args, **kwargs)
        if was == target:
            return out
        if what := _waiting_copy(target, kwargs.get("non_blocking")):
            self.record(what)
        out = self.take(out)
        if target == GPU:
            self.put(out)
        return out


class _Operators(TorchDispatchMode):
    """What `HostReads` sees below Python: each operator, also those of the backward pass."""

    def __init__(self, reads: HostReads, instead: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.reads = reads
        self.instead = instead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_gpu = [x for x in tensors if self.reads.holds(x)]
        if name == "copy_":
            places = [self.reads.holds(x) for x in tensors]
            what = _waiting_copy(GPU if places[0] else CPU, kwargs.get("non_blocking") or args[2:] == (True,))
            if places[0] != places[-1] and what:
                self.reads.record(what)
            return func(*args, **kwargs)
        if on_gpu:
            if what := _read(name, args, kwargs):
                self.reads.record(what)
            if len(on_gpu) < len(tensors) and not name.startswith("index"):
                if any(x.dim() and not self.reads.holds(x) for x in tensors):
                    self.reads.misplaced[f"{_caller()}: {name}"] += 1
        out = self.instead.get(name, func)(*args, **kwargs)
        if on_gpu:
            self.reads.put(out)
        return out


def _waiting_copy(target: torch.device, non_blocking: Any) -> str | None:
    if non_blocking:
        return "copy without waiting" if target == CPU else None
    return "copy to the CPU" if target == CPU else "waiting copy to the GPU"


def _read(name: str, args: Any, kwargs: Any) -> str | None:
    """Return what an operator reads on the host, if it does."""
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masked = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        filled = name != "index" and args[2].numel() == 1  # such an assignment is a masked fill
        return "boolean index" if masked and not filled else None
    if name == "repeat_interleave":
        return None if kwargs.get("output_size") is not None else "repeat_interleave"
    return READERS.get(name)


def _device(x: Any) -> torch.device | None:
    if isinstance(x, int) and not isinstance(x, bool):
        return GPU
    if isinstance(x, str | torch.device):
        kind = torch.device(x).type
        return GPU if kind == "cuda" else CPU if kind == "cpu" else None
    return None


def _frames() -> Iterator[tuple[Path, str]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield Path(frame.f_code.co_filename), frame.f_code.co_qualname
        frame = frame.f_back


def _caller() -> str:
    nearest = None
    for path, function in _frames():
        passed = path.name == Path(__file__).name or "torch" in path.parts
        if passed or "__torch_function__" in function or "_without_cuda" in function:
            continue
        roots = (i for i, part in enumerate(path.parts) if part in ROOTS)
        root = None if path.is_relative_to(TESTS) else next(roots, None)
        if root is not None:
            return f"{'/'.join(path.parts[root:])}:{function}"
        nearest = nearest or f"{path.name}:{function}"
    return nearest or "?"

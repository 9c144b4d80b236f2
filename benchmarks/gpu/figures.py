"""Measure, and write each figure as soon as it is known. Running out of GPU memory is a figure, too."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30


def append(out: Path, row: dict[str, Any]) -> None:
    """Add a line to a session's file, on the disk before this returns."""
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


class Figures:
    """Writes what a part measures, a line each, at once."""

    def __init__(self, out: Path, part: str) -> None:
        self.out = out
        self.part = part

    def log(self, name: str) -> Path:
        """Return the file of an engine's output, beside the figures."""
        return self.out.parent / "logs" / f"{self.part}-{name}.log"

    def say(self, what: str, value: float, unit: str = "", note: str = "", estimate: Sequence[Any] = ()) -> None:
        """Write a figure. `estimate`: (low, high, origin), if it depends on the plan."""
        self._write(what=what, state="measured", value=float(value), unit=unit, note=note, estimate=list(estimate))

    def without(self, what: str, state: str, note: str) -> None:
        """Write why there is no figure."""
        self._write(what=what, state=state, value=None, unit="", note=note, estimate=[])

    def peak(self, what: str, gib: float | None, note: str = "", estimate: Sequence[Any] = ()) -> None:
        """Write `peak_gib()`."""
        if gib is None:
            self.without(f"{what}: peak", "not on a CPU", note)
        else:
            self.say(f"{what}: peak", gib, "GiB", note, estimate)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after this figure if there is not enough memory for it or if it fails, and say so."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.without(f"{what}: peak", "out of memory", str(error).splitlines()[0][:200])
        except Exception as error:
            self.without(what, "failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _write(self, **row: Any) -> None:
        append(self.out, {"kind": "figure", "part": self.part, **row})


def wait() -> None:
    """Wait until the GPU has done what was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Begin to look for the most memory."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """Return the most memory that tensors took since `forget_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None


def timed(work: Callable[[], Any]) -> float:
    """Measure milliseconds of one call, the GPU's work included."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return 1000 * (time.perf_counter() - began)


def median(repeats: int, work: Callable[[], Any]) -> float:
    """Measure the median of `repeats` calls in milliseconds, after one that does not count."""
    work()
    return statistics.median(timed(work) for _ in range(repeats))

"""Measure seconds and peak memory of `rlspec convert` both ways, and how they grow with the checkpoint.

    python benchmarks/convert.py [--quick] [--json FILE] [--room DIRECTORY]

Synthetic bf16 checkpoints of MiMo's shape (0.5 to 4 GB; --quick: 32 to 128 MB) are converted from Hugging Face's format
to Megatron's torch_dist and back. Each direction runs in a process of its own, on one thread. Peak is the growth of
anonymous memory, sampled every 5 ms. A plain copy of the same files is timed for comparison. After the round trip the
tensors are compared bit for bit. The disk needs room for three times the largest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from synthetic import conditions, model

from megatron_rlspec.conversion.convert import convert, plan
from megatron_rlspec.models.hf_files import read_hf, write_hf


def conversion(gigabytes: float, room: Path) -> dict[str, Any]:
    """Measure both conversions of one checkpoint, and a plain copy of its files."""
    config, tensors = model(gigabytes)
    write_hf(room / "hf", config, tensors)
    layer = sum(t.nbytes for n, t in tensors.items() if ".layers.0." in n)
    largest = max(t.nbytes for t in tensors.values())
    del tensors
    found: dict[str, Any] = {
        "bytes": sum(f.stat().st_size for f in (room / "hf").glob("*.safetensors")),
        "layer_bytes": layer,
        "tensor_bytes": largest,
    }
    began = time.perf_counter()
    shutil.copytree(room / "hf", room / "copy")
    os.sync()
    found["copy_seconds"] = time.perf_counter() - began
    shutil.rmtree(room / "copy")
    context = multiprocessing.get_context("spawn")  # a new process: memory that this one has freed must not count
    for name, source, target in (("to_megatron", "hf", "megatron"), ("to_hf", "megatron", "back")):
        with context.Pool(1) as pool:
            seconds, peak = pool.apply(_timed_conversion, (room / source, room / target))
        found[name] = {
            "seconds": seconds,
            "gigabytes_per_second": found["bytes"] / seconds / 1e9,
            "peak_bytes": peak,
            "peak_over_layer": peak / layer,
        }
    first = read_hf(room / "hf")[1]
    second = read_hf(room / "back")[1]
    found["exact"] = set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)
    return found


def _timed_conversion(source: Path, target: Path) -> tuple[float, int]:
    torch.set_num_threads(1)
    with PeakMemory() as memory:
        began = time.perf_counter()
        convert(plan(source, target))
        os.sync()  # a copy in the page cache is not yet a checkpoint
        seconds = time.perf_counter() - began
    return seconds, memory.peak


class PeakMemory:
    """Sample the growth of this process's anonymous memory (file pages, which the system may reclaim, do not count)."""

    def __enter__(self) -> PeakMemory:
        self.first = self.peak = _anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak -= self.first

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, _anonymous())


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small checkpoints")
    options.add_argument("--json", metavar="FILE", help="write the figures to this file")
    options.add_argument(
        "--room", metavar="DIRECTORY", help="where to write; default: the system's temporary directory"
    )
    chosen = options.parse_args()
    torch.set_num_threads(1)
    sizes = (0.032, 0.064, 0.128) if chosen.quick else (0.5, 1.0, 2.0, 4.0)
    found: dict[str, Any] = {
        "conditions": conditions(quick=chosen.quick),
        "conversions": [],
    }
    for gigabytes in sizes:
        with tempfile.TemporaryDirectory(dir=chosen.room) as room:
            found["conversions"].append(conversion(gigabytes, Path(room)))
        assert found["conversions"][-1]["exact"], "the round trip changed bits"
    print(json.dumps(found, indent=1))
    for row in found["conversions"]:
        ways = []
        for way in ("to_megatron", "to_hf"):
            ways.append(f"{way} {row[way]['seconds']:.1f} s, peak {row[way]['peak_bytes'] / 1e6:.0f} MB")
        size = row["bytes"] / 1e9
        layer = row["layer_bytes"] / 1e6
        print(f"{size:.2f} GB (layer {layer:.0f} MB): {'; '.join(ways)}; plain copy {row['copy_seconds']:.1f} s")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

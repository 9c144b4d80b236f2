"""How fast weights reach engines, against what the machine can do, and what it costs to prove them.

    python benchmarks/push.py [--quick] [--json FILE] [--sglang]

Pushes a model of about 1 GB (bf16, --quick: 64 MB) into one embedded engine in this process, and measures in the same
run, alternating: a copy of the same tensors (the in-process limit), one loopback TCP stream of the same bytes (the HTTP
limit), and the fingerprints by themselves. With --sglang also into a real `rlspec serve` process over HTTP, on a
smaller model, and the bytes by loopback. Then converts a synthetic checkpoint (4 GB, --quick: 128 MB) both ways: time
and peak anonymous memory. Medians; one thread; conditions are printed with the figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.weights.checkpoint import read_hf, write_hf
from megatron_rlspec.weights.convert import convert, plan
from megatron_rlspec.weights.families import Row
from megatron_rlspec.weights.fingerprint import fingerprint
from megatron_rlspec.weights.names import family_of
from megatron_rlspec.weights.push import Pusher


def model(gigabytes: float, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A MiMo shape of about that size, with random tensors; layers 3584 wide, as at 7B, if there is room for some."""
    hidden = 3584 if gigabytes > 3 else 1536 if gigabytes > 0.5 else 512
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 512 if hidden % 512 == 0 else 4,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "vocab_size": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
    }
    size = torch.finfo(dtype).bits / 8
    per_layer = sum(_count(shape) for name, shape in _shapes(config).items() if ".layers.0." in name) * size
    outside = sum(_count(shape) for name, shape in _shapes(config).items() if ".layers.0." not in name) * size
    config["num_hidden_layers"] = max(1, round((gigabytes * 1e9 - outside) / per_layer))
    generator = torch.Generator().manual_seed(0)
    # Drawing a gigabyte of normals takes longer than pushing it: blocks of one draw are as good.
    draw = (torch.randn(1 << 20, generator=generator) * 0.02).to(dtype)
    tensors = {}
    for name, shape in _shapes(config).items():
        flat = draw.repeat(-(-_count(shape) // draw.numel()))[: _count(shape)]
        tensors[name] = flat.view(shape).clone()
    return config, tensors


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    h, i = config["hidden_size"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    by_end = {
        "embed_tokens.weight": (config["vocab_size"], h),
        "lm_head.weight": (config["vocab_size"], h),
        "q_proj.weight": (q, h),
        "k_proj.weight": (kv, h),
        "v_proj.weight": (kv, h),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "o_proj.weight": (h, q),
        "gate_proj.weight": (i, h),
        "up_proj.weight": (i, h),
        "down_proj.weight": (h, i),
        "input_proj.weight": (h, 2 * h),
    }
    rows: dict[str, Row] = family_of(config).rows
    names = [name for row in rows.values() for name in row.hf]
    return {name: next((shape for end, shape in by_end.items() if name.endswith(end)), (h,)) for name in names}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def alternate(repeats: int, **work: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each, taken in turns so that a busy moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for function in work.values():
        function()
    for _ in range(repeats):
        for name, function in work.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def in_process(gigabytes: float, repeats: int) -> dict[str, Any]:
    config, tensors = model(gigabytes)
    size = sum(tensor.nbytes for tensor in tensors.values())
    engine = EmbeddedEngine(
        config, tensors.items(), dtype=torch.bfloat16, max_length=64, max_total_tokens=256, max_running_requests=1
    )
    there = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    pusher = Pusher({"engine": engine})
    reports = []

    def push() -> None:
        reports.append(pusher.push(len(reports) + 1, lambda scope: iter(tensors.items())))
        assert not reports[-1].failed, reports[-1].failed

    def update() -> None:
        engine.update_weights(0, tensors.items())

    def copy() -> None:
        for name, tensor in tensors.items():
            there[name].copy_(tensor)

    def fingerprints() -> None:
        for tensor in tensors.values():
            fingerprint(tensor)

    median = alternate(repeats, push=push, update=update, copy=copy, fingerprints=fingerprints)
    return {
        "bytes": size,
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "gigabytes_per_second": {name: size / seconds / 1e9 for name, seconds in median.items()},
        "update_over_copy": median["copy"] / median["update"],
        "proven_push_seconds": median["push"],
        "check_seconds": statistics.median(r.fingerprint_seconds + r.verify_seconds for r in reports[1:]),
    }


def loopback(size: int, repeats: int) -> float:
    """Bytes per second of one TCP stream to another process on this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    reader = context.Process(target=_drain, args=(listener.getsockname()[1], size, repeats))
    reader.start()
    connection, _ = listener.accept()
    block = memoryview(bytearray(1 << 20))
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        left = size
        while left:
            connection.sendall(block[: min(left, len(block))])
            left -= min(left, len(block))
        connection.recv(1)
        rates.append(size / (time.perf_counter() - began))
    connection.close()
    listener.close()
    reader.join()
    return statistics.median(rates)


def _drain(port: int, size: int, repeats: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        buffer = memoryview(bytearray(1 << 20))
        for _ in range(repeats):
            left = size
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            connection.sendall(b"k")


def over_http(gigabytes: float, repeats: int, room: Path) -> dict[str, Any]:
    """A real SGLang process on the CPU."""
    from megatron_rlspec.rollout.sglang.client import SGLangEngine
    from megatron_rlspec.rollout.sglang.launcher import launch

    config, tensors = model(gigabytes, torch.float32)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_hf(room / "served", config, tensors)
    options = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048", "--candidate-steps", "0,1,2,3"]
    with launch(
        room / "served", room / "engine.log", arguments=options, environment={"OMP_NUM_THREADS": "1"}
    ) as process:
        engine = SGLangEngine.of(process.wait(), timeout=600)
        pusher = Pusher({"engine": engine})
        reports = []
        for version in range(1, repeats + 2):
            reports.append(pusher.push(version, lambda scope: iter(tensors.items())))
            assert not reports[-1].failed, reports[-1].failed
        updates = [report.engines["engine"].seconds for report in reports[1:]]
        limit = loopback(size, repeats)
    return {
        "bytes": size,
        "gigabytes_per_second": {"update": size / statistics.median(updates) / 1e9, "loopback": limit / 1e9},
        "update_over_loopback": size / statistics.median(updates) / limit,
        "check_seconds": statistics.median(r.fingerprint_seconds + r.verify_seconds for r in reports[1:]),
    }


def conversion(gigabytes: float, room: Path) -> dict[str, Any]:
    config, tensors = model(gigabytes)
    write_hf(room / "hf", config, tensors)
    layer = sum(t.nbytes for n, t in tensors.items() if ".layers.0." in n)
    largest = max(t.nbytes for t in tensors.values())
    del tensors
    found: dict[str, Any] = {"bytes": read_hf(room / "hf")[1].bytes(), "layer_bytes": layer, "tensor_bytes": largest}
    context = multiprocessing.get_context("spawn")  # memory that this process has freed must not count as there
    for name, source, target in (("to_megatron", "hf", "megatron"), ("to_hf", "megatron", "back")):
        with context.Pool(1) as pool:
            seconds, peak = pool.apply(_timed_conversion, (room / source, room / target))
        rate = found["bytes"] / seconds / 1e9
        found[name] = {
            "seconds": seconds,
            "gigabytes_per_second": rate,
            "peak_bytes": peak,
            "peak_over_layer": peak / layer,
        }
    first, second = read_hf(room / "hf")[1], read_hf(room / "back")[1]
    found["exact"] = set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)
    return found


def _timed_conversion(source: Path, target: Path) -> tuple[float, int]:
    torch.set_num_threads(1)
    with PeakMemory() as memory:
        began = time.perf_counter()
        convert(plan(source, target))
        seconds = time.perf_counter() - began
    return seconds, memory.peak


class PeakMemory:
    """Growth of this process's anonymous memory (not of file pages, which the system may take back), sampled."""

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
    options.add_argument("--quick", action="store_true", help="small models, fewer repeats")
    options.add_argument("--json", metavar="FILE", help="write the figures there too")
    options.add_argument("--sglang", action="store_true", help="also push into a real SGLang process")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    repeats = 3 if chosen.quick else 7
    with tempfile.TemporaryDirectory() as room:
        found: dict[str, Any] = {
            "conditions": {
                "cpu": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "load": os.getloadavg()[0],
                "torch": torch.__version__,
                "repeats": repeats,
                "quick": chosen.quick,
            },
            "in_process": in_process(0.064 if chosen.quick else 1.0, repeats),
            "loopback_gigabytes_per_second": loopback(1 << (26 if chosen.quick else 30), repeats) / 1e9,
        }
        if chosen.sglang:
            found["sglang"] = over_http(0.064 if chosen.quick else 1.0, repeats, Path(room))
        found["conversion"] = conversion(0.128 if chosen.quick else 4.0, Path(room))
    print(json.dumps(found, indent=1))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

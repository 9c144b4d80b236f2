"""Measure how fast weights reach engines, the machine's limit, and the cost of checking them.

    python benchmarks/push.py [--quick] [--json FILE] [--sglang]

A model of about 1 GB (bf16; --quick: 64 MB) is pushed into one embedded engine in this process. In turns with it are
measured a copy of the same tensors, which is the limit in a process, and the fingerprints alone.

With --sglang the model (float32) is also pushed into a real `rlspec serve` process by every transport, in turns with
the transport's limit, which is one loopback TCP stream of the same bytes. `update` includes the trainer's
fingerprints, not the comparison afterwards. On a busy machine CPU seconds say more than time: those of both sides,
of the same update and of its limit.
The aim, in either measure, is 0.6 of the limit. Each ratio is a median over pairs, with its 90 %
bootstrap interval.

`profile` lists the functions that take most of an update's time. Figures are medians, on one thread. The conditions are
printed with them.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import pstats
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from synthetic import conditions, model

from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine

AIM = 0.6  # of the limit


class Cost(NamedTuple):
    seconds: float
    cpu: float  # seconds


def alternate(repeats: int, **work: Callable[[], None]) -> dict[str, float]:
    """Measure the median seconds of each function, in turns, so that other load affects all of them."""
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
    """Measure a push into the embedded engine, its update alone, a copy, and the fingerprints alone."""
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


def profile(gigabytes: float) -> list[str]:
    """List the functions in which an in-process push spends its time, by their own seconds."""
    config, tensors = model(gigabytes)
    engine = EmbeddedEngine(
        config, tensors.items(), dtype=torch.bfloat16, max_length=64, max_total_tokens=256, max_running_requests=1
    )
    engine.update_weights(0, tensors.items())
    with cProfile.Profile() as profiler:
        engine.update_weights(1, tensors.items())
    timed: Any = pstats.Stats(profiler)
    rows = sorted(timed.stats.items(), key=lambda row: -row[1][2])[:4]
    return [f"{own:.3f} s in {calls} calls of {function}" for (_, _, function), (_, calls, own, _, _) in rows]


def cpu_seconds(process: psutil.Process | None = None) -> float:
    """Return the CPU seconds of this process, and of `process` with all its children."""
    used = time.process_time()
    for each in [] if process is None else [process, *process.children(recursive=True)]:
        times = each.cpu_times()
        used += times.user + times.system
    return used


def loopback(size: int) -> Cost:
    """Send bytes through one TCP stream to another process on this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    reader = context.Process(target=_drain, args=(listener.getsockname()[1], size))
    reader.start()
    connection, _ = listener.accept()
    block = memoryview(bytearray(1 << 20))
    cpu = time.process_time()
    began = time.perf_counter()
    left = size
    while left:
        connection.sendall(block[: min(left, len(block))])
        left -= min(left, len(block))
    connection.recv(1)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu + float(connection.recv(64))
    connection.close()
    listener.close()
    reader.join()
    return Cost(seconds, cpu)


def _drain(port: int, size: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        buffer = memoryview(bytearray(1 << 20))
        cpu = time.process_time()
        left = size
        while left:
            left -= connection.recv_into(buffer, min(left, len(buffer)))
        connection.sendall(b"k")
        connection.sendall(str(time.process_time() - cpu).encode())


def transports(gigabytes: float, repeats: int, room: Path) -> dict[str, Any]:
    """Push into a real SGLang process on the CPU, by each transport in turn."""
    from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
    from megatron_rlspec.rollout.sglang.client.launcher import launch
    from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast, Http

    config, tensors = model(gigabytes, torch.float32)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_hf(room / "served", config, tensors)
    options = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048", "--candidate-steps", "0,1,2,3"]
    found: dict[str, Any] = {"bytes": size}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with launch(room / "served", room / "log", arguments=options, environment={"OMP_NUM_THREADS": "1"}) as process:
        process.wait()
        server = psutil.Process(process.process.pid)
        ways = {"http": Http(), "group": GroupBroadcast()}
        pushers = {}
        for name, way in ways.items():
            engine = SGLangEngine.of(process, timeout=600, transport=way)
            pushers[name] = Pusher({"engine": engine})
        updates: dict[str, list[Cost]] = {name: [] for name in ways}
        limits: dict[str, list[Cost]] = {name: [] for name in ways}
        checks = []
        for version in range(repeats + 1):
            for name, pusher in pushers.items():
                before = cpu_seconds(server)
                pusher.compare_with(pusher.engines["engine"])
                compared_in = cpu_seconds(server) - before if version else 0.0
                before = cpu_seconds(server)
                report = pusher.push(version, lambda scope: iter(tensors.items()))
                assert not report.failed, report.failed
                used = cpu_seconds(server) - before - compared_in
                updates[name].append(Cost(report.seconds - report.verify_seconds, used))
                limits[name].append(loopback(size))
                checks.append(report.verify_seconds)
    for name in ways:
        found[name] = compared(size, updates[name][1:], limits[name][1:])
    found["verify_seconds"] = statistics.median(checks)
    dist.destroy_process_group()
    return found


def compared(size: int, updates: list[Cost], limits: list[Cost]) -> dict[str, Any]:
    """Return rates, and the update's share of its limit in time and in CPU seconds, each with its interval."""
    found: dict[str, Any] = {"aim": AIM}
    for name, costs in (("update", updates), ("limit", limits)):
        found[f"{name}_gigabytes_per_second"] = size / statistics.median(cost.seconds for cost in costs) / 1e9
        found[f"{name}_cpu_seconds_per_gigabyte"] = statistics.median(cost.cpu for cost in costs) / size * 1e9
    pairs = list(zip(updates, limits, strict=True))
    found["share_of_limit"] = _interval([limit.seconds / update.seconds for update, limit in pairs])
    found["share_of_limit_in_cpu_seconds"] = _interval([limit.cpu / update.cpu for update, limit in pairs])
    return found


def _interval(ratios: list[float]) -> list[float]:
    """Return median, 5 % and 95 % of the median's bootstrap distribution."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return [statistics.median(ratios), medians[50], medians[949]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small models, fewer repeats")
    options.add_argument("--json", metavar="FILE", help="write the figures to this file")
    options.add_argument("--sglang", action="store_true", help="also push into a real SGLang process")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    repeats = 3 if chosen.quick else 7
    with tempfile.TemporaryDirectory() as room:
        found: dict[str, Any] = {
            "conditions": conditions(repeats=repeats, quick=chosen.quick),
            "in_process": in_process(0.064 if chosen.quick else 1.0, repeats),
            "profile": profile(0.064 if chosen.quick else 1.0),
        }
        if chosen.sglang:
            found["sglang"] = transports(0.064 if chosen.quick else 1.0, repeats, Path(room))
    print(json.dumps(found, indent=1))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

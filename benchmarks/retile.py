"""Measure a change of the tensor-parallel size in the embedded engine, between 2 and between 4 processes over gloo.

    python benchmarks/retile.py [--quick] [--json FILE]

weights     resharding the weights in memory, against a push of the whole from rank 0
checkpoint  resharding, against reading a checkpoint that lies in the page cache: a copy in memory, without a wire
restart     resharding, against a new process for each rank that builds its engine from the checkpoint (PAT's naive
            way; section 5.4: 7.25 x)
wire        resharding by all-to-all of the needed pieces, against all-gather and slice (PAT's own way)
cache       moving keys and values of running samples, against prefilling them again, by columns a sample (PAT: 8.06 x)
groups      the first change to a size, which makes its groups, against a later one
memory      the peak resident memory of a rank during a change, beyond the larger of before and after, in layers
error       `rlspec profile --tp 1,2`, then rounds of draining rollouts at each size against its table, both in CPU time
            of rank 0 (PAT, in wall time: 4.04 and 3.07 %)

Both sides of a ratio run in turns. A time is that of the slowest rank; `cpu` is the CPU time of all ranks, which says
more on a busy machine. Ratios are medians over pairs, with the 90 % interval of their bootstrap. Prefilling counts the
target alone. A larger size is no faster on one machine's cores: the gain of a change cannot be measured here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from synthetic import conditions

from megatron_rlspec.rollout import profile
from megatron_rlspec.rollout.embedded import retile
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.led import LedEngine
from megatron_rlspec.rollout.embedded.model import Architecture, Decoder
from megatron_rlspec.rollout.embedded.parallel import Groups, Solo
from megatron_rlspec.rollout.embedded.rounds import RoundRunner
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import OFF, Prompt, Request, Sampling
from megatron_rlspec.weights.checkpoint import read_hf

AIMS = {"weights": 5.0, "checkpoint": 5.0, "restart": 5.0, "wire": 2.0, "cache": 4.0}
RESTARTS = 3
SAMPLES = 9  # as in PAT's example
BATCHES = "1,2,4,8,16"
LENGTHS = "32,128,384"
DRAINING = 16  # samples of a draining rollout, of up to
LONGEST = 500  # tokens
Pair = tuple[float, float]  # seconds of the slowest rank, CPU seconds of all


def config_of(layers: int) -> dict[str, Any]:
    """Return the config.json of a MiMo with four key heads."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": layers,
        "vocab_size": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 4096,
    }


def save(folder: Path, layers: int) -> None:
    """Write a checkpoint with random weights."""
    config = config_of(layers)
    (folder / "config.json").write_text(json.dumps(config))
    model = Decoder(Architecture.from_hf(config), torch.float32, "cpu", Solo(), 8)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: model.full_shape(name) for name in model.tensors}
    tensors = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def timed(work: Callable[[], Any]) -> tuple[Pair, Any]:
    """Run `work` on all ranks at once. Returns its times, and what it returns."""
    dist.barrier()
    cpu = used_cpu()
    began = time.perf_counter()
    result = work()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    used = torch.tensor([used_cpu() - cpu], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return (float(took), float(used)), result


def used_cpu() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def restart(path: Path, size: int) -> None:
    """Start a process that builds an engine from the checkpoint; it holds a rank's part of the weights."""
    subprocess.run([sys.executable, __file__, "--build", str(path), str(size)], check=True)


def build(path: Path, size: int) -> None:
    """Build a rank's model, without its group."""
    torch.set_num_threads(1)
    rank = Solo()
    rank.size = size
    config = json.loads((path / "config.json").read_text())
    reload(Decoder(Architecture.from_hf(config), torch.float32, "cpu", rank, 8), path)


def reload(model: Decoder, path: Path) -> None:
    """Read this rank's part of the checkpoint."""
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            model.write(name, file.get_tensor(name))


def push(model: Decoder, shapes: dict[str, tuple[int, ...]]) -> None:
    """Send every tensor, whole, from rank 0 to all, as a push of the trainer does."""
    for name, shape in shapes.items():
        full = torch.empty(shape)
        dist.broadcast(full, 0)
        model.write(name, full)


def weights(groups: Groups, config: dict[str, Any], path: Path, repeats: int) -> dict[str, list[Pair]]:
    """Measure exchange, gather, push and reload at the change from half the job to all of it, and back."""
    big = groups.world
    small = big // 2
    arch = Architecture.from_hf(config)
    found: dict[str, list[Pair]] = {way: [] for way in ("exchange", "gather", "push", "reload", "restart")}
    model = Decoder(arch, torch.float32, "cpu", groups.of(small), 8)
    shapes = {name: model.full_shape(name) for name in model.tensors}
    reload(model, path)
    for repeat in range(2 * repeats):
        old, new = (small, big) if repeat % 2 == 0 else (big, small)
        switch = retile.Switch(groups, old, new)
        for name, way in (("exchange", retile.exchange), ("gather", retile.gather)):
            found[name].append(timed(partial(retile.retile_weights, model, switch, way))[0])
            if name == "exchange":  # back, so that both do the same
                retile.retile_weights(model, retile.Switch(groups, new, old))
        found["push"].append(timed(partial(push, model, shapes))[0])
        reload(model, path)
        found["reload"].append(timed(partial(reload, model, path))[0])
        if repeat < RESTARTS:
            found["restart"].append(timed(partial(restart, path, new))[0])
    return found


def cache_at(groups: Groups, config: dict[str, Any], columns: int, repeats: int) -> dict[str, list[Pair]]:
    """Measure the move of all samples' keys and values, and their prefill at the new size."""
    big = groups.world
    small = big // 2
    switch = retile.Switch(groups, small, big)
    found: dict[str, list[Pair]] = {"exchange": [], "prefill": []}
    model = Decoder(Architecture.from_hf(config), torch.float32, "cpu", groups.of(small), columns + 8)
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        cache = Cache(model, SAMPLES, columns + 8, SAMPLES * (columns + 8), False)
        rows = []
        mine = {}
        for i in range(SAMPLES):
            source = i % 2
            tokens = rng.integers(1, 8000, columns)
            if source == switch.old_group:
                row = cache.open(tokens, columns // 4)
                assert row is not None and cache.back(row, columns, 0)
                cache.prefix[row].computed = cache.prefix[row].drafted = columns // 4 - 1
                cache.computed[row] = cache.drafted[row] = columns - 1
                mine[str(i)] = row
            prompt = columns // 4
            rows.append(retile.Row(str(i), tokens, prompt, columns - 1, columns - 1, prompt - 1, prompt - 1, source, 0))
        retile.retile_weights(model, switch)
        took, seated = timed(partial(retile.retile_cache, cache, rows, mine, switch))
        found["exchange"].append(took)
        assert len(seated) == SAMPLES, "no room after the change"
        runner = RoundRunner(cache, "position_keyed", None, 2048)
        fresh = list(seated.values())
        for row in fresh:
            cache.prefix[row].computed = 0
            cache.computed[row] = cache.held[row] and columns // 4 - 1

        found["prefill"].append(timed(partial(prefill, runner, fresh))[0])
        retile.retile_weights(model, retile.Switch(groups, big, small))
    return found


def prefill(runner: RoundRunner, rows: list[int]) -> None:
    """Run the target on all tokens of these rows but the pending ones."""
    with torch.inference_mode():
        while not all(runner.ready(row) for row in rows):
            runner.prefill(rows)


def first_and_later(config: dict[str, Any]) -> dict[str, float]:
    """Measure the ms of a change whose groups must be made, and of one whose groups are there."""
    model = Decoder(Architecture.from_hf(config), torch.float32, "cpu", Solo(), 8)
    groups = Groups()

    def change(old: int, new: int) -> None:
        retile.retile_weights(model, retile.Switch(groups, old, new))

    (first, _), _ = timed(partial(change, 1, groups.world))
    change(groups.world, 1)
    (later, _), _ = timed(partial(change, 1, groups.world))
    return {"first_ms": first * 1e3, "later_ms": later * 1e3}


def memory(groups: Groups, config: dict[str, Any]) -> dict[str, float]:
    """Measure by how many layers a rank's memory exceeds that before and after a change to the whole job, and back.

    A layer is its weights, and its keys and values, at the smaller size. From here on what is freed leaves the process.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    model = Decoder(Architecture.from_hf(config), torch.float32, "cpu", Solo(), 1024)
    cache = Cache(model, SAMPLES, 1024, SAMPLES * 1024, False)
    for tensor in (*(p.fused for p in model.parameters), *cache.kv, cache.hidden):
        tensor.fill_(1.0)
    mine: dict[str, int] = {}
    if groups.rank == 0:
        for i in range(SAMPLES):
            row = cache.open(np.arange(1024) + i, 9)
            assert row is not None and cache.back(row, 1024, 0)
            cache.computed[row] = 1023
            mine[str(i)] = row
    rows = [retile.Row(str(i), np.arange(1024) + i, 9, 1023, 1, 0, 1, 0, 0) for i in range(SAMPLES)]
    weights = sum(p.fused.nbytes for p in model.parameters if any(".layers.0." in name for name in p.rows))
    layer = weights + cache.kv[0].nbytes
    found = {}
    for old, new in ((1, groups.world), (groups.world, 1)):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        mine = retile.retile(model, cache, rows, mine, retile.Switch(groups, old, new))
        grown = torch.tensor((resident("VmHWM") - max(before, resident("VmRSS"))) / layer)
        dist.all_reduce(grown, dist.ReduceOp.MAX)
        found[f"TP {old} to {new}"] = float(grown)
    return found


def resident(name: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


def prediction_errors(index: int, folder: str, samples: int) -> None:
    """Profile sizes 1 and 2, and predict every round of draining rollouts. The engine's clock is this rank's CPU time.

    Samples of a rollout end at random stop tokens, so that the batch shrinks as in a real one.
    """
    torch.set_num_threads(1)
    path = Path(folder)
    found = {}
    with mock.patch("time.perf_counter", time.process_time):
        options = ["--engine", "embedded", "--model", folder, "--tp", "1,2", "--steps", "0", "--tolerance", "1"]
        options += ["--batches", BATCHES, "--lengths", LENGTHS, "--samples", str(samples), "--seconds", "600"]
        profile.main([str(path / "sizes.json"), *options])
        table = CostTable.load(path / "sizes.json")
        for tp in (1, 2):
            made = partial(drain_rank, folder)
            engine = made(0, None) if tp == 1 else LedEngine(made, tp)
            rng = np.random.default_rng(0)
            requests = [Request(f"{i}.", Prompt(i, rng.integers(100, 8000, 32)), i) for i in range(DRAINING)]
            sampling = Sampling(max_new_tokens=LONGEST, stop_token_ids=tuple(range(48)), ignore_eos=True)
            engine.generate(requests, sampling)
            real = [(n, context, ms) for _, n, context, ms in engine.recent_rounds() if ms is not None]
            engine.close()
            predicted = np.array([table.ms(OFF, n, context, tp) for n, context, _ in real])
            measured = np.array([ms for _, _, ms in real])
            parts = np.array_split(np.arange(len(real)), max(1, len(real) // 50))
            errors = [abs(predicted[part].sum() / measured[part].sum() - 1) for part in parts]
            whole = float(predicted.sum() / measured.sum() - 1)
            found[f"TP {tp}"] = {"parts of 50 rounds": float(np.mean(errors)), "whole": whole, "rounds": len(real)}
    (path / "errors.json").write_text(json.dumps(found))


def drain_rank(folder: str, rank: int, group: dist.ProcessGroup | None) -> EmbeddedEngine:
    """Build one rank's engine for a draining rollout."""
    config, tensors = read_hf(folder)
    longest = LONGEST + 64
    return EmbeddedEngine(
        config, tensors.items(), group=group, max_length=longest, max_total_tokens=DRAINING * longest + 64
    )


def ratio(pairs: dict[str, list[Pair]], slow: str, which: int) -> dict[str, float]:
    """Return the median of slow over exchange, with the 90 % interval of its bootstrap."""
    values = np.array([b[which] / a[which] for a, b in zip(pairs["exchange"], pairs[slow], strict=False)])
    draws = np.median(np.random.default_rng(0).choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(draws, (0.05, 0.95))
    return {"ratio": float(np.median(values)), "low": float(low), "high": float(high)}


def both(pairs: dict[str, list[Pair]], slow: str) -> dict[str, Any]:
    ms = {way: statistics.median(seconds for seconds, _ in pairs[way]) * 1e3 for way in ("exchange", slow)}
    return {"wall": ratio(pairs, slow, 0), "cpu": ratio(pairs, slow, 1), "ms": ms}


def rank_main(rank: int, size: int, folder: str, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet{size}", timedelta(minutes=5), size, rank)
    path = Path(folder)
    config = json.loads((path / "config.json").read_text())
    groups = Groups()
    repeats = 5 if quick else 15
    found: dict[str, Any] = {}
    moved = weights(groups, config, path, repeats)
    found["weights"] = both(moved, "push")
    found["checkpoint"] = both(moved, "reload")
    found["restart"] = both(moved, "restart")
    found["wire"] = both(moved, "gather")
    for columns in (128, 512) if quick else (128, 512, 2048):
        found[f"cache at {columns}"] = both(cache_at(groups, config, columns, 3 if quick else 7), "prefill")
    found["groups"] = first_and_later(config)
    found["memory"] = memory(groups, config)
    if rank == 0:
        (path / f"found{size}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def show(size: int, found: dict[str, Any]) -> None:
    print(f"\n{size} processes: TP {size // 2} to {size} and back")
    for name, value in found.items():
        if "wall" in value:
            aim = AIMS.get(name.split(" at ")[0])
            times = ", ".join(f"{way} {ms:.1f} ms" for way, ms in value["ms"].items())
            ratios = {kind: value[kind] for kind in ("wall", "cpu")}
            by = "; ".join(f"{k} {v['ratio']:.2f} [{v['low']:.2f}, {v['high']:.2f}]" for k, v in ratios.items())
            print(f"{name:>14}: {by} x (aim {aim}); {times}")
        else:
            print(f"{name:>14}: " + ", ".join(f"{key} {number:.3f}" for key, number in value.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--build", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        build(Path(args.build[0]), int(args.build[1]))
        return
    layers = 4 if args.quick else 8
    result: dict[str, Any] = {"conditions": conditions(layers=layers, samples=SAMPLES, dtype="float32")}
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), layers)
        for size in (2, 4):
            torch.multiprocessing.spawn(rank_main, (size, folder, args.quick), size)
            result[str(size)] = json.loads((Path(folder) / f"found{size}.json").read_text())
            show(size, result[str(size)])
        torch.multiprocessing.spawn(prediction_errors, (folder, 6 if args.quick else 20), 1)
        result["error"] = json.loads((Path(folder) / "errors.json").read_text())
        for size, error in result["error"].items():
            print(f"error at {size}: " + ", ".join(f"{name} {value:.3f}" for name, value in error.items()))
    print("\n" + json.dumps(result["conditions"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure a change of the tensor-parallel size in the embedded engine, between 2 and between 4 processes over gloo.

    python benchmarks/retile.py [--quick] [--json FILE]

weights     resharding the weights in memory, against a push of the whole from rank 0 (PAT, section 5.4: 7.25 x)
checkpoint  resharding, against reading a checkpoint that lies in the page cache: a copy in memory, without a wire
wire        resharding by all-to-all of the needed pieces, against all-gather and slice (PAT's own way)
cache       moving keys and values of running samples, against prefilling them again, by columns a sample (PAT: 8.06 x)
groups      the first change to a size, which makes its groups, against a later one
error       predicting rounds of a draining rollout from a table of dummy batches at each size (PAT: 4.04 and 3.07 %)

Both sides of a ratio run in turns. A time is that of the slowest rank; `cpu` is the CPU time of all ranks, which says
more on a busy machine. Ratios are medians over pairs, with the 90 % interval of their bootstrap. Prefilling counts the
target alone. A larger size is no faster on one machine's cores: the gain of a change cannot be measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from synthetic import conditions

from megatron_rlspec.rollout.embedded import retile
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import Architecture, Decoder
from megatron_rlspec.rollout.embedded.parallel import Groups, Solo
from megatron_rlspec.rollout.embedded.rounds import RoundRunner
from megatron_rlspec.speculation.cost_rows import Provenance, RoundCost
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import OFF, Prompt, Request, Sampling

AIMS = {"weights": 5.0, "wire": 2.0, "cache": 4.0}
SAMPLES = 9  # as in PAT's example
BATCHES = (1, 2, 4, 8, 16)
LENGTHS = (32, 128, 384)
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
    cpu = time.process_time()
    began = time.perf_counter()
    result = work()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return (float(took), float(used)), result


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
    found: dict[str, list[Pair]] = {"exchange": [], "gather": [], "push": [], "reload": []}
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


def prediction_error(groups: Groups, config: dict[str, Any], path: Path, tp: int, steps: int) -> dict[str, float]:
    """Compare the rounds of a draining rollout with a table that was measured on dummy batches, at one size.

    Samples of the rollout end at random stop tokens, so that the batch shrinks as in a real one.
    """
    group = None if tp == 1 else groups.of(tp).group
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    engine = EmbeddedEngine(config, tensors.items(), group=group, max_length=1024, max_running_requests=max(BATCHES))
    rng = np.random.default_rng(0)

    def rounds_of(name: str, batch: int, length: int, sampling: Sampling) -> list[tuple[int, int, float]]:
        made = [Request(f"{name}-{i}.", Prompt(i, rng.integers(100, 8000, length)), i) for i in range(batch)]
        engine.recent_rounds()
        engine.generate(made, sampling)
        return [(n, context, ms) for _, n, context, ms in engine.recent_rounds() if ms is not None]

    cells = []
    dummy = Sampling(max_new_tokens=steps, ignore_eos=True)
    for batch in BATCHES:
        for length in LENGTHS:
            seen = [one for one in rounds_of(f"b{batch}x{length}", batch, length, dummy)[2:] if one[0] == batch]
            ms = statistics.median(ms for _, _, ms in seen)
            context = int(statistics.median(context for _, context, _ in seen))
            cells.append(RoundCost(tp, batch, context, OFF, ms, 0.0, len(seen)))
    here = Provenance(model="synthetic", hardware="cpu", dtype="float32", engine="embedded", engine_version="", date="")
    table = CostTable(here, cells)
    ending = Sampling(max_new_tokens=600, stop_token_ids=tuple(range(32)), ignore_eos=True)
    real = rounds_of("drain", max(BATCHES), 32, ending)
    predicted = np.array([table.ms(OFF, n, context) for n, context, _ in real])
    measured = np.array([ms for _, _, ms in real])
    parts = np.array_split(np.arange(len(real)), max(1, len(real) // 25))
    errors = [abs(predicted[part].sum() / measured[part].sum() - 1) for part in parts]
    return {"mean_error": float(np.mean(errors)), "whole": float(predicted.sum() / measured.sum() - 1)}


def ratio(pairs: dict[str, list[Pair]], slow: str, which: int) -> dict[str, float]:
    """Return the median of slow over exchange, with the 90 % interval of its bootstrap."""
    values = np.array([b[which] / a[which] for a, b in zip(pairs["exchange"], pairs[slow], strict=True)])
    draws = np.median(np.random.default_rng(0).choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(draws, (0.05, 0.95))
    return {"ratio": float(np.median(values)), "low": float(low), "high": float(high)}


def both(pairs: dict[str, list[Pair]], slow: str) -> dict[str, Any]:
    ms = {name: statistics.median(seconds for seconds, _ in found) * 1e3 for name, found in pairs.items()}
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
    found["wire"] = both(moved, "gather")
    for columns in (128, 512) if quick else (128, 512, 2048):
        found[f"cache at {columns}"] = both(cache_at(groups, config, columns, 3 if quick else 7), "prefill")
    found["groups"] = first_and_later(config)
    for tp in (1, size):
        found[f"error at tp {tp}"] = prediction_error(groups, config, path, tp, 12 if quick else 40)
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
    args = parser.parse_args()
    layers = 4 if args.quick else 8
    result: dict[str, Any] = {"conditions": conditions(layers=layers, samples=SAMPLES, dtype="float32")}
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), layers)
        for size in (2, 4):
            torch.multiprocessing.spawn(rank_main, (size, folder, args.quick), size)
            result[str(size)] = json.loads((Path(folder) / f"found{size}.json").read_text())
            show(size, result[str(size)])
    print("\n" + json.dumps(result["conditions"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure a change of the tensor-parallel size in the embedded engine, between 2 and between 4 processes over gloo.

    python benchmarks/retile.py [--quick] [--json FILE]

Resharding the weights in memory is compared, at a change to all processes and at the change back, with

gather      all-gather and slice (PAT's own way)
reload      PAT's naive way: weights come again from the training engine. Here Megatron's shards, one on each rank, are
            gathered, renamed, sent to all ranks and fused, as a push does, without its checks (section 4.3; section
            5.4: 7.47 s over 1.03 s)
push        only the messages of a reload: a broadcast of every tensor from rank 0
cold        a new engine at the new size from a checkpoint whose pages are dropped before, so that they come from disk
warm        the same from the page cache, without a wire
restart     the same in a new process for each rank, imports included (figure 12 has restarts in a whole change)

and further

cache       moving keys and values of running samples, against prefilling them again, by columns a sample (PAT: 8.06 x)
groups      the first change to a size, which makes its groups, against a later one
memory      the peak resident memory of a rank during a change, beyond the larger of before and after, in layers
error       costs of rounds at sizes 1 and 2, measured as `rlspec profile` does, against rounds of draining rollouts
            (PAT: 4.04 and 3.07 %). In turns on one engine: a pass over the points, a rollout. The median costs of the
            two passes around a rollout predict it. `wall` is time, as in PAT. `thread` is the CPU time of rank 0's
            thread, without waiting and without the thread that receives messages: on two cores these depend on which
            process runs first

Both sides of a ratio run in turns. A time is that of the slowest rank; `cpu` is the CPU time of all ranks, which says
more on a busy machine. Ratios are medians over pairs, with the 90 % interval of their bootstrap. Prefilling counts the
target alone. A larger size is no faster on one machine's cores: the gain of a change cannot be measured here.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from synthetic import conditions

from megatron_rlspec.commands.sweep import Bench, tokens_of_a_point
from megatron_rlspec.extensions.migration.embedded import retile
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.led import LedEngine
from megatron_rlspec.extensions.migration.embedded.member import Member
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.rollout.embedded import engine as embedded
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.model import Architecture, Decoder, Parameter
from megatron_rlspec.rollout.embedded.parallel import Groups, Solo
from megatron_rlspec.rollout.embedded.rounds import RoundRunner
from megatron_rlspec.speculation.cost_rows import Provenance, RoundCost
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import OFF, Prompt, Request, Sampling

AIMS = {"gather": 2.0, "reload": 5.0, "prefill": 4.0}
RESTARTS = 3  # each way
SAMPLES = 9  # as in PAT's example
BATCHES = (1, 2, 3, 4, 6, 8, 16)
LENGTHS = (16, 128, 480)
CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}
DRAINING = 16  # samples of a draining rollout, of up to
LONGEST = 500  # tokens
Pair = tuple[float, float]  # seconds of the slowest rank, CPU seconds of all
Cost = tuple[tuple[int, int], np.ndarray, np.ndarray]  # (samples, their tokens), ms by clock, spread by clock


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
    """Build a rank's engine, without its group."""
    torch.set_num_threads(1)
    rank = Solo()
    rank.size = size
    with mock.patch.object(embedded, "Solo", lambda: rank):
        load(path, None)


def load(path: Path, group: dist.ProcessGroup | None) -> MigratableEmbeddedEngine:
    """Build a rank's engine from the checkpoint."""
    config, tensors = read_hf(path)
    return MigratableEmbeddedEngine(config, tensors.items(), max_length=8, max_total_tokens=128, group=group)


def drop_pages(path: Path) -> None:
    """Have the kernel forget the checkpoint's pages, so that the next reader reads the disk."""
    file = os.open(path / "model.safetensors", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def bytes_read() -> float:
    """Return the bytes that all ranks had from a disk."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = torch.tensor(float(lines["read_bytes"]), dtype=torch.float64)
    dist.all_reduce(found)
    return float(found)


def push(model: Decoder, shapes: dict[str, tuple[int, ...]]) -> None:
    """Send every tensor, whole, from rank 0 to all."""
    for name, shape in shapes.items():
        full = torch.empty(shape)
        dist.broadcast(full, 0)
        model.write(name, full)


def trainer_of(path: Path) -> Any:
    """Build Megatron's model with the checkpoint's weights, split over all ranks."""
    from megatron_rlspec.config import Config  # here, so that `restart` does not import Megatron
    from megatron_rlspec.train.step import Trainer

    config, tensors = read_hf(path)
    parallel = {"tensor": dist.get_world_size()}
    trainer = Trainer(Config.model_validate({"model": {"dtype": "float32"}, "parallel": parallel}), config)
    trainer.load_hf(tensors)
    return trainer


def reload(member: Member, trainer: Any) -> None:
    """Bring the trainer's weights into all engines, as a push does."""
    if member.ranks.rank == 0:
        member.update(1, "all", trainer.export(live=True))
        return
    receiving = threading.Thread(target=member.update, args=(1, "all", ()))
    receiving.start()
    deque(trainer.export(live=True), maxlen=0)
    receiving.join()


def gather(switch: retile.Switch, changes: Sequence[tuple[Parameter, Parameter]]) -> None:
    """Fill this rank's part of new parameters: gather each whole one in the old group, and slice."""
    for old, new in changes:
        assert old.split is not None
        targets = new.blocks()
        for name, block in old.blocks().items():
            full = switch.before.concat(block, old.split)
            targets[name].copy_(full.chunk(switch.new, old.split)[switch.after.rank])


def weights(groups: Groups, path: Path, repeats: int) -> dict[str, dict[str, list[Pair]]]:
    """Measure all ways of having weights at another size: from half the job to all of it, and back."""
    big = groups.world
    small = big // 2
    engine = load(path, group_of(groups, small))
    member = Member(engine, Ranks(), None)
    trainer = trainer_of(path)
    model = engine.model
    shapes = {name: model.full_shape(name) for name in model.tensors}
    found: dict[str, dict[str, list[Pair]]] = {}
    for repeat in range(2 * repeats):
        old, new = (small, big) if repeat % 2 == 0 else (big, small)
        there, back = retile.Switch(groups, old, new), retile.Switch(groups, new, old)
        ways: list[tuple[str, Callable[..., None]]] = [("exchange", retile.exchange), ("gather", gather)]
        times: dict[str, list[Pair]] = found.setdefault(f"TP {old} to {new}", {})

        def measure(name: str, work: Callable[[], Any], into: dict[str, list[Pair]] = times) -> None:
            into.setdefault(name, []).append(timed(work)[0])

        for name, way in ways[:: 1 if repeat % 4 < 2 else -1]:
            measure(name, partial(retile.retile_weights, model, there, way))
            retile.retile_weights(model, back)
        retile.retile_weights(model, there)
        measure("push", partial(push, model, shapes))
        measure("reload", partial(reload, member, trainer))
        measure("warm", partial(load, path, group_of(groups, new)))
        if groups.rank == 0:
            drop_pages(path)
        before = bytes_read()
        measure("cold", partial(load, path, group_of(groups, new)))
        assert bytes_read() - before > (path / "model.safetensors").stat().st_size / 2, "the pages are still there"
        if repeat < 2 * RESTARTS:
            measure("restart", partial(restart, path, new))
    loaded = load(path, group_of(groups, small)).model.tensors
    assert all(torch.equal(shard.view, loaded[name].view) for name, shard in model.tensors.items())
    return found


def group_of(groups: Groups, size: int) -> dist.ProcessGroup | None:
    """Return this rank's group for an engine."""
    group = groups.of(size)
    return None if isinstance(group, Solo) else group.group


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
            rows.append(
                retile.CacheRow(str(i), tokens, prompt, columns - 1, columns - 1, prompt - 1, prompt - 1, source, 0)
            )
        retile.retile_weights(model, switch)
        took, seated = timed(partial(retile.retile_cache, cache, rows, mine, switch))
        found["exchange"].append(took)
        assert len(seated) == SAMPLES, "no room after the change"
        runner = RoundRunner(cache, "position_keyed", "argmax", None, 2048)
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
    rows = [retile.CacheRow(str(i), np.arange(1024) + i, 9, 1023, 1, 0, 1, 0, 0) for i in range(SAMPLES)]
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


def prediction_errors(index: int, folder: str, rollouts: int) -> None:
    """Measure costs of rounds at sizes 1 and 2, and in turns draining rollouts, and predict these."""
    torch.set_num_threads(1)
    found = {}
    for tp in (1, 2):
        made = partial(drain_rank, folder)
        engine = made(0, None) if tp == 1 else LedEngine(made, tp)
        with mock.patch.object(embedded, "time", SimpleNamespace(perf_counter=clocks, sleep=time.sleep)):
            bench = Bench(engine, [OFF], 8000)
            drain(engine, rollouts)  # touches all memory
            passes = [costs(bench)]
            drained = []
            for number in range(rollouts):
                drained.append(drain(engine, number))
                passes.append(costs(bench))
        engine.close()
        for clock, name in enumerate(CLOCKS):
            spread = float(np.median([cost[2][clock] / cost[1][clock] for one in passes for cost in one]))
            errors = [error_of(table_of(passes[i : i + 2], clock), drained[i], clock) for i in range(rollouts)]
            parts = statistics.mean(parts for parts, _ in errors)
            found[f"TP {tp}, {name}"] = {"parts": parts, "whole": [whole for _, whole in errors], "spread": spread}
    (Path(folder) / "errors.json").write_text(json.dumps(found))


def clocks() -> np.ndarray:
    """Read all clocks. The engine then returns rounds with an array of durations."""
    return np.array([read() for read in CLOCKS.values()])


def costs(bench: Bench) -> list[Cost]:
    """Measure a round at every point."""
    found = []
    tokens = tokens_of_a_point(1)
    for batch, length in itertools.product(BATCHES, LENGTHS):
        ms = np.array(bench.measure((batch, length), tokens, 12).steady[OFF])
        low, middle, high = np.quantile(ms, [0.25, 0.5, 0.75], axis=0)
        found.append(((batch, batch * (length + tokens // 2)), middle, (high - low) / 2))
    return found


def table_of(passes: list[list[Cost]], clock: int) -> CostTable:
    """Make a cost table, by one clock, of the mean of some passes."""
    rounds = []
    for same in zip(*passes, strict=True):
        batch, context = same[0][0]
        rounds.append(RoundCost(1, batch, context, OFF, statistics.mean(float(ms[clock]) for _, ms, _ in same), 0.0, 1))
    return CostTable(Provenance("random", "cpu", "float32", "embedded", "", ""), rounds, ())


def drain(engine: EmbeddedEngine | LedEngine, seed: int) -> list[Any]:
    """Draw samples that end at random stop tokens, so that the batch shrinks as in a real rollout. Returns rounds."""
    engine.recent_rounds()
    rng = np.random.default_rng(seed)
    prompts = [Prompt(i, rng.integers(100, 8000, 32)) for i in range(DRAINING)]
    requests = [Request(f"{seed}-{i}.", prompt, 100 * seed + i) for i, prompt in enumerate(prompts)]
    engine.generate(requests, Sampling(max_new_tokens=LONGEST, stop_token_ids=tuple(range(48)), ignore_eos=True))
    return engine.recent_rounds()


def error_of(table: CostTable, rounds: list[Any], clock: int) -> tuple[float, float]:
    """Return the mean error over parts of 50 rounds, and that of the whole rollout, with its sign."""
    predicted = np.array([table.ms(OFF, n, context, 1) for _, n, context, _ in rounds])
    measured = np.array([ms[clock] for *_, ms in rounds])
    parts = np.array_split(np.arange(len(rounds)), max(1, len(rounds) // 50))
    errors = [abs(predicted[part].sum() / measured[part].sum() - 1) for part in parts]
    return float(np.mean(errors)), float(predicted.sum() / measured.sum() - 1)


def drain_rank(folder: str, rank: int, group: dist.ProcessGroup | None) -> EmbeddedEngine:
    """Build one rank's engine for costs and draining rollouts."""
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


def against(pairs: dict[str, list[Pair]]) -> dict[str, Any]:
    """Compare every other way with the exchange."""
    found = {}
    for slow in pairs.keys() - {"exchange"}:
        ms = {way: statistics.median(seconds for seconds, _ in pairs[way]) * 1e3 for way in ("exchange", slow)}
        found[slow] = {"wall": ratio(pairs, slow, 0), "cpu": ratio(pairs, slow, 1), "ms": ms}
    return dict(sorted(found.items()))


def rank_main(rank: int, size: int, folder: str, quick: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", f"file://{folder}/meet{size}", timedelta(minutes=5), size, rank)
    path = Path(folder)
    config = json.loads((path / "config.json").read_text())
    groups = Groups()
    found: dict[str, Any] = {"groups": first_and_later(config)}
    ratios: dict[str, Any] = {}
    for columns in (128, 512) if quick else (128, 512, 2048):
        ratios[f"caches, {columns} columns"] = against(cache_at(groups, config, columns, 3 if quick else 7))
    for change, pairs in weights(groups, path, 5 if quick else 15).items():  # later: it fills memory with Megatron
        ratios[f"weights, {change}"] = against(pairs)
    found |= {"ratios": ratios, "memory": memory(groups, config)}
    if rank == 0:
        (path / f"found{size}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def show(size: int, found: dict[str, Any]) -> None:
    print(f"\n{size} processes")
    for what, ways in found["ratios"].items():
        print(what)
        for way, value in ways.items():
            times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in value["ms"].items())
            of = {kind: value[kind] for kind in ("wall", "cpu")}
            by = "; ".join(f"{k} {v['ratio']:.2f} [{v['low']:.2f}, {v['high']:.2f}]" for k, v in of.items())
            print(f"{way:>10}: {by} x{f' (aim {AIMS[way]})' if way in AIMS else ''}; {times}")
    for what in ("groups", "memory"):
        print(f"{what}: " + ", ".join(f"{key} {number:.3f}" for key, number in found[what].items()))


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
        torch.multiprocessing.spawn(prediction_errors, (folder, 3 if args.quick else 6), 1)
        result["error"] = json.loads((Path(folder) / "errors.json").read_text())
        for case, error in result["error"].items():
            whole = ", ".join(f"{value:+.1%}" for value in error["whole"])
            print(f"error, {case}: {error['parts']:.1%} over parts, {whole} whole; spread {error['spread']:.1%}")
    print("\n" + json.dumps(result["conditions"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

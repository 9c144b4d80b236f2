"""Measure how long decode rounds take, by requests, context and drafts, and write it as JSON.

    python benchmarks/round_costs.py sizes.json --model DIR --tp 1,2,4      # the embedded engine; for tail.cost_table
    python benchmarks/round_costs.py costs.json --url http://127.0.0.1:30000      # an `rlspec serve` that runs

The embedded engine runs in this process, and above --tp 1 in as many others. Set OMP_NUM_THREADS as in the run:
torchrun sets 1. Nothing else may use the machine. A point is a number of requests and of prompt tokens. At each, all
numbers of drafts take turns, so that a slow minute slows all alike. Medians are written.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_rlspec import arguments, files
from megatron_rlspec.conversion.drafter_files import read_model, weights_of, words
from megatron_rlspec.host import ports
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig

ROUNDS = 12  # of each configuration at a point, at least, if
CYCLES = (3, 8)  # so many generations of each have them: at least, at most
NEW_TOKENS = 32  # of a generation
PREFILLS = 4  # of a length; the first may compile
WORDS = 128  # from which prompts are drawn; every vocabulary has them
MARGIN = 64  # tokens of KV cache beyond those of a point

Engine = EmbeddedEngine | SGLangEngine


@dataclass(frozen=True)
class Point:
    """The median ms of rounds, and half their interquartile range. `context` is that of all requests."""

    tp: int
    requests: int
    context: int
    config: SpecConfig
    ms: float
    spread: float


@dataclass
class Measured:
    """`prefill`: tensor-parallel size, tokens, ms from a request to its first token."""

    points: list[Point] = field(default_factory=list)
    prefill: list[tuple[int, int, float]] = field(default_factory=list)

    def save(self, path: Path, **origin: str) -> None:
        """Write the file that `extensions/migration/plans/round_costs.py` reads."""
        rounds = []
        for point in self.points:
            rounds.append([point.tp, point.requests, point.context, point.config.num_steps, round(point.ms, 6)])
        origin |= {"hardware": hardware(), "date": datetime.date.today().isoformat()}
        lists = {"rounds": rounds, "prefill": [list(row) for row in self.prefill]}
        parts = [f' "{name}": {json.dumps(value)}' for name, value in origin.items()]
        for name, rows in lists.items():  # a row a line, so that people can compare files
            parts.append(f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]")
        files.write(path, "{\n" + ",\n".join(parts) + "\n}\n")


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


class Bench:
    """Measures an engine of the tensor-parallel size `tp`. Of the embedded engine all ranks do the same."""

    def __init__(self, engine: Engine, steps: Sequence[int], tp: int) -> None:
        self.engine = engine
        self.tp = tp
        self.about = engine.describe()
        self.configs = [OFF, *(SpecConfig(k) for k in sorted(steps) if k)] if self.about["speculative"] else [OFF]
        self.rng = np.random.default_rng(0)
        self.serial = itertools.count()

    def fits(self, requests: int, length: int) -> bool:
        """Return whether the engine has room for a point."""
        tokens = requests * (length + NEW_TOKENS) + MARGIN
        return requests <= self.about["max_running_requests"] and tokens <= self.about["max_total_tokens"]

    def point(self, requests: int, length: int) -> list[Point]:
        """Measure a point. Raises RuntimeError if a configuration never runs."""
        found: dict[SpecConfig, list[float]] = {config: [] for config in self.configs}
        prompts = self.prompts(requests, length)
        for cycle in range(CYCLES[1]):
            for config in self.configs:
                if self.about["speculative"]:
                    self.engine.set_config(config)
                self.engine.recent_rounds()  # drops those of others
                self.generate(prompts, NEW_TOKENS)
                found[config] += self.steady(config, requests)
            if cycle + 1 >= CYCLES[0] and min(map(len, found.values())) >= ROUNDS:
                break
        points = []
        for config, ms in found.items():
            if not ms:
                raise RuntimeError(f"{requests} requests of {length} tokens: the engine ran no round of {config}")
            low, middle, high = np.quantile(ms, [0.25, 0.5, 0.75]).tolist()
            context = requests * (length + NEW_TOKENS // 2)
            points.append(Point(self.tp, requests, context, config, middle, (high - low) / 2))
        return points

    def steady(self, config: SpecConfig, requests: int) -> list[float]:
        """Return ms of the rounds of all requests that came after another such round."""
        ran = [ms if (ran, batch) == (config, requests) else None for ran, batch, _, ms in self.engine.recent_rounds()]
        return [ms for before, ms in itertools.pairwise(ran) if before is not None and ms is not None]

    def prefill(self, length: int) -> tuple[int, int, float]:
        took = []
        for _ in range(PREFILLS):
            prompt = self.prompts(1, length)  # a new one, which no cache holds
            start = time.perf_counter()
            self.generate(prompt, 1)
            took.append(1e3 * (time.perf_counter() - start))
        return self.tp, length, round(statistics.median(took[1:]), 6)

    def prompts(self, requests: int, length: int) -> list[Prompt]:
        return [Prompt(i, row) for i, row in enumerate(self.rng.integers(3, WORDS, (requests, length)))]

    def generate(self, prompts: Sequence[Prompt], tokens: int) -> None:
        number = next(self.serial)
        requests = [Request(f"costs-{number}-{p.id:04d}.", p, seed=number) for p in prompts]
        self.engine.generate(requests, Sampling(max_new_tokens=tokens, ignore_eos=True))


def measure(
    engine: Engine, steps: Sequence[int], batches: Sequence[int], lengths: Sequence[int], seconds: float, tp: int = 1
) -> Measured:
    """Measure the points that fit into an engine. None but the first is begun after `seconds`.

    The outermost batches come first: between measured batches a cost is better known than beyond them.
    """
    deadline = time.monotonic() + seconds
    bench = Bench(engine, steps, tp)
    measured = Measured([], [bench.prefill(length) for length in sorted(lengths) if bench.fits(1, length)])
    for requests, length in itertools.product(outward(batches), sorted(lengths)):
        if not bench.fits(requests, length):
            continue
        if measured.points and late(deadline):
            print(f"out of time before {requests} requests of {length} tokens; use more --seconds")
            break
        points = bench.point(requests, length)
        measured.points += points
        if not dist.is_initialized() or dist.get_rank() == 0:
            costs = ", ".join(f"{point.config} {point.ms:.1f}" for point in points)
            print(f"tp {tp}, {requests} requests of {length} tokens: {costs} ms a round", flush=True)
    if not measured.points:
        raise SystemExit(f"no point of --batches {batches} and --lengths {lengths} fits into this engine")
    return measured


def outward(batches: Sequence[int]) -> list[int]:
    """Return the batches from both ends inwards: smallest, largest, second smallest, ..."""
    left = sorted(set(batches))
    order = []
    while left:
        order.append(left.pop(0))
        left.reverse()
    return order


def late(deadline: float) -> bool:
    """Return whether it is, by the clock of the first rank."""
    told = [time.monotonic() > deadline]
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    return told[0]


def embedded(args: argparse.Namespace, tp: int) -> Measured:
    """Measure the embedded engine of one size, in this process or in as many others."""
    if tp == 1:
        return embedded_rank(args, 1, "", 0)
    meeting = f"tcp://127.0.0.1:{ports.free_port(ports.JOBS)}"
    with ProcessPoolExecutor(tp, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(partial(embedded_rank, args, tp, meeting), range(tp)))[0]


def embedded_rank(args: argparse.Namespace, tp: int, meeting: str, rank: int) -> Measured:
    group = None
    if tp > 1:
        torch.set_num_threads(args.threads)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=tp)
        group = dist.group.WORLD
    hf_config, tensors = read_model(args.model, args.draft_model)
    drafts = DRAFTER in hf_config or hf_config.get("num_nextn_predict_layers")
    longest = max(args.lengths) + NEW_TOKENS + MARGIN
    engine = EmbeddedEngine(
        hf_config,
        weights_of(tensors),
        draft_words=words(tensors, hf_config) if DRAFTER in hf_config else None,
        dtype=getattr(torch, args.dtype),
        device=f"cuda:{rank}" if torch.cuda.is_available() else "cpu",
        candidates=[OFF, *(SpecConfig(k) for k in args.steps if k and drafts)],
        max_running_requests=max(args.batches),
        max_total_tokens=max(args.batches) * longest + MARGIN,
        max_length=longest,
        group=group,
    )
    measured = measure(engine, args.steps, args.batches, args.lengths, args.seconds, tp)
    if group is not None:
        dist.destroy_process_group()
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    integers = arguments.distinct_integers
    p.add_argument("out", type=Path)
    p.add_argument("--model", default="", help="Hugging Face directory, for the embedded engine")
    p.add_argument("--draft-model", default="", help="Hugging Face directory of an EAGLE-3 drafter for --model")
    p.add_argument("--url", default="", help="of an `rlspec serve` that runs")
    p.add_argument("--tp", type=integers(1, 4096), default=[1], help="tensor-parallel sizes of the embedded engine")
    p.add_argument("--dtype", default="float32", help="of the embedded engine")
    p.add_argument("--steps", type=integers(0, 64), default=[1, 2, 3, 5], help="drafts; none is always measured")
    p.add_argument("--batches", type=integers(1, 1 << 16), default=[1, 4, 16, 64], help="running requests")
    p.add_argument("--lengths", type=integers(1, 1 << 22), default=[64, 512], help="prompt tokens of each request")
    p.add_argument("--seconds", type=float, default=900.0, help="for each size of --tp")
    args = p.parse_args(argv)
    if bool(args.model) == bool(args.url):
        p.error("give --model for the embedded engine, or --url of an `rlspec serve`")
    args.threads = torch.get_num_threads()
    if args.url:
        engine = SGLangEngine(args.url)
        tp = engine.describe()["tensor_parallel"]
        measured = measure(engine, args.steps, args.batches, args.lengths, args.seconds, tp)
        measured.save(args.out, engine="sglang", model=args.url)
        return 0
    measured = Measured()
    for tp in args.tp:
        of_size = embedded(args, tp)
        measured.points += of_size.points
        measured.prefill += of_size.prefill
        measured.save(args.out, engine="embedded", model=Path(args.model).resolve().name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

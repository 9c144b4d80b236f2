"""Measure moves of running samples between two SGLang engines on a CPU.

    python benchmarks/tail.py [--quick] [--repetitions N] [--json FILE]

skewed    One engine draws 48 samples, the other one 1; 24 move with their KV cache (RLHFSpec, figure 5). Tokens per
          second of both engines after the move, over the same seconds of a rollout without it: contexts grow, so the
          seconds before the move would be no fair rival.
rollout   Log-normal response lengths. Makespans of three ways, in turn within each repetition: `static` deals all
          requests at the start, `in_flight` gives an engine further ones as it runs dry, `moved` is static with a
          `Balancer`. Dealt badly: the long samples are all on one engine. Dealt well: each has its share.
moves     Bytes and milliseconds of one move, and of recomputing the same sample, by its length: from the order to leave
          until the target decodes it.

Two engines on a machine with other work get no core of their own. Beside wall time stand the CPU seconds of the
schedulers: a makespan is then the larger one of both engines', and a rate is the sum of both engines' tokens per CPU
second, as if each engine had a core. Figures are medians over repetitions, with the lowest and highest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bigram_model import VOCAB, checkpoint
from synthetic import conditions

from megatron_rlspec.extensions.migration.balancer import Balancer
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.moves import Moved, Mover
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer, Transport
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client import engine as client
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.rollout.sglang.settings import KEY
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import Move, Prompt, Request, Sampling, SpecConfig, SpecSchedule

K = SpecConfig(2)
AIMS = {"skewed": 1.25, "badly/static": 1.15, "badly/in_flight": 1.03, "well/static": 0.98}
CAP = 3000  # tokens of the longest response
LONGEST = {48: 1200, 1: 6000}  # tokens of responses that outlast `skewed`, by how many there are; all fit the cache
Engines = dict[str, MigratableSGLangEngine]
_serial = itertools.count()
_wanted: dict[str, int] = {}  # request -> the length of its response


class Pair:
    """Two engines, and the CPU seconds that their schedulers have used."""

    def __init__(self, engines: Engines, schedulers: Sequence[psutil.Process]) -> None:
        self.engines = engines
        self.schedulers = schedulers

    def cpu(self) -> np.ndarray:
        return np.array([sum(process.cpu_times()[:2]) for process in self.schedulers])

    def drawn(self) -> np.ndarray:
        """Return the tokens of the samples that each engine draws now."""
        return np.array([sum(held.context for held in engine.progress().running) for engine in self.engines.values()])


def given_lengths() -> None:
    """Have every request end at its own length, as if it had drawn a stop token there."""
    plain = client._body

    def body(request: Request, common: Sampling) -> dict[str, Any]:
        return plain(request, replace(common, max_new_tokens=_wanted[request.id]))

    client._body = body
    client._STATUS["length"] = "finished"


def request(prompt: int, length: int, tokens: int = 16) -> Request:
    number = next(_serial)
    name = f"{number:08d}."
    _wanted[name] = length
    return Request(name, Prompt(prompt, np.random.default_rng(number).integers(3, VOCAB, tokens)), number)


@contextlib.contextmanager
def in_thread(act: Callable[[RunningRequests], None], owner: RunningRequests) -> Iterator[None]:
    thread = threading.Thread(target=act, args=(owner,))
    thread.start()
    yield
    thread.join()


# ---- skewed ----------------------------------------------------------------------------------------------------------


def skewed(pair: Pair, samples: int, seconds: float, move: bool) -> tuple[float, float, Moved | None]:
    """Return tokens per wall second and per CPU second, after some seconds and perhaps a move; and the move."""
    rates: list[tuple[float, float]] = []
    moved: list[Moved] = []
    pool = EnginePool(pair.engines)

    def act(owner: RunningRequests) -> None:
        while sum(len(engine.progress().running) for engine in pair.engines.values()) < samples + 1:
            time.sleep(0.05)
        time.sleep(seconds)
        if move:
            loads = {name: engine.progress() for name, engine in pair.engines.items()}
            full, empty = sorted(loads, key=lambda name: -len(loads[name].running))
            ids = tuple(held.id for held in loads[full].running[: samples // 2])
            moved.append(Mover(owner, pair.engines).move(Move(full, empty, ids, "kv"), loads[full].version))
            while len(pair.engines[empty].progress().running) < 1 + len(moved[0].ids):
                time.sleep(0.01)
        tokens, cpu, wall = pair.drawn(), pair.cpu(), time.perf_counter()
        time.sleep(seconds)
        tokens, cpu, wall = pair.drawn() - tokens, pair.cpu() - cpu, time.perf_counter() - wall
        rates.append((tokens.sum() / wall, (tokens / np.maximum(cpu, 1e-3)).sum()))
        pool.abort()

    pool.balance = lambda owner: in_thread(act, owner)
    asked = [request(0, LONGEST[samples]) for _ in range(samples)] + [request(1, LONGEST[1])]
    pool.generate(asked, Sampling(ignore_eos=True))
    return *rates[0], (moved or [None])[0]


def skewed_pairs(pair: Pair, repetitions: int, seconds: float) -> dict[str, Any]:
    """Compare rollouts with and without the move, in turn."""
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    found: list[Moved] = []
    for repetition in range(repetitions):
        runs = {move: skewed(pair, 48, seconds, move) for move in ((False, True), (True, False))[repetition % 2]}
        for i, unit in enumerate(ratios):
            ratios[unit].append(runs[True][i] / runs[False][i])
        found.append(runs[True][2])
    return {unit: spread(values) for unit, values in ratios.items()} | {
        "ms": float(np.median([moved.ms for moved in found])),
        "bytes": float(np.median([moved.bytes for moved in found])),
    }


# ---- rollout ---------------------------------------------------------------------------------------------------------


def drawn_lengths(samples: int, seed: int) -> list[int]:
    """Draw lengths as RLHFSpec's figure 3 shows them: the 95th percentile is 3.6 times the median."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.784, samples)
    return sorted(np.clip(np.round(450 * drawn), 8, CAP).astype(int).tolist(), reverse=True)


def dealt(lengths: Sequence[int], badly: bool) -> list[int]:
    """Order lengths so that a pool that deals in turn gives one engine the longest half, or each engine its share."""
    if not badly:
        return list(lengths)
    half = len(lengths) // 2
    return [length for two in zip(lengths[:half], lengths[half:], strict=True) for length in two]


def rollout(pair: Pair, way: str, lengths: Sequence[int], seen: Lengths, planner: Rebalancer) -> dict[str, Any]:
    asked = [request(i, length) for i, length in enumerate(lengths)]
    pool = EnginePool(pair.engines, in_flight=len(lengths) // 4 if way == "in_flight" else 0)
    found: list[Balancer] = []

    def balance(owner: RunningRequests) -> Balancer:
        found.append(Balancer(owner, pair.engines, planner, seen, CAP, every=16))
        return found[0]

    if way == "moved":
        pool.balance = balance
    for engine in pair.engines.values():
        engine.stats()
    cpu, wall = pair.cpu(), time.perf_counter()
    samples = pool.generate(asked, Sampling(max_new_tokens=CAP, ignore_eos=True))
    cpu, wall = pair.cpu() - cpu, time.perf_counter() - wall
    if [len(sample.response) for sample in samples] != list(lengths):
        raise SystemExit(f"{way}: the lengths of the responses are not the wanted ones")
    planner.observe([stats for engine in pair.engines.values() for stats in engine.stats()])
    moves = found[0].moves if found else []
    return {
        "wall": wall,
        "cpu": float(cpu.max()),
        "moved": sum(len(m.ids) for m in moves),
        "rounds": [m.rounds for m in moves if m.ids],
        "decisions": found[0].seconds / wall if found else 0.0,
        "moving": sum(m.ms for m in moves) / 1e3 / wall,
    }


def rollouts(pair: Pair, samples: int, repetitions: int) -> dict[str, Any]:
    config = SpecSchedule.fixed(K)
    for engine in pair.engines.values():
        engine.set_schedule(config)
    report: dict[str, Any] = {}
    ways = ("static", "in_flight", "moved")
    seen = Lengths()
    seen.observe(drawn_lengths(200, 1), [False] * 200)
    planner = Rebalancer(LearntCost(Roofline.of_layers(LAYERS)), [K], Transport(token_bytes=TOKEN_BYTES))
    rollout(pair, "static", dealt(drawn_lengths(samples, 2), badly=True), Lengths(), planner)  # learns costs
    for dealing in ("badly", "well"):
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for repetition in range(repetitions):
            lengths = dealt(drawn_lengths(samples, 10 + repetition), dealing == "badly")
            for way in (*ways[repetition % 3 :], *ways[: repetition % 3]):
                runs[way].append(rollout(pair, way, lengths, seen, planner))
        report[dealing] = {"runs": runs}
        for rival in ("static", "in_flight"):
            for unit in ("wall", "cpu"):
                ratios = [a[unit] / b[unit] for a, b in zip(runs[rival], runs["moved"], strict=True)]
                report[dealing][f"{rival}/{unit}"] = spread(ratios)
    return report


# ---- moves -----------------------------------------------------------------------------------------------------------


def moves(pair: Pair, tokens: int) -> dict[str, Any]:
    """Move one sample of a prompt of so many tokens, by its KV cache and by recomputation."""
    found: dict[str, Any] = {"tokens": tokens}
    names = list(pair.engines)
    for how in ("kv", "recompute"):
        asked = request(0, 400, tokens)
        pool = EnginePool({names[0]: pair.engines[names[0]]})
        pool.add(names[1], pair.engines[names[1]])

        def act(owner: RunningRequests, how: str = how, name: str = asked.id, pool: EnginePool = pool) -> None:
            while not (here := [n for n in names if pair.engines[n].progress().running]):
                time.sleep(0.01)
            there = names[1 - names.index(here[0])]
            began = time.perf_counter()
            moved = Mover(owner, pair.engines).move(Move(here[0], there, (name,), how), 0)  # type: ignore[arg-type]
            while not pair.engines[there].progress().running:
                time.sleep(0.002)
            total = 1e3 * (time.perf_counter() - began)
            away = total - moved.ms + moved.away_ms
            found[how] = {"ms": total, "away_ms": away, "bytes": moved.bytes, "kept": moved.kept}
            pool.abort()

        pool.balance = lambda owner, act=act: in_thread(act, owner)  # type: ignore[misc]
        pool.generate([asked], Sampling(ignore_eos=True))
    return found


# ---- the whole -------------------------------------------------------------------------------------------------------

LAYERS, HIDDEN = 8, 512  # large enough that a round of many samples takes longer than one of few
TOKEN_BYTES = 2 * (LAYERS + 1) * HIDDEN // 2 * 4


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "low": float(min(values)), "high": float(max(values))}


def shown(name: str, found: dict[str, float]) -> None:
    aim = AIMS.get(name.removesuffix(" (wall)").removesuffix(" (CPU)"))
    aimed = f", aim {aim}" if aim else ""
    print(f"{name:28} {found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]{aimed}", flush=True)


@contextlib.contextmanager
def engines(folder: Path) -> Iterator[Pair]:
    config, tensors = checkpoint(12.0, LAYERS, HIDDEN)
    write_hf(folder / "model", config | {"max_position_embeddings": 16384}, tensors)
    options = {"max-total-tokens": 98304, "max-running-requests": 64, "spec": "adaptive", "candidate-steps": "0,2"}
    arguments = ["--device", "cpu", "--dtype", "float32", "--extensions", "migration"]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                launch(
                    folder / "model", folder / f"{name}.log", arguments=arguments, environment={"OMP_NUM_THREADS": "1"}
                )
            )
            for name in "ab"
        ]
        found = {
            name: MigratableSGLangEngine.of(process.wait(), timeout=600)
            for name, process in zip("ab", started, strict=True)
        }
        schedulers = []
        for process in started:
            children = psutil.Process(process.process.pid).children(recursive=True)
            schedulers.append(next(child for child in children if "scheduler" in " ".join(child.cmdline())))
        yield Pair(found, schedulers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repetition and short moves")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    repetitions, samples = (1, 24) if options.quick else (options.repetitions, 48)
    os.environ.setdefault(KEY, secrets.token_urlsafe(32))
    given_lengths()
    report: dict[str, Any] = {"conditions": conditions(quick=options.quick, layers=LAYERS, hidden=HIDDEN)}
    print(json.dumps(report["conditions"]), flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, engines(Path(folder)) as pair:
        for engine in pair.engines.values():
            engine.set_schedule(SpecSchedule.fixed(K))
        report["skewed"] = skewed_pairs(pair, repetitions, 5.0)
        shown("skewed (wall)", report["skewed"]["wall"])
        shown("skewed (CPU)", report["skewed"]["cpu"])
        print(
            f"  24 samples moved in {report['skewed']['ms']:.0f} ms, {report['skewed']['bytes'] / 1e6:.1f} MB",
            flush=True,
        )
        report["moves"] = [moves(pair, n) for n in ((16, 128, 512) if options.quick else (16, 128, 512, 2048, 8000))]
        for row in report["moves"]:
            kv, again = row["kv"], row["recompute"]
            print(
                f"  {row['tokens']:5} tokens: {kv['bytes'] / 1e6:.1f} MB, away {kv['away_ms']:.0f} ms by KV, "
                f"{again['away_ms']:.0f} ms by recomputation",
                flush=True,
            )
        report["rollout"] = rollouts(pair, samples, repetitions)
        for dealing in ("badly", "well"):
            for rival, unit in itertools.product(("static", "in_flight"), ("wall", "cpu")):
                label = f"{dealing}/{rival} ({'wall' if unit == 'wall' else 'CPU'})"
                shown(label, report["rollout"][dealing][f"{rival}/{unit}"])
            moved = report["rollout"][dealing]["runs"]["moved"]
            rounds = [r for run in moved for r in run["rounds"]]
            print(
                f"  {np.median([run['moved'] for run in moved]):.0f} samples moved a rollout, "
                f"{np.median(rounds) if rounds else 0:.1f} rounds missed a move (aim 3), decisions "
                f"{100 * np.median([run['decisions'] for run in moved]):.2f} % and moves "
                f"{100 * np.median([run['moving'] for run in moved]):.2f} % of the time (aim 1)",
                flush=True,
            )
    report["load after"] = os.getloadavg()[0]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

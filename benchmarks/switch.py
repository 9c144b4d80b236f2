"""Measure the cost of starting and stopping to draft in SGLang's engine on a CPU, after rests of several lengths.

    python benchmarks/switch.py [--quick] [--json FILE]

The schedule of one engine alternates between rounds without drafts (a rest) and a few rounds of three steps. A rest is
one of

off     our configuration: no drafter pass, and one pass over the missed tokens when drafting starts
k0      SGLang's step 0: a drafter pass every round

Printed per batch and length of the rest, in ms, are medians with the 95 % interval of their bootstrap:

start   the first drafting round minus the median of the next ones; after off, it includes the missed tokens
stop    the first resting round minus the median of the next ones
round   a resting round

The drafter's acceptance is near zero, so every round advances each request by about one token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from adaptive_sglang import PROMPT, SHARPNESS, rollout, share_a_key
from bigram_model import checkpoint, worse_drafter
from synthetic import conditions

from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

DRAFTING = SpecConfig(3)
TURN = 8  # rounds of drafting between two rests
RESTS = {"off": OFF, "k0": SpecConfig(0)}
KINDS = ("start", "stop", "round")


def measure(engine: SGLangEngine, rest: SpecConfig, batch: int, gap: int, samples: int) -> dict[str, list[float]]:
    """Measure extra ms of starting and of stopping, and ms of resting rounds, over at least `samples` starts."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cycles = max(1, min(samples, 600 // (gap + TURN)))
    edges = [0]
    at = PROMPT
    for _ in range(cycles):
        edges += [batch * (at + gap), batch * (at + gap + TURN)]
        at += gap + TURN
    configs = tuple(itertools.islice(itertools.cycle((rest, DRAFTING)), len(edges)))
    engine.set_schedule(SpecSchedule((1,), tuple(edges), (configs,)))
    while len(found["start"]) < samples:
        engine.recent_rounds()
        rollout(engine, [at + TURN - PROMPT] * batch, seed=1)
        rounds = [r for r in engine.recent_rounds() if r[1] == batch]
        turns = [[ms for *_, ms in turn] for _, turn in itertools.groupby(rounds, key=lambda r: r[0])]
        kinds = [config for config, _ in itertools.groupby(rounds, key=lambda r: r[0])]
        for i, (config, turn) in enumerate(zip(kinds, turns, strict=True)):
            later = [ms for ms in turn[1:] if ms is not None]
            if i == 0 or not later or turn[0] is None:
                continue
            if config == DRAFTING and len(turns[i - 1]) >= gap - 1:
                found["start"].append(turn[0] - statistics.median(later))
            elif config == rest and len(later) >= min(gap - 1, 4):
                found["stop"].append(turn[0] - statistics.median(later))
                found["round"].append(statistics.median(later))
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute the median and the 95 % interval of its bootstrap."""
    rng = np.random.default_rng(0)
    medians = np.median(np.array(values)[rng.integers(0, len(values), (2000, len(values)))], axis=1)
    return statistics.median(values), *map(float, np.quantile(medians, [0.025, 0.975]))


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--quick", action="store_true", help="fewer batches, rests and samples")
    p.add_argument("--json", type=Path, help="write all figures to this file")
    p.add_argument("--starts", type=int, default=0, help="starts of each kind; default: 15, or 5 with --quick")
    p.add_argument("--layers", type=int, default=16, help="layers of the target")
    p.add_argument("--hidden", type=int, default=32, help="width of the model")
    args = p.parse_args(argv)
    batches, gaps, samples = ((1, 64), (1, 64), 5) if args.quick else ((1, 8, 64), (1, 16, 64, 256), 15)
    samples = args.starts or samples
    os.environ["OMP_NUM_THREADS"] = "1"
    share_a_key()
    described = conditions(model=f"{args.layers} layers of {args.hidden}, float32", starts=f"at least {samples} each")
    print("conditions:", "; ".join(f"{k} {v}" for k, v in described.items()), flush=True)
    config, tensors = checkpoint(SHARPNESS, args.layers, args.hidden)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_hf(folder / "model", config, {**tensors, **worse_drafter(tensors, 1.0)})
        serve = ["--device", "cpu", "--dtype", "float32", "--max-running-requests", "64", "--disable-radix-cache"]
        serve += ["--max-total-tokens", "65536", "--spec", "adaptive", "--candidate-steps", "0,3", "--num-steps", "3"]
        with launch(folder / "model", folder / "engine.log", arguments=serve) as process:
            engine = SGLangEngine.of(process.wait())
            print("batch  rest after  start (ms)                stop (ms)                 resting round (ms)")
            for batch, gap, (name, rest) in itertools.product(batches, gaps, RESTS.items()):
                values = {kind: interval(v) for kind, v in measure(engine, rest, batch, gap, samples).items() if v}
                found[f"{name}, batch {batch}, {gap} rounds"] = values
                shown = "  ".join(
                    "{:7.2f} [{:6.2f}, {:6.2f}]".format(*values[kind]) if kind in values else f"{'-':24}"
                    for kind in KINDS
                )
                print(f"{batch:5}  {name:>4} {gap:5}  {shown}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"conditions": described, "found": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

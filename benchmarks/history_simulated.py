"""Simulate what redraw and old answers as drafts give at answers of up to 16,384 tokens, on eight H100.

    python benchmarks/history_simulated.py [--old] [--seeds N] [--shorter N] [--config examples/simulate/h100.toml]

An 8B model, by the roofline of the data sheet. Nothing here is measured but rates of docs/history.md: the share of
short answers that a change of the policy leaves whole, from which comes a hazard that is taken to be the same at every
token. The trainer has eight GPUs of its own. A step takes

    waiting   rollout + training + push                   (rollout.staleness = 0)
    ahead     the longer of rollout and training + push   (rollout.staleness = 1: weights correct for old tokens)
    redraw    a check of all old tokens + what is generated anew + ahead

`--old` simulates rollouts with old answers as drafts (`spec.history`), at 1 to 128 answers an engine. An old answer of
the same seed is checked up to the end of the prefill chunk in which it breaks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_rlspec.commands import simulate
from megatron_rlspec.extensions.simulator.cluster import Cluster, Policies, Simulation, Workload
from megatron_rlspec.extensions.simulator.sim_engine import SimSample
from megatron_rlspec.extensions.simulator.step import Training

CONFIG = Path(__file__).parents[1] / "examples/simulate/h100.toml"
# Whole answers after a step, of so many tokens: the runs of docs/history.md in float32.
MEASURED = {"writers": (0.91, 22), "quickstart": (0.90, 28), "equations": (0.56, 198), "slips": (0.94, 45)}
SLOWER = (1, 3, 10, 30, 100)  # times the smallest measured hazard, divided
ANSWERS = (1, 8, 32, 128)  # an engine, of 8 for each prompt


# Whole answers an epoch (8 steps) later under the same seed, of so many tokens, and of `equations` two steps later.
EPOCH = {"days": (0.70, 21), "writers": (0.67, 22), "equations": (0.75, 198)}


class Redrawn(Simulation):
    """A rollout of samples that keep what survives of an older policy's answer. `hazard`: of each token."""

    def __init__(self, *rollout: object, hazard: float) -> None:
        super().__init__(*rollout)  # type: ignore[arg-type]
        self.hazard = hazard
        self.behind = np.zeros(self.cluster.engines)  # tokens of old answers behind the cut, of each engine
        self.kept = self.tokens = 0

    def _samples(self) -> list[SimSample]:
        rng = self._rng(5)
        left = []
        for sample in super()._samples():
            cut = int(rng.exponential(1 / self.hazard))
            kept = min(cut, sample.length)
            self.tokens += sample.length
            self.kept += kept
            engine = sample.group % self.cluster.engines  # as samples are dealt
            if kept == sample.length:
                self.behind[engine] += sample.context + sample.length
                continue
            self.behind[engine] += self._checked(sample.length, kept) - kept
            left.append(replace(sample, drawn=kept))
        return left

    def _checked(self, length: int, kept: int) -> int:
        """Return the tokens of an old answer that are checked, of which so many survive."""
        return length

    def seconds(self) -> float:
        """Return the time of the check and of what is generated anew."""
        trace = self.run()
        chunk = self.cluster.chunk
        check = self.cluster.prefill_ms(self.cluster.tp, chunk) * self.behind.max() / chunk
        return (trace.makespan_ms + check) / 1e3


class WithOld(Redrawn):
    """A rollout with old answers as drafts. `hazard` of an old answer's tokens; infinite: none is checked."""

    def _samples(self) -> list[SimSample]:
        return Simulation._samples(self) if math.isinf(self.hazard) else super()._samples()

    def _checked(self, length: int, kept: int) -> int:
        return min(length, (kept // self.cluster.chunk + 1) * self.cluster.chunk)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", type=Path, default=CONFIG, help="cluster, workload and acceptance of `rlspec simulate`")
    p.add_argument("--old", action="store_true", help="old answers as drafts; default: redraw")
    p.add_argument("--shorter", type=int, default=1, help="answers are so many times shorter; default: 1")
    p.add_argument("--seeds", type=int, default=3, help="rollouts of each row; default: 3")
    options = p.parse_args(argv)
    config = simulate.read(options.config)
    policies = Policies()
    cluster, workload = simulate.build(config, {"adaptive": policies})
    lengths = replace(workload.lengths, mu=workload.lengths.mu - math.log(options.shorter))
    workload = replace(workload, lengths=lengths, cap=workload.cap // options.shorter)
    if options.old:
        show_old(cluster, workload, policies, options.seeds)
    else:
        show(cluster, workload, policies, Training(), options.seeds)


def show(cluster: Cluster, workload: Workload, policies: Policies, training: Training, seeds: int) -> None:
    rollouts = [Simulation(cluster, workload, policies, seed).run() for seed in range(seeds)]
    generate = float(np.mean([trace.makespan_ms for trace in rollouts])) / 1e3
    tokens = float(np.mean([trace.tokens for trace in rollouts]))
    train = tokens * (training.score + training.train) / 1e6
    waiting, ahead = generate + train + training.push, max(generate, train) + training.push
    print(f"simulated: {workload.prompts} x {workload.samples} answers of up to {workload.cap}, {tokens:.0f} tokens")
    print(f"rollout {generate:.2f} s, training {train:.2f} s; a step: waiting {waiting:.2f} s, ahead {ahead:.2f} s")
    print(f"{'an answer breaks once in':42} {'kept':>6} {'redraw':>8} {'step':>8} {'over waiting':>13}")
    hazards = {name: -math.log(whole) / length for name, (whole, length) in MEASURED.items()}
    least = min(hazards.values())
    hazards |= {f"{n} times fewer than slips": least / n for n in SLOWER[1:]}
    for name, hazard in hazards.items():
        took, kept = [], []
        for seed in range(seeds):
            redrawn = Redrawn(cluster, workload, policies, seed, hazard=hazard)
            took.append(redrawn.seconds())
            kept.append(redrawn.kept / redrawn.tokens)
        step = float(np.mean(took)) + ahead
        print(
            f"{f'{1 / hazard:.0f} tokens ({name})':42} {np.mean(kept):6.1%} {np.mean(took):7.2f} s {step:7.2f} s "
            f"{waiting / step:12.2f}x"
        )


def show_old(cluster: Cluster, workload: Workload, policies: Policies, seeds: int) -> None:
    hazards = {name: -math.log(whole) / length for name, (whole, length) in EPOCH.items()}
    hazards |= {f"equations / {n}": hazards["equations"] / n for n in (10, 100)}
    ways = {"drafter alone": math.inf}
    ways |= {f"same seed, breaks once in {1 / h:.0f} tokens ({name})": h for name, h in hazards.items()}
    print(f"{'tokens/s over the drafter alone, by answers an engine':60}" + "".join(f"{n:>8}" for n in ANSWERS))
    base: list[float] = []
    for name, hazard in ways.items():
        took: list[float] = []
        for count in ANSWERS:
            prompts = max(count * cluster.engines // workload.samples, 1)
            rollouts = (cluster, replace(workload, prompts=prompts), policies)
            several = range(max(seeds * 32 // count, 1))  # about as many answers in each column
            each = [WithOld(*rollouts, seed, hazard=hazard).seconds() for seed in several]
            took.append(float(np.mean(each)))
        base = base or took
        print(f"{name:60}" + "".join(f"{old / new:8.2f}" for old, new in zip(base, took, strict=True)), flush=True)
    print(f"{'seconds of the drafter alone':60}" + "".join(f"{took:8.1f}" for took in base))


if __name__ == "__main__":
    main()

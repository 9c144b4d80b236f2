"""Simulate what redraw and history drafts give at answers of up to 16,384 tokens, on eight H100 (docs/history.md).

    python benchmarks/history_simulated.py [--seeds N] [--shorter N] [--config examples/simulate/h100.toml]

An 8B model, by the roofline of the data sheet; the trainer has eight GPUs of its own. Nothing here is measured but the
share of answers of so many tokens that a step of the policy leaves whole (docs/history.md). The hazard of a token is
taken to be constant. A step takes

    waiting   rollout + training + push                   (rollout.staleness = 0)
    ahead     the longer of rollout and training + push   (rollout.staleness = 1: weights correct for old tokens)
    redraw    a check of all old tokens + what is generated anew + ahead

History drafts are simulated as drafts of the drafter that are accepted more often.
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
GAINS = (0.14, 0.40)  # tokens a round over the drafter's, of history: `equations`, and `slips` an epoch later


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
            self.behind[engine] += sample.length - kept
            left.append(replace(sample, drawn=kept))
        return left

    def seconds(self) -> float:
        """Return the time of the check and of what is generated anew."""
        trace = self.run()
        chunk = self.cluster.chunk
        check = self.cluster.prefill_ms(self.cluster.tp, chunk) * self.behind.max() / chunk
        return (trace.makespan_ms + check) / 1e3


def better(workload: Workload, gain: float, steps: int = 3) -> Workload:
    """Return a workload whose rounds of `steps` drafts deliver more tokens by a share."""

    def length(rates: np.ndarray) -> float:
        return float(1 + np.cumprod(rates[:, :steps], 1).sum(1).mean())

    rates = workload.acceptance.rates
    wanted, power = length(rates) * (1 + gain), 1.0
    while length(rates**power) < wanted:
        power -= 0.01
    return replace(workload, acceptance=replace(workload.acceptance, rates=rates**power))


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", type=Path, default=CONFIG, help="cluster, workload and acceptance of `rlspec simulate`")
    p.add_argument("--shorter", type=int, default=1, help="answers are so many times shorter; default: 1")
    p.add_argument("--seeds", type=int, default=3, help="rollouts of each row; default: 3")
    options = p.parse_args(argv)
    config = simulate.read(options.config)
    policies = Policies()
    cluster, workload = simulate.build(config, {"adaptive": policies})
    lengths = replace(workload.lengths, mu=workload.lengths.mu - math.log(options.shorter))
    workload = replace(workload, lengths=lengths, cap=workload.cap // options.shorter)
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
    for gain in GAINS:
        more = better(workload, gain)
        took = [Simulation(cluster, more, policies, seed).run().makespan_ms / 1e3 for seed in range(seeds)]
        print(f"history, {gain:+.0%} tokens a round: a rollout takes {np.mean(took) / generate:.2f} of the time")


if __name__ == "__main__":
    main()

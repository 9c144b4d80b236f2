"""Replay the rule with cost tables that are wrong: off, truncated, of another clock or machine. All of it is simulated.

    python benchmarks/poor_tables.py [--machines A100,H20] [--batches 16,256] [--seed 0] [--rollouts 1] [--json FILE]

Each run has rollouts of 2,000 rounds, as in `adaptive_replay.py`, and begins without any timing. A round's duration is
that of the scoring table, off by 5 % (standard deviation of the logarithm), and one in fifty takes five times as long.
Compared are

left       the rule with the table as it is
corrected  the same rule, which corrects the table by its own rounds
no table   the rule that learns costs from its rounds alone
sizes      the rule that corrects a table made from the model's sizes, off by 20 % (not built: docs/roadmap.md)
stock      SGLang's own rule, whose step 0 is counted as plain decoding

Regret is 1 - (an oracle's time for the same tokens) / (the rule's time). Printed are mean and worst over batches and
six acceptances, and the worst difference from SGLang's rule in one run. The last line counts over all tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import adaptive_replay
import numpy as np
from adaptive_replay import DECAY, ROUNDS, WALKS, Drafters, drifting, simulated_pair

from megatron_rlspec.speculation.cost_rows import RoundCost
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig

STEPS = (0, 1, 2, 3, 5, 7)  # SGLang's own rule uses 7
ACCEPTANCES = np.linspace(0, 0.95, 6)
OTHER = {"A100": "H20", "H20": "H200", "H200": "H20", "H100": "A40", "A40": "H100", "L40S": "H20"}
SIZES = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
}


def by_sizes(machine: CostTable) -> CostTable:
    """Return a table of what the model's sizes say, at the points of `machine`."""
    roofline = Roofline.of_model(SIZES)
    rows = []
    for c in machine.rounds:
        ms = float(roofline.grid([c.config], np.array(c.batch), np.array(c.context_tokens))[0])
        rows.append(replace(c, ms=ms, spread_ms=0.2 * ms, samples=1))
    return CostTable(machine.provenance, rows, catch_up_ms=roofline.catch_up_ms)


def changed(table: CostTable, factor: Callable[[RoundCost], float]) -> CostTable:
    """Return the table with ms and spreads times `factor`; rows of factor 0 are left out."""
    rows = [replace(c, ms=c.ms * factor(c), spread_ms=c.spread_ms * factor(c)) for c in table.rounds if factor(c)]
    return CostTable(table.provenance, rows, table.prefill, switch_ms=table.switch_ms, catch_up_ms=table.catch_up_ms)


def tables(machine: str, seed: int) -> tuple[CostTable, dict[str, CostTable]]:
    """Return the table that scores, and those that decide, by name."""
    good, score = simulated_pair(machine, 0.01, seed)
    wide, _ = simulated_pair(machine, 0.1, seed + 50)
    rng = np.random.default_rng(seed)
    configs = {c: float(np.exp(0.3 * rng.standard_normal())) for c in good.configs()}
    cells = {(c, b): float(np.exp(0.3 * rng.standard_normal())) for c in good.configs() for b in good.batches()}
    other, _ = simulated_pair(OTHER[machine], 0.01, seed)

    def among(table: CostTable, batches: Sequence[int]) -> CostTable:
        return changed(table, lambda c: float(c.batch in batches and c.context_tokens == 512 * c.batch))

    return score, {
        "good (1 %)": good,
        "all x 2": changed(good, lambda c: 2.0),
        "30 % a configuration": changed(good, lambda c: configs[c.config]),
        "30 % a configuration and batch": changed(good, lambda c: cells[c.config, c.batch]),
        "drafts x 2": changed(good, lambda c: 1.0 if c.config.off else 2.0),
        "drafts x 1/2": changed(good, lambda c: 1.0 if c.config.off else 0.5),
        "batches 1 and 4, one context": among(good, (1, 4)),
        "batches 4 and 16, spread 10 %": among(wide, (4, 16)),
        "another machine's": other,
    }


class Stock:
    """SGLang's own rule, with the methods of `SpecRule` that a replay calls."""

    def __init__(self, batch: int) -> None:
        from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

        self.rule = AdaptiveSpeculativeParams(initial_steps=3)
        self.batch = batch
        self.catch_up = 0

    def choose(self, batch: int, context_tokens: int, missed: Callable[[int], int]) -> SpecConfig:
        steps = self.rule.get_steps_for_batch(batch)
        self.catch_up = batch if steps else 0
        return SpecConfig(steps) if steps else OFF

    def observe(self, config: SpecConfig, accepted: list[int], others: int) -> None:
        self.rule.on_verify_complete(accepted or [0] * others, self.batch)

    def timed(self, config: SpecConfig, batch: int, context_tokens: int, ms: float) -> None:
        """SGLang's rule looks at no duration."""


class Run:
    """The rounds of one run of several rollouts: what each configuration yields and costs in each of them."""

    def __init__(self, score: CostTable, batch: int, first: float, walk: str, seed: int, rollouts: int) -> None:
        self.seed = [seed, batch, int(1000 * first)]
        self.score = score
        self.batch = batch
        self.configs = score.configs()
        self.rounds = rollouts * ROUNDS
        drift = drifting(first, walk, self.rounds, np.random.default_rng(self.seed))
        self.rates = drift[:, None] * DECAY ** np.arange(7)
        reach = np.cumprod(self.rates, axis=1)
        self.tokens = np.stack([1 + reach[:, : c.num_steps].sum(axis=1) for c in self.configs])
        self.context = batch * (512 + 2 * (np.arange(self.rounds) % ROUNDS))
        self.ms = score.grid(self.configs, np.array(batch), self.context)
        noise = np.random.default_rng([*self.seed, 7])
        self.noise = noise.lognormal(0, 0.05, self.rounds) * np.where(noise.random(self.rounds) < 0.02, 5.0, 1.0)

    def regret(self, rule: SpecRule | Stock) -> float:
        rng = np.random.default_rng(self.seed)
        drafters = Drafters(self.batch)
        emitted = took = 0.0
        before = -1
        for t in range(self.rounds):
            config = rule.choose(self.batch, int(self.context[t]), drafters.missed)
            accepted, read = drafters.round(config, rule.catch_up, self.rates[t], rng)
            rule.observe(config, accepted, self.batch - len(accepted))
            i = self.configs.index(config)
            ms = float(self.ms[i, t]) + self.score.catch_up_ms * read
            rule.timed(config, self.batch, int(self.context[t]), ms * float(self.noise[t]))
            took += ms + self.score.switch_ms * (before not in (-1, i))
            before = i
            emitted += float(
                (1 + rule.catch_up / self.batch * (self.tokens[i, t] - 1)) / (self.tokens[:, t] / self.ms[:, t]).max()
            )
        return 1 - emitted / took


def measure(
    machines: Sequence[str], batches: Sequence[int], seed: int, rollouts: int
) -> dict[str, dict[str, list[float]]]:
    """Return the regrets of all runs by table and contestant."""
    found: dict[str, dict[str, list[float]]] = {}
    for machine in machines:
        score, poor = tables(machine, seed)
        for batch in batches:
            for i, first in enumerate(ACCEPTANCES):
                run = Run(score, batch, float(first), WALKS[i % len(WALKS)], seed, rollouts)
                learnt = SpecRule(run.configs, LearntCost(Roofline.of_model(SIZES)))
                sizes = SpecRule(run.configs, by_sizes(score), correct=True)
                common = {"stock": run.regret(Stock(batch)), "no table": run.regret(learnt), "sizes": run.regret(sizes)}
                for name, table in poor.items():
                    own = {
                        "left": run.regret(SpecRule(run.configs, table)),
                        "corrected": run.regret(SpecRule(run.configs, table, correct=True)),
                    }
                    for who, regret in {**common, **own}.items():
                        found.setdefault(f"{machine}: {name}", {}).setdefault(who, []).append(regret)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", default="A100,H20", help=f"of {', '.join(OTHER)}")
    parser.add_argument("--batches", default="16,256")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=1, help="of 2,000 rounds, one after the other; default: 1")
    parser.add_argument("--json", type=Path, help="write all regrets to this file")
    args = parser.parse_args(argv)
    adaptive_replay.STEPS = STEPS
    found = measure(args.machines.split(","), [int(b) for b in args.batches.split(",")], args.seed, args.rollouts)
    names = ("stock", "no table", "sizes", "left", "corrected")
    print(f"{'mean regret (worst)':40}" + "".join(f"{name:>18}" for name in names) + f"{'most above stock':>18}")
    for table, by in found.items():
        shown = "".join(f"{f'{np.mean(by[who]):.2%} ({max(by[who]):.1%})':>18}" for who in names)
        print(f"{table:40}{shown}{(np.array(by['corrected']) - np.array(by['stock'])).max():18.2%}")
    means = np.array([np.mean(by["corrected"]) for by in found.values()])
    behind = np.concatenate([np.array(by["corrected"]) - np.array(by["stock"]) for by in found.values()])
    print(
        f"corrected: {means.mean():.2%} over {len(means)} tables, {(means > 0.01).sum()} above 1 %; "
        f"{(behind > 0.01).sum()} of {len(behind)} runs more than 1 % behind SGLang's rule"
    )
    if args.json:
        result: dict[str, Any] = {"machines": args.machines, "batches": args.batches, "rollouts": args.rollouts}
        result["regrets"] = found
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

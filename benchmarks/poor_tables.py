"""Replay the speculation rule with cost tables that are wrong: off, truncated, or of another machine. All is simulated.

    python benchmarks/poor_tables.py [--machines A100,H20] [--batches 16,256] [--seed 0]

Machines are rooflines from vendors' figures. Each run has 2,000 rounds of one batch with drifting acceptance, and
begins without any timing. A round's duration is off by 5 % (standard deviation of the logarithm), and one in fifty
takes five times as long. After rounds without drafts the drafter reads the tokens that it missed.

Regret is 1 - (an oracle's time for the same tokens) / (the rule's time). The oracle knows acceptance and costs, and
changes for nothing. Compared are the rule, which corrects the table by its own rounds, the rule that takes the table as
it is ("left"), and SGLang's own rule, whose step 0 is counted as plain decoding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from roofline_tables import HARDWARE, of_hardware, roofline_table

from megatron_rlspec.speculation.cost_table import CostTable, Provenance, RoundCost
from megatron_rlspec.speculation.graphs import chains
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig

STEPS = (0, 1, 2, 3, 5, 7)  # SGLang's own rule uses 7
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
ROUNDS = 2000
ACCEPTANCES = np.linspace(0, 0.95, 6)  # of depth 1, at first
DECAY = 0.95  # rate of a depth over that of the depth above
DRIFT = 0.02  # acceptance moves by up to DRIFT every PER rounds
PER = 100
SWITCH_MS = 0.1
WALKS = ("random", "rising", "falling")
OTHER = {"A100": "H20", "H20": "H200", "H200": "H20", "H100": "A40", "A40": "H100", "L40S": "H20"}
SIZES = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
}


def simulated_pair(name: str, perturbation: float, seed: int) -> tuple[CostTable, CostTable]:
    """Make two profiles of one machine, perturbed independently: one that decides and one that scores."""
    roofline = of_hardware(*HARDWARE[name])
    provenance = Provenance("7B, one MTP layer", name, "bfloat16", "roofline", "-", "-", simulated=True)
    tables = []
    for salt in (2 * seed, 2 * seed + 1):
        table = roofline_table(
            roofline,
            chains(STEPS),
            BATCHES,
            LENGTHS,
            provenance,
            systematic=perturbation,
            noise=perturbation,
            seed=salt,
        )
        tables.append(CostTable(provenance, table.rounds, table.prefill, SWITCH_MS, table.catch_up_ms))
    return tables[0], tables[1]


def changed(table: CostTable, factor: Callable[[RoundCost], float]) -> CostTable:
    """Return the table with ms times `factor`; rows of factor 0 are left out."""
    rows = []
    for row in table.rounds:
        by = factor(row)
        if by:
            rows.append(replace(row, ms=row.ms * by, spread_ms=row.spread_ms * by))
    return CostTable(table.provenance, rows, table.prefill, table.switch_ms, table.catch_up_ms)


def tables(machine: str, seed: int) -> tuple[CostTable, dict[str, CostTable | Roofline]]:
    """Return the table that scores, and the costs that decide, by name."""
    good, score = simulated_pair(machine, 0.01, seed)
    wide, _ = simulated_pair(machine, 0.1, seed + 50)
    other, _ = simulated_pair(OTHER[machine], 0.01, seed)
    rng = np.random.default_rng(seed)
    of_config = {c: float(np.exp(0.3 * rng.standard_normal())) for c in good.configs()}
    of_cell = {}
    for config in good.configs():
        for batch in good.batches():
            of_cell[config, batch] = float(np.exp(0.3 * rng.standard_normal()))

    def among(table: CostTable, batches: Sequence[int]) -> CostTable:
        return changed(table, lambda row: float(row.batch in batches and row.context_tokens == 512 * row.batch))

    return score, {
        "good (1 %)": good,
        "all x 2": changed(good, lambda row: 2.0),
        "30 % a configuration": changed(good, lambda row: of_config[row.config]),
        "30 % a configuration and batch": changed(good, lambda row: of_cell[row.config, row.batch]),
        "drafts x 2": changed(good, lambda row: 1.0 if row.config.off else 2.0),
        "drafts x 1/2": changed(good, lambda row: 1.0 if row.config.off else 0.5),
        "batches 1 and 4, one context": among(good, (1, 4)),
        "batches 4 and 16, spread 10 %": among(wide, (4, 16)),
        "another machine's": other,
        "no table": Roofline.of_model(SIZES),
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

    def observe(self, config: SpecConfig, accepted: list[int]) -> None:
        self.rule.on_verify_complete(accepted or [0] * self.batch, self.batch)

    def timed(self, *args: object) -> None:
        """SGLang's rule looks at no duration."""


class Drafters:
    """Counts the tokens that the drafter has not read, per request."""

    def __init__(self, batch: int) -> None:
        self.behind = np.zeros(batch, int)

    def missed(self, n: int) -> int:
        """Count the missed tokens of the `n` requests that missed the fewest."""
        return int(np.sort(self.behind)[:n].sum())

    def round(self, config: SpecConfig, n: int, rates: np.ndarray, rng: np.random.Generator) -> tuple[list[int], int]:
        """Return the accepted drafts of each drafting request, and the tokens that its drafter read first."""
        if config.off:
            self.behind += 1
            return [], 0
        read = self.missed(n)
        order = np.argsort(self.behind, kind="stable")
        accepted = rng.random((n, config.num_steps)) < rates[: config.num_steps]
        self.behind[order[:n]] = 0
        self.behind[order[n:]] += 1
        return np.cumprod(accepted, axis=1).sum(axis=1).tolist(), read


def drifting(first: float, walk: str, rng: np.random.Generator) -> np.ndarray:
    """Return a_1 of every round, between 0 and 0.95."""
    segments = -(-ROUNDS // PER)
    slopes = rng.uniform(-DRIFT, DRIFT, segments)
    if walk != "random":
        slopes[:] = DRIFT if walk == "rising" else -DRIFT
    value = first
    path = []
    for slope in slopes:
        path.append(np.clip(value + slope * np.arange(PER) / PER, 0.0, 0.95))
        value = float(np.clip(value + slope, 0.0, 0.95))
    return np.concatenate(path)


class Run:
    """The rounds of one run: what each configuration delivers and costs in each of them."""

    def __init__(self, score: CostTable, batch: int, first: float, walk: str, seed: int) -> None:
        self.seed = [seed, batch, int(1000 * first)]
        self.score = score
        self.batch = batch
        self.configs = score.configs()
        drift = drifting(first, walk, np.random.default_rng(self.seed))
        self.rates = drift[:, None] * DECAY ** np.arange(max(STEPS))
        reach = np.cumprod(self.rates, axis=1)
        self.tokens = np.stack([1 + reach[:, : config.num_steps].sum(axis=1) for config in self.configs])
        self.context = batch * (512 + 2 * np.arange(ROUNDS))
        self.ms = score.grid(self.configs, np.array(batch), self.context)
        self.best = (self.tokens / self.ms).max(axis=0)
        noise = np.random.default_rng([*self.seed, 7])
        interrupted = np.where(noise.random(ROUNDS) < 0.02, 5.0, 1.0)
        self.noise = noise.lognormal(0, 0.05, ROUNDS) * interrupted

    def regret(self, rule: SpecRule | Stock) -> float:
        rng = np.random.default_rng(self.seed)
        drafters = Drafters(self.batch)
        oracle = took = 0.0
        before = -1
        for t in range(ROUNDS):
            context = int(self.context[t])
            config = rule.choose(self.batch, context, drafters.missed)
            accepted, read = drafters.round(config, rule.catch_up, self.rates[t], rng)
            rule.observe(config, accepted)
            i = self.configs.index(config)
            caught_up = self.score.catch_up_ms * read
            ms = float(self.ms[i, t])
            rule.timed(config, self.batch, context, (ms + caught_up) * float(self.noise[t]), caught_up)
            took += ms + caught_up + self.score.switch_ms * (before not in (-1, i))
            before = i
            tokens = 1 + rule.catch_up / self.batch * (self.tokens[i, t] - 1)
            oracle += float(tokens / self.best[t])
        return 1 - oracle / took


def measure(machine: str, batches: Sequence[int], seed: int) -> dict[str, dict[str, list[float]]]:
    """Return the regrets of all runs by table and contestant."""
    score, poor = tables(machine, seed)
    regrets: dict[str, dict[str, list[float]]] = {}
    for batch in batches:
        for i, first in enumerate(ACCEPTANCES):
            run = Run(score, batch, float(first), WALKS[i % len(WALKS)], seed)
            stock = run.regret(Stock(batch))
            for name, cost in poor.items():
                of_table = regrets.setdefault(name, {"rule": [], "left": [], "SGLang's": []})
                of_table["rule"].append(run.regret(SpecRule(run.configs, cost)))
                of_table["left"].append(run.regret(SpecRule(run.configs, cost, learn=False)))
                of_table["SGLang's"].append(stock)
    return regrets


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", default="A100,H20", help=f"of {', '.join(OTHER)}")
    parser.add_argument("--batches", default="16,256")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    batches = [int(part) for part in args.batches.split(",")]
    print(f"{'mean regret (worst run)':40}{'rule':>18}{'left':>18}{'SGLang':>18}")
    means = []
    for machine in args.machines.split(","):
        for name, by in measure(machine, batches, args.seed).items():
            shown = "".join(f"{f'{np.mean(found):.2%} ({max(found):.1%})':>18}" for found in by.values())
            print(f"{f'{machine}: {name}':40}{shown}", flush=True)
            means.append(np.mean(by["rule"]))
    print(f"the rule: {np.mean(means):.2%} over {len(means)} tables, worst table {max(means):.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

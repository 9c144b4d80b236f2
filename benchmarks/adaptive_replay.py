"""Replay decode rounds over cost tables. The rule decides by one profile, another scores it, an oracle is the limit.

    python benchmarks/adaptive_replay.py [--quick] [--json FILE] [--perturbation 0.01] [--tables DECIDE SCORE]

Without --tables the machines are rooflines from vendors' figures (simulated). Each machine has two profiles, which are
perturbed independently. With --tables each pair is two measured profiles of one engine. The oracle uses the true
acceptance of every round and the scoring table, and pays nothing for switches. Regret is 1 - (the oracle's time for the
same tokens) / (the rule's time).

After rounds without drafting the drafter reads the tokens that it missed, as in SGLang. It reads those of the requests
that the rule names. Only their drafts are accepted and observed, until the rule names all requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from roofline_tables import roofline_table

from megatron_rlspec.speculation.cost_table import CostTable, Provenance
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.speculation.solver import chains
from megatron_rlspec.types import OFF, SpecConfig

STEPS = (0, 1, 2, 3, 5)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
ROUNDS = 2000
DRIFT = 0.02  # acceptance moves by up to DRIFT every PER rounds
PER = 100
SWITCH_MS = 0.1
DECAY = 0.95  # a_d = a_1 * DECAY ** (d - 1)
BAND = 0.02  # around break-even, where the sign of the decision is not judged
WALKS = ("random", "rising", "falling")


@dataclass
class Run:
    """Hold the regret of the rule and of fixed choices on the same rounds, for one machine, batch and acceptance."""

    machine: str
    batch: int
    acceptance: float
    walk: str
    regret: float
    known_acceptance_regret: float
    fixed_regret: dict[str, float]
    sign_right: int
    sign_judged: int
    switches: int
    probe_share: float


def simulated_pair(name: str, perturbation: float, seed: int) -> tuple[CostTable, CostTable]:
    """Make two independently perturbed profiles of one machine: the one that decides and the one that scores."""
    roofline = Roofline.of_hardware(*HARDWARE[name])
    provenance = Provenance("7B, one MTP layer", name, "bfloat16", "roofline", "-", "-", simulated=True)

    def profile(seed: int) -> CostTable:
        table = roofline_table(
            roofline,
            chains(STEPS),
            BATCHES,
            LENGTHS,
            provenance,
            systematic=perturbation,
            noise=perturbation,
            seed=seed,
        )
        return CostTable(
            table.provenance, table.rounds, table.prefill, switch_ms=SWITCH_MS, catch_up_ms=table.catch_up_ms
        )

    return profile(2 * seed), profile(2 * seed + 1)


class Drafters:
    """Count the tokens that the drafter has not read, per request."""

    def __init__(self, batch: int) -> None:
        self.behind = np.zeros(batch, int)

    def missed(self, n: int) -> int:
        """Count the missed tokens of the `n` requests that missed the fewest."""
        if n < len(self.behind):
            return int(np.partition(self.behind, n)[:n].sum())
        return int(self.behind.sum())

    def round(self, config: SpecConfig, n: int, rates: np.ndarray, rng: np.random.Generator) -> tuple[list[int], int]:
        """Return the accepted drafts of each drafting request, and the tokens that its drafter read first."""
        if config.off:
            self.behind += 1
            return [], 0
        read = self.missed(n)
        order = np.argsort(self.behind, kind="stable")
        accepted = np.cumprod(rng.random((n, config.num_steps)) < rates[: config.num_steps], axis=1).sum(axis=1)
        self.behind[order[:n]] = 0
        self.behind[order[n:]] += 1
        return accepted.tolist(), read


def drifting(first: float, walk: str, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a_1 of every round, between 0 and 0.95."""
    segments = -(-rounds // PER)
    slopes = {
        "random": rng.uniform(-DRIFT, DRIFT, segments),
        "rising": np.full(segments, DRIFT),
        "falling": np.full(segments, -DRIFT),
    }[walk]
    value = first
    path = []
    for slope in slopes:
        path.append(np.clip(value + slope * np.arange(PER) / PER, 0.0, 0.95))
        value = float(np.clip(value + slope, 0.0, 0.95))
    return np.concatenate(path)[:rounds]


def replay(
    machine: str, decide: CostTable, score: CostTable, batch: int, first: float, walk: str, rounds: int, seed: int
) -> Run:
    """Replay one run, and compute the regret of the rule, of the known acceptance and of fixed choices."""
    rng = np.random.default_rng([seed, batch, int(1000 * first)])
    candidates = decide.configs()
    deepest = max(c.num_steps for c in candidates)
    rates = drifting(first, walk, rounds, rng)[:, None] * DECAY ** np.arange(deepest)
    reach = np.cumprod(rates, axis=1)
    tokens = np.stack([1 + reach[:, : c.num_steps].sum(axis=1) for c in candidates])
    context = batch * (512 + 2 * np.arange(rounds))
    ms = score.grid(candidates, np.array(batch), context)
    best = (tokens / ms).max(axis=0)

    rule = SpecRule(candidates, decide)
    index = {config: i for i, config in enumerate(candidates)}
    drafters = Drafters(batch)
    chosen = np.empty(rounds, int)
    part = np.ones(rounds)  # share of the requests that draft
    read = 0  # missed tokens that the drafter read
    for t in range(rounds):
        config = rule.choose(batch, int(context[t]), drafters.missed)
        accepted, missed = drafters.round(config, rule.catch_up, rates[t], rng)
        rule.observe(config, accepted, batch - len(accepted))
        chosen[t] = index[config]
        part[t] = rule.catch_up / batch
        read += missed

    at = np.arange(rounds)
    off = index[OFF]

    def regret(choice: np.ndarray, part: np.ndarray, read: int) -> float:
        """Charge switches, and the missed tokens that the drafter reads when drafting starts again."""
        took = ms[choice, at].sum() + score.switch_ms * (np.diff(choice) != 0).sum() + score.catch_up_ms * read
        emitted = 1 + part * (tokens[choice, at] - 1)
        return float(1 - (emitted / best).sum() / took)

    def of_all(choice: np.ndarray) -> float:
        """Compute the regret if the drafter reads the missed tokens of all requests at every start."""
        drafting = np.flatnonzero(choice != off)
        last = drafting[-1] if len(drafting) else 0
        return regret(choice, np.ones(rounds), batch * int((choice[:last] == off).sum()))

    known = (tokens / decide.grid(candidates, np.array(batch), context)).argmax(axis=0)
    gain = np.delete(tokens / ms, off, axis=0).max(axis=0) / (tokens / ms)[off] - 1
    judged = np.abs(gain) > BAND
    right = (chosen != off) == (gain > 0)
    report = rule.report()
    return Run(
        machine,
        batch,
        first,
        walk,
        regret(chosen, part, read),
        of_all(known),
        {str(c): of_all(np.full(rounds, i)) for i, c in enumerate(candidates)},
        int((right & judged).sum()),
        int(judged.sum()),
        report["switches"],
        report["probe_share"],
    )


def decision_time(decide: CostTable, batch: int) -> tuple[float, float]:
    """Measure median microseconds of `choose` and of `observe` at this batch."""
    rule = SpecRule(decide.configs(), decide)
    rng = np.random.default_rng(0)
    choosing = []
    observing = []
    for t in range(3000):
        start = time.perf_counter()
        rule.choose(batch, batch * (500 + t))
        middle = time.perf_counter()
        accepted = np.cumprod(rng.random((batch, 3)) < 0.7, axis=1).sum(axis=1).tolist()
        again = time.perf_counter()
        rule.observe(SpecConfig(3), accepted)
        choosing.append(middle - start)
        observing.append(time.perf_counter() - again)
    return 1e6 * float(np.median(choosing)), 1e6 * float(np.median(observing))


class Engine:
    """Run rounds with a given acceptance. The scoring table gives their cost."""

    def __init__(self, decide: CostTable, score: CostTable) -> None:
        self.rule = SpecRule(decide.configs(), decide, start=SpecConfig(3))
        self.score = score
        self.rng = np.random.default_rng(0)
        self.drafters = Drafters(0)

    def push(self, forecast: list[float]) -> None:
        """Go on with a new rule, as after a push of new weights."""
        after = SpecRule(self.rule.candidates, self.rule.cost, acceptance=self.rule.acceptance, forecast=forecast)
        after.inherit(self.rule)
        self.rule = after

    def run(self, rounds: int, batch: int, rate: float, length: int = 1024) -> tuple[list[SpecConfig], float]:
        """Run `rounds` rounds of `batch` requests. Return the chosen configurations and the milliseconds."""
        if len(self.drafters.behind) != batch:  # new requests; the drafter has read their prompts
            self.drafters = Drafters(batch)
        configs = []
        ms = 0.0
        for _ in range(rounds):
            config = self.rule.choose(batch, batch * length, self.drafters.missed)
            rates = np.full(config.num_steps, rate)
            accepted, missed = self.drafters.round(config, self.rule.catch_up, rates, self.rng)
            self.rule.observe(config, accepted, batch - len(accepted))
            configs.append(config)
            ms += self.score.ms(config, batch, batch * length) + self.score.catch_up_ms * missed
        return configs, ms


def adversarial_cases(perturbation: float, seed: int) -> dict[str, dict[str, float | bool]]:
    """Run the adversarial cases. Return their figures; `ok` is true where they are within the bounds."""
    decide, score = simulated_pair("H100", perturbation, seed)
    found: dict[str, dict[str, float | bool]] = {}
    for batch in (1, 8, 64):
        engine = Engine(decide, score)
        configs, _ = engine.run(100, batch, 0.0)
        drafting = [i for i, c in enumerate(configs) if c.num_steps > 1]
        off_after = drafting[-1] + 1 if drafting else 0
        engine.rule.report()
        late, ms = engine.run(3000, batch, 0.0)
        cost = ms / (3000 * score.ms(OFF, batch, batch * 1024)) - 1
        engine.push([0.85] * 5)
        configs, _ = engine.run(1000, batch, 0.85)
        on_after = _first_stretch(configs, steps=3, length=40)
        found[f"zero acceptance, then weights that learnt, batch {batch}"] = {
            "off_after_rounds": off_after,
            "probe_cost": cost,
            "on_again_after_rounds": on_after,
            "ok": off_after <= 60 and cost <= 0.01 and on_after <= 900,
        }
    decide, score = simulated_pair("H20", perturbation, seed)
    for batch in (16, 64, 256):
        engine = Engine(decide, score)
        engine.run(100, batch, 0.0)
        _, ms = engine.run(2000, batch, 0.0)
        cost = ms / (2000 * score.ms(OFF, batch, batch * 1024)) - 1
        found[f"H20, zero acceptance, batch {batch}: probes and catching up"] = {"cost": cost, "ok": cost <= 0.01}
    engine = Engine(decide, score)
    for _ in range(100):
        engine.run(10, 4, 0.6)
        engine.run(10, 256, 0.6, length=128)
    switches = engine.rule.report()["switches"]
    found["load alternating between batch 4 and 256 every 10 rounds"] = {
        "rounds": 2000,
        "switches": switches,
        "ok": switches <= 202,
    }
    engine = Engine(decide, score)
    for _ in range(1000):
        engine.run(1, 4, 0.6)
        engine.run(1, 256, 0.6, length=128)
    switches = engine.rule.report()["switches"]
    found["the same every round"] = {"rounds": 2000, "switches": switches, "ok": switches <= 10}
    configs, _ = Engine(decide, score).run(1000, 192, 0.8, length=256)
    share = sum(c == OFF for c in configs) / len(configs)
    found["H20 at batch 192, acceptance 0.8"] = {"share_of_rounds_off": share, "ok": share >= 0.98}
    return found


def _first_stretch(configs: Sequence[SpecConfig], steps: int, length: int) -> int:
    """Find the first of 950 rounds at which `length` rounds of at least `steps` steps begin; 1000 if there is none."""
    for i in range(950):
        if all(c.num_steps >= steps for c in configs[i : i + length]):
            return i
    return 1000


def summary(runs: Sequence[Run]) -> dict[str, float | str]:
    """Compute means and worst values over runs."""
    regret = np.array([r.regret for r in runs])
    fixed = {name: float(np.mean([r.fixed_regret[name] for r in runs])) for name in runs[0].fixed_regret}
    best = min(fixed, key=fixed.__getitem__)
    return {
        "mean": float(regret.mean()),
        "worst": float(regret.max()),
        "known_acceptance_mean": float(np.mean([r.known_acceptance_regret for r in runs])),
        "best_fixed": best,
        "best_fixed_mean": fixed[best],
        "sign": sum(r.sign_right for r in runs) / max(sum(r.sign_judged for r in runs), 1),
        "most_switches": max(r.switches for r in runs),
        "most_probe_share": max(r.probe_share for r in runs),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer machines, batches and acceptances")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    parser.add_argument(
        "--tables",
        nargs=2,
        action="append",
        metavar=("DECIDE", "SCORE"),
        default=[],
        help="two measured profiles of one engine; may be given several times",
    )
    parser.add_argument(
        "--perturbation", type=float, default=0.01, help="standard deviation by which each simulated profile is off"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    names = ("A100", "H20", "H200") if args.quick else tuple(HARDWARE)
    pairs = {f"{name} (simulated)": simulated_pair(name, args.perturbation, args.seed) for name in names}
    for decide, score in args.tables:
        table = CostTable.load(decide)
        pairs[f"{table.provenance.hardware}: {Path(decide).name}"] = (table, CostTable.load(score))
    batches = (1, 4, 16, 64, 256) if args.quick else BATCHES
    acceptances = np.linspace(0, 0.95, 6 if args.quick else 20)
    print(f"{ROUNDS} rounds a run, acceptance 0..0.95 drifting by up to {DRIFT} per {PER} rounds, batch 1..256,")
    print(
        f"candidates {' '.join(map(str, chains(STEPS)))}; each simulated profile is off by {args.perturbation:.1%} per"
    )
    print(f"config, per batch size and per cell (standard deviations); a switch costs {SWITCH_MS} ms\n")
    head = ("machine", "regret: mean", "worst", "known accept", "best fixed", "sign right", "switches", "probes")
    print(f"{head[0]:24}" + "".join(f"{h:>13}" for h in head[1:]))
    runs: list[Run] = []
    for machine, (decide, score) in pairs.items():
        most = max(decide.batches())
        own = []
        for batch in (b for b in batches if b <= most):
            for i, acceptance in enumerate(acceptances):
                walk = WALKS[i % len(WALKS)]
                own.append(replay(machine, decide, score, batch, float(acceptance), walk, ROUNDS, args.seed))
        _print(machine, summary(own))
        runs += own
    total = summary(runs)
    _print("all", total)

    machine, (decide, _) = next(iter(pairs.items()))
    times = {batch: decision_time(decide, batch) for batch in (1, 32, 256)}
    print("\nmedian us per round, choose + observe: ", end="")
    print(", ".join(f"batch {b}: {c:.1f} + {o:.1f}" for b, (c, o) in times.items()))
    cases = adversarial_cases(args.perturbation, args.seed)
    print()
    for name, values in cases.items():
        shown = ", ".join(f"{k} {v:.4g}" for k, v in values.items() if k != "ok")
        print(f"{'ok' if values['ok'] else 'MISSED':7}{name}: {shown}")

    aims = {
        f"mean regret <= 0.3 % ({total['mean']:.2%})": total["mean"] <= 0.003,
        f"worst regret <= 2 % ({total['worst']:.2%})": total["worst"] <= 0.02,
        f"sign right >= 95 % outside {BAND:.0%} ({total['sign']:.1%})": total["sign"] >= 0.95,
        "decision <= 20 us": max(c for c, _ in times.values()) <= 20,
        "all adversarial cases": all(v["ok"] for v in cases.values()),
    }
    print("\n" + "\n".join(f"{'ok' if met else 'MISSED':7}{aim}" for aim, met in aims.items()))
    if args.json:
        result = {
            "aims": aims,
            "all": total,
            "decision_us": {b: {"choose": c, "observe": o} for b, (c, o) in times.items()},
            "adversarial_cases": cases,
            "runs": [vars(r) for r in runs],
        }
        args.json.write_text(json.dumps(result, indent=1, default=float) + "\n")
    return 0 if all(aims.values()) else 1


def _print(machine: str, s: dict[str, float | str]) -> None:
    print(
        f"{machine:24}{s['mean']:13.2%}{s['worst']:13.2%}{s['known_acceptance_mean']:13.2%}"
        f"{s['best_fixed_mean']:8.1%} {s['best_fixed']!s:>4}{s['sign']:13.1%}{s['most_switches']:13}"
        f"{s['most_probe_share']:13.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())

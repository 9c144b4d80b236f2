"""Hold the simulator against rollouts of real engines on a CPU.

    python benchmarks/simulate.py [--quick] [--engine sglang] [--json FILE] [--record FILE]

The simulator is calibrated on one profile (`commands/sweep.py`, as in `rlspec profile`) and on one rollout: the
accepted drafts of its samples. Then it predicts other rollouts: batches, lengths, prompts, drafters, schedules, queues,
one and two engines, with and without moves.

rollouts  makespan and rounds of each configuration, against real rollouts with seeds of their own
moves     whether a given move pays, against the same rollout with and without it (the same texts, position-keyed)
controls  the same with independent draws of the mean acceptance, with the mean length, and with free moves

Engines are embedded ones in one process, or one of SGLang (`timed_rollouts.py`). Lengths are given. Real engines run in
passes, each with a part of the profile, the rollout for calibration, and all others: so a slow minute of the machine
slows all of them alike. Figures are medians over passes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from fit_acceptance import fit, independent
from synthetic import conditions
from timed_rollouts import (
    BY_BATCH,
    CAP,
    CONFIGS,
    EVERY,
    K1,
    K3,
    MOST,
    PROMPTS,
    EmbeddedLab,
    Outcome,
    Scenario,
    SGLangLab,
    Work,
    drawn_lengths,
    middle,
    past,
    planner_of,
    sglang_lab,
)

from megatron_rlspec.extensions.simulator.run_engines import MoveCost
from megatron_rlspec.extensions.simulator.run_engines import run_engines as simulated
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel
from megatron_rlspec.extensions.simulator.sim_engine import Durations, SimEngine, SimSample
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, Move, RoundStats, SpecConfig, SpecSchedule

AIMS = {"makespan, median": 0.05, "makespan, worst": 0.10, "rounds, worst": 0.05}


# ---- predictions -----------------------------------------------------------------------------------------------------


@dataclass
class Calibration:
    """All that the simulator knows.

    embedded    whether it is about embedded engines
    shares      of easy tokens, of the samples of each prompt; a new prompt is like a known one
    move        what both engines spend on a move by KV
    """

    embedded: bool
    table: CostTable
    acceptance: AcceptanceModel
    shares: dict[int, list[float]]
    move: MoveCost

    @classmethod
    def of(
        cls,
        table: CostTable | None,
        scenario: Scenario,
        seen: Sequence[Outcome],
        transfers: Sequence[tuple[int, float]],
    ) -> Calibration:
        """Fit all to one rollout, which was run several times with the same texts, and to moves (tokens, ms)."""
        assert table is not None
        steady = [RoundStats(config, n, context, 1, ms, ()) for o in seen for config, n, context, ms in o.steady]
        table = table.calibrated(steady)
        acceptance = fit(seen[0].accepted, K3.num_steps)
        own: dict[int, list[float]] = {}
        for work, share in zip(scenario.work, acceptance.shares, strict=True):
            own.setdefault(work.prompt, []).append(float(share))
        move = MoveCost()
        if transfers:
            tokens, ms = np.array(transfers).T
            slope, fixed = np.polyfit(tokens, ms / 2, 1).clip(min=0)  # half on each engine
            move = MoveCost(busy_ms=float(fixed), busy_token_ms=float(slope))
        return cls(table.provenance.engine == "embedded", table, acceptance, own, move)

    def prefill_ms(self, tokens: int) -> float:
        """Return the ms of a pass over prompts. Embedded engines draw the first token in a round, which is measured."""
        drawing = self.table.ms(OFF, 1, tokens) if self.embedded else 0.0
        return self.table.prefill_ms(tokens) - drawing


def mean_acceptance(known: Calibration, accepted: Sequence[Sequence[int]]) -> Calibration:
    """Return the control: every draft of every sample is accepted independently, with the mean rates."""
    drafts = np.concatenate([np.asarray(rounds, int) for rounds in accepted])
    rates = [float((drafts > d).sum() / (drafts >= d).sum()) for d in range(K3.num_steps)]
    return replace(known, acceptance=independent(rates), shares={0: [1.0]})


def predict(known: Calibration, scenario: Scenario, seeds: int) -> list[Outcome]:
    return [_predict(known, scenario, seed) for seed in range(seeds)]


def _predict(known: Calibration, scenario: Scenario, seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    like = {
        w.prompt: w.prompt if w.prompt in known.shares else int(rng.choice(list(known.shares))) for w in scenario.work
    }
    shares = [float(rng.choice(known.shares[like[w.prompt]])) for w in scenario.work]
    samples = [
        SimSample(f"s{i:04d}", w.tokens, w.length, w.prompt, share, int(rng.random() >= share))
        for i, (w, share) in enumerate(zip(scenario.work, shares, strict=True))
    ]
    durations = Durations(known.table, CONFIGS)
    engines = []
    for name in "abcd"[: scenario.engines]:
        spec = scenario.spec
        policy: SpecRule | SpecSchedule
        policy = SpecSchedule.fixed(spec) if isinstance(spec, SpecConfig) else spec or SpecRule(CONFIGS, known.table)
        engines.append(
            SimEngine(
                name,
                durations,
                policy,
                known.acceptance,
                rng,
                prefill=known.prefill_ms,
                chunk=2048,
                max_running=scenario.most,
                embedded=known.embedded,
            )
        )
    for sample, w in zip(samples, scenario.work, strict=True):
        if w.engine >= 0:
            engines[w.engine].give([sample])
    trace = simulated(
        [sample for sample, w in zip(samples, scenario.work, strict=True) if w.engine < 0],
        engines,
        CAP,
        in_flight=scenario.in_flight,
        rebalancer=planner_of(scenario, known.table),
        every=EVERY,
        cost=known.move,
        lengths=past(scenario),
    )
    rounds: Counter[SpecConfig] = Counter()
    for engine in engines:
        rounds.update(engine.rounds)
    return Outcome(trace.makespan_ms, rounds, moved=sum(len(move.ids) for _, move in trace.moves))


# ---- scenarios -------------------------------------------------------------------------------------------------------

RECORDED = ("batch 8", "batch 24, one draft", "longer", "drafts by batch", "queue of 40 before 8", "two engines")


def work(
    count: int, seed: int, *, tokens: int = 32, first: int = 0, group: int = 1, **lengths: Any
) -> tuple[Work, ...]:
    """Return samples of the prompts `first`, `first` + 1, ... , `group` of each, in turn."""
    drawn = drawn_lengths(count, seed, **lengths)
    return tuple(Work(first + i // group % PROMPTS, tokens, length) for i, length in enumerate(drawn))


CALIBRATION = Scenario("calibration", work(64, 7, group=4, median=150.0, cap=240))
OTHER_DRAFTER = Scenario("calibration, worse drafter", CALIBRATION.work[::2], noise=0.7)
TRANSFERS = Scenario("transfers", tuple(Work(i % PROMPTS, 200, 120, 0) for i in range(12)), engines=2)


def badly(samples: tuple[Work, ...]) -> tuple[Work, ...]:
    """Deal the long half to the first of two engines."""
    ordered = sorted(samples, key=lambda w: -w.length)
    half = len(ordered) // 2
    return tuple(replace(w, engine=int(i >= half)) for i, w in enumerate(ordered))


SCENARIOS = [
    Scenario("batch 8", work(8, 11)),
    Scenario("batch 24, one draft", work(24, 12), spec=K1),
    Scenario("longer", work(12, 14, median=180.0, cap=360)),
    Scenario("long prompts", work(24, 15, tokens=220, median=80.0, cap=140)),
    Scenario("drafts by batch", work(32, 16), spec=BY_BATCH),
    Scenario("queue of 40 before 8", work(40, 18, median=60.0, cap=120), most=8),
    Scenario("long ones of four prompts", work(16, 19, group=4, median=180.0, cap=240)),
    Scenario("new prompts", work(32, 20, first=100)),
    Scenario("two engines", work(32, 21), engines=2),
    Scenario("two engines, moves", badly(work(32, 23)), engines=2, modes=("kv",)),
    Scenario("two engines, moves anew", badly(work(32, 24, tokens=160)), engines=2, modes=("recompute",)),
    Scenario("worse drafter", work(24, 25), noise=0.7),
]


def error(real: float, guess: float) -> float:
    return guess / real - 1


def compare(table: CostTable, reals: Sequence[Outcome], guesses: Sequence[Outcome]) -> dict[str, Any]:
    """Return relative errors: of the makespan, and of the rounds of each configuration with a twentieth of them."""
    real, guess = (middle(o.ms for o in outcomes) for outcomes in (reals, guesses))
    found: dict[str, Any] = {"real_ms": real, "ms": guess, "makespan": error(real, guess), "rounds": {}}
    total = sum(sum(o.rounds.values()) for o in reals)
    for config in CONFIGS:
        counts = [float(np.mean([o.rounds[config] for o in outcomes])) for outcomes in (reals, guesses)]
        if counts[0] * len(reals) >= total / 20:
            found["rounds"][str(config)] = [*counts, error(*counts)]
    low, high = np.quantile([o.ms for o in guesses], (0.05, 0.95))
    found["inside"] = [bool(low <= o.ms <= high) for o in reals]
    pairs = [(ms, table.ms(config, batch, context)) for o in reals for config, batch, context, ms in o.steady]
    found["rounds_ms"] = error(*np.sum(pairs, 0).tolist())  # of the table alone, at the real batches and contexts
    found["moved"] = [float(np.mean([o.moved for o in outcomes])) for outcomes in (reals, guesses)]
    return found


# ---- whether a move pays ---------------------------------------------------------------------------------------------


def move_cases(count: int) -> list[tuple[Scenario, Scenario]]:
    """Return pairs of rollouts of two engines: without a move, and with one."""
    rng = np.random.default_rng(5)
    found = []
    for case in range(count):
        full, other = int(rng.integers(6, 15)), int(rng.integers(1, 11))
        tokens = int(rng.choice([32, 560]))
        drawn = rng.integers(40, 150, full + other).tolist()
        samples = tuple(
            Work(int(rng.integers(PROMPTS)), tokens, length, int(i >= full)) for i, length in enumerate(drawn)
        )
        ids = tuple(f"s{i:04d}" for i in rng.permutation(full)[: int(rng.integers(1, full))].tolist())
        move = Move("a", "b", ids, "kv" if rng.random() < 0.4 else "recompute")
        stays = Scenario(f"move {case}", samples, engines=2)
        found.append((stays, replace(stays, forced=(int(rng.integers(1, 4)), move))))
    return found


def free(known: Calibration, scenario: Scenario) -> tuple[Calibration, Scenario]:
    """Return the control: samples move at once, and arrive with their caches."""
    if scenario.forced is None:
        return replace(known, move=MoveCost()), scenario
    call, move = scenario.forced
    return replace(known, move=MoveCost()), replace(scenario, forced=(call, replace(move, how="kv")))


def moves(
    known: Calibration, cases: Sequence[tuple[Scenario, Scenario]], reals: Sequence[Sequence[float]], seeds: int
) -> list[dict[str, Any]]:
    """Compare whether moves pay. `reals`: of each case, the makespans with the move over those without."""
    rows = []
    for (stays, goes), runs in zip(cases, reals, strict=True):
        guesses = {}
        for name, (its, scenario) in {"simulated": (known, goes), "free moves": free(known, goes)}.items():
            without, with_move = (predict(its, one, seeds) for one in (stays, scenario))
            guesses[name] = sum(o.ms for o in with_move) / sum(o.ms for o in without)
        assert goes.forced is not None
        rows.append({"how": goes.forced[1].how, "real": middle(runs), "runs": list(runs)} | guesses)
    return rows


def right(rows: Sequence[dict[str, Any]], name: str, band: float) -> tuple[int, int]:
    """Return (right answers, cases) outside a band around no gain."""
    clear = [row for row in rows if abs(row["real"] - 1) > band]
    return sum((row[name] < 1) == (row["real"] < 1) for row in clear), len(clear)


# ---- the whole -------------------------------------------------------------------------------------------------------


def mean_length(scenario: Scenario) -> Scenario:
    """Return the control: all samples have the mean length."""
    mean = round(float(np.mean([w.length for w in scenario.work])))
    return replace(scenario, work=tuple(replace(w, length=mean) for w in scenario.work))


@dataclass
class Measurements:
    """All that real engines did, in passes: a slow minute of the machine slows the profile and all rollouts alike."""

    scenarios: list[Scenario]
    cases: list[tuple[Scenario, Scenario]]
    calibration: list[Outcome] = field(default_factory=list)
    transfers: list[tuple[int, float]] = field(default_factory=list)  # by KV: (tokens, ms of both engines)
    few: list[Outcome] = field(default_factory=list)  # of the drafter with noise
    rollouts: dict[str, list[Outcome]] = field(default_factory=dict)
    moves: list[list[float]] = field(default_factory=list)  # of each case: makespan with the move over that without

    def add(self, lab: EmbeddedLab | SGLangLab) -> None:
        """Run one pass. Its rollouts draw texts of their own; those for calibration are the same in every pass."""
        seed = len(self.calibration) + 1
        lab.profile()
        self.calibration.append(lab.rollout(CALIBRATION, 0))
        if isinstance(lab, EmbeddedLab):
            self.few.append(lab.rollout(OTHER_DRAFTER, 0))
            for count in (2, 8):
                move = Move("a", "b", tuple(f"s{i:04d}" for i in range(count)), "kv")
                self.transfers += lab.rollout(replace(TRANSFERS, forced=(2, move)), 1).transfers
        for scenario in self.scenarios:
            self.rollouts.setdefault(scenario.name, []).append(lab.rollout(scenario, seed))
        self.moves = self.moves or [[] for _ in self.cases]
        for pair, found in zip(self.cases, self.moves, strict=True):
            stays, goes = (lab.rollout(scenario, seed).ms for scenario in pair)
            found.append(goes / stays)


def show(name: str, row: dict[str, Any]) -> None:
    rounds = ", ".join(f"{config} {real:.0f}/{guess:.0f}" for config, (real, guess, _) in row["rounds"].items())
    controls = " ".join(f"{control} {100 * value:+.0f} %" for control, value in row["controls"].items())
    print(
        f"{name:26} {row['real_ms']:6.0f} ms, simulated {row['ms']:6.0f} ({100 * row['makespan']:+5.1f} %); "
        f"costs {100 * row['rounds_ms']:+.1f} %, rounds {rounds}; controls {controls}",
        flush=True,
    )


def summary(rows: dict[str, dict[str, Any]], moved: Sequence[dict[str, Any]]) -> dict[str, float]:
    spans = [abs(row["makespan"]) for row in rows.values()]
    rounds = [abs(e) for row in rows.values() for _, _, e in row["rounds"].values()]
    found = {"makespan, median": float(np.median(spans)), "makespan, worst": max(spans)}
    found |= {"rounds, median": float(np.median(rounds)), "rounds, worst": max(rounds)}
    for control in ("mean acceptance", "mean length", "free moves"):
        errors = [abs(row["controls"][control]) for row in rows.values() if control in row["controls"]]
        if errors:
            found[f"{control}: makespan, median"] = float(np.median(errors))
            found[f"{control}: makespan, worst"] = max(errors)
    inside = [hit for row in rows.values() for hit in row["inside"]]
    found["real rollouts inside the simulated 90 %"] = float(np.mean(inside))
    for band in (0.02, 0.05) if moved else ():
        for name in ("simulated", "free moves"):
            good, clear = right(moved, name, band)
            found[f"moves, outside {100 * band:.0f} %, {name}"] = good / max(clear, 1)
            found[f"moves, outside {100 * band:.0f} %, cases"] = clear
    return found


def recorded(scenario: Scenario, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what `tests/extensions/simulator` needs of a rollout."""
    assert isinstance(scenario.spec, SpecConfig | SpecSchedule)
    schedule = scenario.spec if isinstance(scenario.spec, SpecSchedule) else SpecSchedule.fixed(scenario.spec)
    rounds = {str(c): float(np.mean([o.rounds[c] for o in outcomes])) for c in CONFIGS}
    return {
        "name": scenario.name,
        "engines": scenario.engines,
        "max_running": scenario.most,
        "schedule": schedule.to_json(),
        "samples": [[w.prompt, w.tokens, w.length] for w in scenario.work],
        "rounds": rounds,
        "makespan_ms": float(np.mean([o.ms for o in outcomes])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rollouts and cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write calibration and rollouts for a test")
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded", help="default %(default)s")
    options = parser.parse_args()
    passes, count, seeds = (4, 10, 16) if options.quick else (8, 24, 32)
    simple = [s for s in SCENARIOS if s.spec and s.engines == 1 and not s.noise and s.most == MOST]
    scenarios, cases = (simple, []) if options.engine == "sglang" else (SCENARIOS, move_cases(count))
    done = Measurements(scenarios, cases)
    report: dict[str, Any] = {"conditions": conditions(quick=options.quick, engine=options.engine)}
    print(json.dumps(report["conditions"]), flush=True)
    with sglang_lab() if options.engine == "sglang" else nullcontext(EmbeddedLab()) as lab:
        for turn in range(passes):
            print(f"pass {turn + 1} of {passes}", flush=True)
            done.add(lab)
        table = lab.table
    known = Calibration.of(table, CALIBRATION, done.calibration, done.transfers)
    worse = Calibration.of(table, OTHER_DRAFTER, done.few, done.transfers) if done.few else known
    rows: dict[str, dict[str, Any]] = {}
    for scenario in scenarios:
        reals = done.rollouts[scenario.name]
        its, seen = (worse, done.few) if scenario.noise else (known, done.calibration)
        mean = mean_acceptance(its, seen[0].accepted)
        row = compare(its.table, reals, predict(its, scenario, seeds))
        controls = {
            "mean acceptance": compare(its.table, reals, predict(mean, scenario, seeds))["makespan"],
            "mean length": compare(its.table, reals, predict(its, mean_length(scenario), seeds))["makespan"],
        }
        if scenario.modes:
            controls["free moves"] = compare(its.table, reals, predict(*free(its, scenario), seeds))["makespan"]
        rows[scenario.name] = row | {"controls": controls}
        print(f"    {[round(o.ms) for o in reals]} ms", flush=True)
        show(scenario.name, rows[scenario.name])
    report["rollouts"] = rows
    report["moves"] = moves(known, cases, done.moves, seeds)
    for one in report["moves"]:
        print(f"{one['how']:10} real {one['real']:.3f}, simulated {one['simulated']:.3f}, free {one['free moves']:.3f}")
    report["summary"] = summary(rows, report["moves"])
    for name, value in report["summary"].items():
        aim = f" (aim {AIMS[name]})" if name in AIMS else ""
        print(f"{name:45} {value:.3f}{aim}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.record:
        calibration = {"table": known.table.to_json(), "prompts": [w.prompt for w in CALIBRATION.work]}
        calibration["accepted"] = done.calibration[0].accepted
        kept = [recorded(scenario, done.rollouts[scenario.name]) for scenario in scenarios if scenario.name in RECORDED]
        options.record.write_text(json.dumps({"calibration": calibration, "rollouts": kept}) + "\n")


if __name__ == "__main__":
    main()

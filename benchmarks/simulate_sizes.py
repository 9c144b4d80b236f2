"""Hold simulated changes of the tensor-parallel size against those of a real fleet of two ranks on a CPU.

    python benchmarks/simulate_sizes.py [--quick] [--json FILE]

Two processes draw with embedded engines over gloo, at size 1 or 2. Each pass measures a part of the cost table at both
sizes, one rollout at each size for calibration, and the rollouts to predict: without a change, with a change when so
many samples are left, and with the live `TPPlanner`, which decides by the measured table in both worlds. Lengths are
those of the real samples. The control leaves out the changes.

Durations are wall times of two busy cores, so nothing else should run. Figures are medians over passes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bigram_model import VOCAB, checkpoint
from fit_acceptance import fit, rounds_of
from synthetic import conditions

from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet, Follower
from megatron_rlspec.extensions.migration.embedded.member import Member
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.tp_planner import Change, SwitchCosts, TPPlanner, deal
from megatron_rlspec.extensions.simulator.run_engines import Resizing
from megatron_rlspec.extensions.simulator.run_engines import run_engines as simulated
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel
from megatron_rlspec.extensions.simulator.sim_engine import Durations, SimEngine, SimSample
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.rollout.embedded.parallel import Groups
from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.cost_rows import PrefillCost, Provenance, RoundCost
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import OFF, Load, Prompt, Request, Sample, Sampling, SpecConfig, SpecSchedule

LAYERS, HIDDEN = 6, 512
K = SpecConfig(2)
EVERY = 8  # rounds of a tick
CAP = 300
STOPS = tuple(range(6))
BATCHES = (1, 2, 4, 8, 12)
LENGTHS = (32, 240)
SLOTS = 12000  # of a rank's cache: a change makes it anew
HERE = Provenance("bigram", "cpu", "float32", "embedded", "", "")
AIMS = {"makespan, median": 0.05, "makespan, worst": 0.10}


class AtMost:
    """Changes from size 1 to 2 when at most so many samples are left."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def decide(self, loads: Sequence[Load], tp: int, lengths: Lengths, cap: int) -> Change | None:
        held = [one for load in loads for one in load.running]
        if tp == 2 or len(held) > self.samples or any(load.waiting for load in loads):
            return None
        (group,) = deal(held, 1)
        return Change(2, (tuple(one.id for one in group),), "kv", 0.0, 0.0, 0.0)


def planner_of(name: str, folder: Path) -> AtMost | TPPlanner:
    """Return what decides in a rollout: "live", or the number of samples at which the size changes."""
    if name != "live":
        return AtMost(int(name))
    known = json.loads((folder / "costs.json").read_text())
    table = CostTable.load(folder / "table.json")
    return TPPlanner(table, [K], Acceptance(K.num_steps).rates, SwitchCosts(**known), 2)


class ByName:
    """Lets the planner decide whose name the ids of a rollout's samples begin with, on every rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, AtMost | TPPlanner] = {}

    def decide(self, loads: Sequence[Load], tp: int, lengths: Lengths, cap: int) -> Change | None:
        ids = [one.id for load in loads for one in load.running]
        if not ids:
            return None
        rollout, name, _ = ids[0].split("-")
        key = f"{rollout}-{name}"
        if key not in self.made:
            self.made = {key: planner_of(name, self.folder)}
        return self.made[key].decide(loads, tp, lengths, cap)


# ---- the real fleet --------------------------------------------------------------------------------------------------


@dataclass
class Drawn:
    """A real rollout. changes: ms of each, and how many samples were left."""

    ms: float
    samples: list[Sample]
    changes: list[tuple[float, int]]


class Lab:
    """Draws rollouts with the fleet, on rank 0."""

    def __init__(self, fleet: Fleet, member: Member) -> None:
        self.fleet = fleet
        self.member = member
        self._serial = itertools.count()

    def rollout(
        self, planner: str, samples: int, seed: int, tokens: int = 32, cap: int = CAP, stops: bool = True
    ) -> Drawn:
        if self.member.engine.model.comm.size > 1:  # back to size 1, which the rollout would else do in its own time
            self.fleet.generate([Request("back-0-0", Prompt(0, np.arange(8)), 0)], Sampling(max_new_tokens=1))
        serial = next(self._serial)
        rng = np.random.default_rng([seed, samples, tokens])
        asked = [
            Request(f"r{serial:06d}-{planner}-{i:04d}", Prompt(i, rng.integers(30, VOCAB, tokens)), 1000 * seed + i)
            for i in range(samples)
        ]
        self.member.engine.recent_rounds()
        self.fleet.record()
        began = time.perf_counter()
        found = self.fleet.generate(
            asked, Sampling(max_new_tokens=cap, ignore_eos=True, stop_token_ids=STOPS if stops else ())
        )
        ms = 1e3 * (time.perf_counter() - began)
        changes = [(c["ms"], c["samples"]) for c in self.fleet.record()["sizes"] if c["to"] == 2]
        return Drawn(ms, found, changes)

    def profile(self) -> tuple[dict[tuple[int, int, int, SpecConfig], float], list[tuple[int, float]]]:
        """Measure rounds at both sizes: (tp, batch, context, configuration) -> ms. And prefills: (tokens, ms)."""
        found = {}
        for config, tp, batch, length in itertools.product((OFF, K), (1, 2), BATCHES, LENGTHS):
            self.fleet.set_schedule(SpecSchedule.fixed(config))
            new = 5 * EVERY
            self.rollout("99" if tp == 2 else "0", batch * 2 // tp, 7, length, new, stops=False)
            rounds = self.member.engine.recent_rounds()[EVERY:]
            ms = [took for _, size, _, took in rounds if size == batch and took is not None]
            found[tp, batch, batch * (length + new // 2), config] = float(np.median(ms[1:]))
        self.fleet.set_schedule(SpecSchedule.fixed(K))
        prefills = [(n, self.rollout("0", 1, 7, n, 1, stops=False).ms) for n in LENGTHS]
        return found, prefills


# ---- the simulated one -----------------------------------------------------------------------------------------------


@dataclass
class Known:
    """All that the simulator knows. factor: by size, what a calibration took over what was simulated."""

    table: CostTable
    acceptance: AcceptanceModel
    costs: SwitchCosts
    factor: dict[int, float] = field(default_factory=lambda: {1: 1.0, 2: 1.0})

    def fleet(self, tp: int, rng: np.random.Generator) -> list[SimEngine]:
        table = self.table.at(tp)
        cells = [RoundCost(tp, c.batch, c.context_tokens, c.config, c.ms * self.factor[tp]) for c in table.rounds]
        durations = Durations(CostTable(HERE, cells), [OFF, K])
        slope = (self.table.prefill_ms(LENGTHS[1], tp=1) - self.table.prefill_ms(LENGTHS[0], tp=1)) / np.ptp(LENGTHS)
        return [
            SimEngine(
                f"{tp}-{i}",
                durations,
                SpecSchedule.fixed(K),
                self.acceptance,
                rng,
                prefill=lambda tokens: float(tokens * slope),
                embedded=True,
                ranks=tp,
            )
            for i in range(2 // tp)
        ]

    def rollout(self, planner: Any, real: Drawn, seed: int) -> tuple[float, list[int]]:
        """Return the makespan [ms], and how many samples were left at each change."""
        rng = np.random.default_rng(seed)
        shares, regimes = self.acceptance.begin(len(real.samples), rng)
        samples = [
            SimSample(f"s-{i:04d}", s.prompt_len, len(s.response), -1, float(share), int(regime))
            for i, (s, share, regime) in enumerate(zip(real.samples, shares, regimes, strict=True))
        ]
        resizing = Resizing(planner, 1, lambda tp: self.fleet(tp, rng), self.costs)
        trace = simulated(samples, self.fleet(1, rng), CAP, resizing=resizing, every=EVERY)
        left = [sum(len(group) for group in change.groups) for _, change, _ in trace.changes]
        return trace.makespan_ms, left

    def predict(self, planner: Callable[[], Any], reals: Sequence[Drawn], seeds: int) -> tuple[float, list[int]]:
        runs = [self.rollout(planner(), real, seed) for real in reals for seed in range(seeds)]
        return float(np.median([ms for ms, _ in runs])), [n for _, left in runs for n in left]


def measure(lab: Lab, folder: Path, passes: int) -> tuple[Known, dict[str, list[Drawn]]]:
    """Run all passes. The live planner decides by the first pass's table in all of them, and in the simulator."""
    cells: dict[Any, list[float]] = {}
    prefills: dict[int, list[float]] = {}
    reals: dict[str, list[Drawn]] = {}
    for turn in range(passes):
        found, prompts = lab.profile()
        for key, ms in found.items():
            cells.setdefault(key, []).append(ms)
        for tokens, ms in prompts:
            prefills.setdefault(tokens, []).append(ms)
        table = CostTable(
            HERE,
            [RoundCost(tp, n, context, config, float(np.median(ms))) for (tp, n, context, config), ms in cells.items()],
            [PrefillCost(1, 1, tokens, float(np.median(ms)), 0.0, len(ms)) for tokens, ms in prefills.items()],
        )
        reals.setdefault("calibration, size 1", []).append(lab.rollout("0", 16, 1000))
        reals.setdefault("calibration, size 2", []).append(lab.rollout("99", 16, 1000))
        if turn == 0:
            ms = float(np.median([took for run in reals["calibration, size 2"] for took, _ in run.changes]))
            table.save(folder / "table.json")
            (folder / "costs.json").write_text(json.dumps({"change_ms": ms, "gigabytes_per_second": 1.0}))
        for name, (planner, samples, tokens) in SCENARIOS.items():
            reals.setdefault(name, []).append(lab.rollout(planner, samples, turn, tokens))
        print(f"pass {turn + 1} of {passes}", flush=True)
    change = float(np.median([took for runs in reals.values() for run in runs for took, _ in run.changes]))
    acceptance = fit([rounds_of(s) for s in reals["calibration, size 1"][0].samples], K.num_steps)
    known = Known(table, acceptance, SwitchCosts(change, gigabytes_per_second=1.0))
    for tp, planner in ((1, "0"), (2, "99")):
        runs = reals.pop(f"calibration, size {tp}")
        guess, _ = known.predict(partial(planner_of, planner, folder), runs, 8)
        known.factor[tp] = float(np.median([run.ms for run in runs])) / guess
    return known, reals


SCENARIOS = {  # planner, samples, tokens of a prompt
    "size 1": ("0", 12, 32),
    "size 2 from 4 samples on": ("4", 16, 32),
    "size 2 from 8 samples on": ("8", 24, 32),
    "size 2, long prompts": ("99", 8, 200),
    "live planner, 8 samples": ("live", 8, 32),
    "live planner, 16 samples": ("live", 16, 32),
    "live planner, 32 samples": ("live", 32, 32),
}


def rank_main(rank: int, folder: str, quick: bool) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(minutes=5), 2, rank)
    ranks, groups = Ranks(), Groups()
    groups.of(2)
    config, tensors = checkpoint(6.0, LAYERS, HIDDEN)
    engine = MigratableEmbeddedEngine(
        config, tensors.items(), schedule=SpecSchedule.fixed(K), max_length=640, max_total_tokens=SLOTS
    )
    for cache in (*engine.cache.kv, engine.cache.hidden):
        cache.fill_(0)  # else the first use of each page costs time
    member = Member(engine, ranks, None, ByName(path), groups)
    if rank:
        Follower(member)._thread.join()
        return
    fleet = Fleet(member, every=EVERY)
    known, reals = measure(Lab(fleet, member), path, 3 if quick else 7)
    fleet.close()
    report: dict[str, Any] = {"change_ms": known.costs.change_ms, "factor": known.factor, "rollouts": {}}
    for name, (planner, *_) in SCENARIOS.items():
        guess, left = known.predict(partial(planner_of, planner, path), reals[name], 8)
        stays, _ = known.predict(partial(AtMost, 0), reals[name], 8)
        real = float(np.median([run.ms for run in reals[name]]))
        at = [[n for run in reals[name] for _, n in run.changes], left]
        report["rollouts"][name] = {"real_ms": real, "ms": guess, "without changes": stays, "left": at}
    (path / "report.json").write_text(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer passes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    began = conditions(quick=options.quick, layers=LAYERS, hidden=HIDDEN)
    print(json.dumps(began), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, options.quick), 2)
        report = json.loads((Path(folder) / "report.json").read_text())
    errors, controls = [], []
    for name, row in report["rollouts"].items():
        errors.append(row["ms"] / row["real_ms"] - 1)
        mean = [f"{np.mean(left):.1f}" if left else "none" for left in row["left"]]
        control = ""
        if row["left"][0]:
            controls.append(row["without changes"] / row["real_ms"] - 1)
            control = f"; without changes {100 * controls[-1]:+.1f} %"
        print(
            f"{name:26} {row['real_ms']:6.0f} ms, simulated {row['ms']:6.0f} ({100 * errors[-1]:+5.1f} %); samples "
            f"left at the change {mean[0]}, simulated {mean[1]}{control}"
        )
    found = {"makespan, median": float(np.median(np.abs(errors))), "makespan, worst": float(np.max(np.abs(errors)))}
    for name, value in found.items():
        print(f"{name:30} {value:.3f} (aim {AIMS[name]})")
    if controls:
        print(f"{'without changes, worst':30} {np.max(np.abs(controls)):.3f}")
    print(f"a change takes {report['change_ms']:.1f} ms")
    if options.json:
        options.json.write_text(json.dumps({"conditions": began, "summary": found} | report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The simulator decides nothing: a trace shows what live objects said, and no code beside them could say it."""

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.extensions.migration.plans.tp_planner import SwitchCosts, TPPlanner
from megatron_rlspec.extensions.simulator import cluster as cluster_room
from megatron_rlspec.extensions.simulator.cluster import Cluster, Policies, Simulation, Workload
from megatron_rlspec.extensions.simulator.hardware import ModelSizes, hardware_table
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, LengthModel
from megatron_rlspec.speculation.rule import SpecRule

SIM = Path(cluster_room.__file__).parent
ACCEPTANCE = AcceptanceModel(np.array([[0.9, 0.85, 0.8], [0.5, 0.4, 0.3]]), 0.8, np.array([0.4, 0.7]))
TABLE = hardware_table("A40", ModelSizes(), (2, 8), (1, 3))
CLUSTER = Cluster(TABLE, 4, 2, link=8.3, pause_ms=0.0, switch=SwitchCosts(10.0, 131_072, 8.3))
WORKLOAD = Workload(LengthModel(6.0, 0.8), ACCEPTANCE, prompts=6, samples=4, prompt_tokens=50, cap=1500)
SLOW = replace(CLUSTER, switch=SwitchCosts(1e9))  # a change of the size never pays


class Recorded:
    """What the live objects said, in order."""

    def __init__(self, monkeypatch):
        self.configs = Counter()
        self.moves = []
        self.changes = []
        recorded = self

        class Rule(SpecRule):
            def choose(self, *args, **options):
                config = super().choose(*args, **options)
                recorded.configs[config] += 1
                return config

        class Moves(Rebalancer):
            def plan(self, *args):
                recorded.moves.append(super().plan(*args))
                return recorded.moves[-1]

        class Sizes(TPPlanner):
            def decide(self, *args):
                change = super().decide(*args)
                recorded.changes += [change] if change is not None else []
                return change

        for name, live in (("SpecRule", Rule), ("Rebalancer", Moves), ("TPPlanner", Sizes)):
            monkeypatch.setattr(cluster_room, name, live)


def test_every_choice_in_a_trace_is_one_of_a_live_object(monkeypatch):
    recorded = Recorded(monkeypatch)
    moved = Simulation(SLOW, WORKLOAD, Policies.of("adaptive+auto+tp"), 0).run()
    assert moved.moves and [move for _, move in moved.moves] == [move for plan in recorded.moves for move in plan]
    assert not moved.changes and not recorded.changes
    assert moved.configs == recorded.configs
    changed = Simulation(CLUSTER, WORKLOAD, Policies.of("adaptive+tp"), 0).run()
    assert [change for _, change, _ in changed.changes] == recorded.changes != []


def test_the_trace_follows_a_live_object_that_errs(monkeypatch):
    """A simulator with an opinion of its own would not run these."""

    class Contrary(SpecRule):
        def choose(self, *args, **options):
            chosen = super().choose(*args, **options)
            return next(config for config in self.candidates if config != chosen)

    right = Simulation(SLOW, WORKLOAD, Policies.of("adaptive"), 0).run()
    monkeypatch.setattr(cluster_room, "SpecRule", Contrary)
    monkeypatch.setattr(Rebalancer, "plan", lambda *_: [])
    wrong = Simulation(SLOW, WORKLOAD, Policies.of("adaptive+auto"), 0).run()
    assert not wrong.moves
    assert max(right.configs, key=right.configs.get) != max(wrong.configs, key=wrong.configs.get)
    assert wrong.makespan_ms > right.makespan_ms


@pytest.mark.parametrize("name", ["sim_engine", "events", "links", "run_engines", "samples", "step"])
def test_the_code_that_runs_makes_no_decision(name):
    """It makes no configuration, move or change, and knows nothing by which to choose among them."""
    tree = ast.parse((SIM / f"{name}.py").read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"Move", "Change", "SpecConfig", "expected_tokens", "Pace", "deal"}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not used & {"OFF", "expected_tokens", "Pace", "deal"}

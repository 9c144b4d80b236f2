"""Simulated trees: acceptance node by node, costs by what is verified, and the live objects that say what that is."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_rlspec.extensions.simulator import cluster as cluster_room
from megatron_rlspec.extensions.simulator.cluster import Cluster, Policies, Simulation, Workload
from megatron_rlspec.extensions.simulator.hardware import ModelSizes, hardware_table
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, LengthModel
from megatron_rlspec.extensions.simulator.sim_engine import Durations
from megatron_rlspec.extensions.trees.tree import TreeBudget
from megatron_rlspec.speculation.acceptance import expected_tokens, top
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SpecConfig

CHAINS = AcceptanceModel(np.array([[0.9, 0.85, 0.8], [0.5, 0.4, 0.3]]), 0.8, np.array([0.4, 0.7]))
ACCEPTANCE = replace(CHAINS, sibling=0.4)
TREE = Policies.of("k3t3n16+sample")
CLUSTER = Cluster(hardware_table("L40S", ModelSizes(), (1,), (3,), TREE.shapes), 1)
WORKLOAD = Workload(LengthModel(5.0, 0.3), ACCEPTANCE, prompts=12, samples=4, prompt_tokens=50, cap=300)


@pytest.mark.parametrize("regime", [0, 1])
def test_a_tree_of_one_branch_accepts_what_a_chain_does(regime):
    tree = ACCEPTANCE.tree(regime, 5, 1)
    for draw in np.random.default_rng(0).random(500):
        assert len(tree.accept(np.ones(5, bool), draw)) == ACCEPTANCE.accept(regime, 5, draw)


@pytest.mark.parametrize("config", [SpecConfig(1, 2, 3), SpecConfig(3, 3, 9)], ids=str)
def test_candidates_are_accepted_as_often_as_their_scores_say(config):
    """And the tokens of a round are those that `expected_tokens` gives."""
    tree = ACCEPTANCE.tree(1, config.num_steps, config.topk)
    verified = top(tree.scores[None], config.num_draft_tokens - 1)[0]
    paths = [tree.accept(verified, draw) for draw in (np.arange(20_000) + 0.5) / 20_000]
    seen = Counter(candidate for path in paths for candidate in path)
    assert set(seen) <= set(np.flatnonzero(verified))
    for candidate in np.flatnonzero(verified):
        assert seen[candidate] / len(paths) == pytest.approx(np.exp(tree.scores[candidate]), abs=5e-4)
    tokens = 1 + np.mean([len(path) for path in paths])
    assert tokens == pytest.approx(expected_tokens(config, ACCEPTANCE.rates[1].tolist(), 0.4), abs=2e-3)


def test_siblings_follow_from_two_accept_lengths():
    one, two = (expected_tokens(config, [0.6], 0.3) for config in (SpecConfig(1), SpecConfig(1, 2, 3)))
    assert (two - one) / (2 - one) == pytest.approx(0.3)


def test_a_round_takes_the_time_of_what_it_verifies():
    cost = Roofline(10.0, 1.0, 0.0, 0.1)
    shapes = [SpecConfig(2, 2, n) for n in (2, 4)]
    durations = Durations(cost, shapes)
    two, four = (durations.ms(shape, 8, 800)[0] for shape in shapes)
    found = {n: durations.tree_ms(shapes[-1], 8, 800, n) for n in (8, 16, 20, 32, 40)}
    assert found[16][0] == two and found[20][0] == pytest.approx((3 * two + four) / 4)
    assert found[32][0] == found[40][0] == four and found[8][0] == two
    measured = Durations(hardware_table("A40", ModelSizes(), (1,), (1,), shapes).at(1), shapes)
    assert [measured.tree_ms(shapes[-1], 8, 800, n)[1] for n in (8, 16, 20, 32, 40)] == [
        True,
        False,
        False,
        False,
        True,
    ]


def test_a_live_budget_says_what_is_verified(monkeypatch):
    said = []

    class Recorded(TreeBudget):
        def keep(self, *args):
            said.append(super().keep(*args))
            return said[-1]

        def timed(self, samples, context, verified, ms):
            assert verified == samples + said[-1].sum() and ms > 0
            super().timed(samples, context, verified, ms)

    class Nothing(TreeBudget):
        def keep(self, *args):
            return np.zeros_like(super().keep(*args))

    def accepted(budget):
        monkeypatch.setattr(cluster_room, "TreeBudget", budget)
        simulation = Simulation(CLUSTER, WORKLOAD, TREE, 0)
        trace = simulation.run()
        engine = simulation.engines[0]
        return trace, engine.budget, np.sum([found.accepted for found in engine.stats()], axis=0)

    trace, budget, some = accepted(Recorded)
    assert budget.acceptance(np.log([0.9, 0.5])) == pytest.approx([0.9, 0.5], abs=0.05)  # learned
    assert len(said) == trace.rounds and some[1:].all()
    widths = [kept.sum(1).mean() for kept in said[60:]]
    assert widths[-1] > widths[0] > 1  # few samples at the end: more is verified of each
    _, _, none = accepted(Nothing)
    assert none[0] > 0 and not none[1:].any()


def test_larger_trees_need_fewer_rounds_of_the_same_samples():
    rounds = []
    for name in ("k3", "k3t3n4", "k3t3n8", "k3t3n16"):
        simulation = Simulation(CLUSTER, WORKLOAD, Policies.of(name), 0)
        assert simulation.run().tokens == sum(sample.length for sample in simulation._samples())
        rounds.append(sum(sum(found.accepted) for found in simulation.engines[0].stats()))
    assert rounds[0] > 0.98 * rounds[1] > rounds[2] > rounds[3]


def test_trees_without_the_acceptance_of_siblings_are_refused():
    with pytest.raises(ValueError, match="acceptance.sibling is missing, which chains do not record"):
        Simulation(CLUSTER, replace(WORKLOAD, acceptance=CHAINS), TREE, 0)
    for name in ("k3+sample", "adaptive+sample", "k3t3n900", "k3t3"):
        with pytest.raises(ValueError, match=name.replace("+", ".")):
            Policies.of(name)

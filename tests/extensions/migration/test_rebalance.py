"""RLHFSpec's rule: the constraints of its equation 6, no oscillation, who moves, and what rounds teach."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roofline_tables import of_hardware

from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Load, RoundStats, RunningSample, SpecConfig

CANDIDATES = (OFF, SpecConfig(1), SpecConfig(3))
L40S = of_hardware(0.864, 362.0, parameters=8e9, host_ms=1.0)
STEEP = Roofline(1.0, 0.3, 1e-4, 0.1, host_ms=0.1)  # batch matters from the third sample on; the threshold is about 8


def planner(cost=STEEP) -> Rebalancer:
    return Rebalancer(cost, CANDIDATES)


def engine(name, contexts, free=100_000, version=3, waiting=0) -> Load:
    running = tuple(RunningSample(f"{name}-{i:03d}", 16, context, 2.0) for i, context in enumerate(contexts))
    return Load(name, running, waiting, free, version)


held = st.tuples(st.integers(1, 60), st.integers(60, 560), st.floats(1, 5))


@st.composite
def fleets(draw):
    loads = []
    for i in range(draw(st.integers(2, 4))):
        rows = draw(st.lists(held, max_size=30))
        running = tuple(RunningSample(f"{i}-{j:02d}", *row) for j, row in enumerate(rows))
        free = draw(st.sampled_from([0, 500, 5_000, 1_000_000]))
        loads.append(Load(f"engine-{i}", running, draw(st.integers(0, 2)), free, draw(st.sampled_from([7, 7, 7, 8]))))
    return loads


def after(loads, moves) -> list[Load]:
    """Return the loads as they are when all moves have succeeded."""
    samples = {held.id: held for load in loads for held in load.running}
    where = {held.id: load.engine for load in loads for held in load.running}
    for move in moves:
        where |= dict.fromkeys(move.ids, move.target)
    result = []
    for load in loads:
        running = tuple(samples[id] for id, name in where.items() if name == load.engine)
        grown = sum(held.context for held in running) - sum(held.context for held in load.running)
        result.append(replace(load, running=running, free_tokens=load.free_tokens - grown))
    return result


@settings(max_examples=60)
@given(fleets())
def test_a_plan_keeps_the_constraints_of_equation_6(loads):
    rule = planner()
    threshold = rule.threshold(loads)
    moves = rule.plan(loads)
    by_name = {load.engine: load for load in loads}
    now = {load.engine: load for load in after(loads, moves)}
    for move in moves:
        source, target = by_name[move.source], by_name[move.target]
        assert move.ids and set(move.ids) <= {sample.id for sample in source.running}
        assert source.version == target.version
        assert len(source.running) > threshold and len(now[move.source].running) >= threshold
        assert len(target.running) < threshold and len(now[move.target].running) + target.waiting <= threshold
        assert now[move.target].free_tokens >= 0
    engines = [name for move in moves for name in (move.source, move.target)]
    assert len(engines) == len(set(engines)), "an engine takes part in one migration of a decision"


@settings(max_examples=30)
@given(fleets())
def test_repeated_plans_end(loads):
    rule = planner()
    for _ in range(len(loads) + 1):
        moves = rule.plan(loads)
        loads = after(loads, moves)
    assert not moves


def test_the_paper_s_example_moves():
    """24 samples and 1, RLHFSpec's figure 5: the almost empty engine gets some."""
    loads = [engine("a", range(100, 124)), engine("b", [110])]
    moves = planner().plan(loads)
    assert [(move.source, move.target) for move in moves] == [("a", "b")]
    assert len(after(loads, moves)[1].running) == planner().threshold(loads)
    assert planner().plan([engine("a", [400]), engine("b", []), engine("c", [])]) == []


def test_the_threshold_is_where_a_sample_adds_a_tenth():
    rule = planner(L40S)
    threshold = rule.threshold([engine("a", [200] * 4)])
    batch = np.arange(1.0, threshold + 2)
    cost = np.stack([L40S.grid([c], batch, batch * 200)[0] for c in CANDIDATES])
    tokens = np.array([1.0, *(1 + np.cumsum(np.cumprod(rule.acceptance.rates))[[0, 2]])])
    throughput = batch * (tokens[:, None] / cost).max(0)
    gains = np.diff(throughput) / throughput[0]
    assert gains[-1] < 0.1 <= gains[-2]


def test_short_contexts_and_low_acceptance_move_first():
    rule = planner(Roofline(1.0, 1.0, 0.0, 0.1))
    rows = [(90, 1), (50, 3), (50, 2), (70, 1)]
    full = Load("a", tuple(RunningSample(f"{i}", 8, c, a) for i, (c, a) in enumerate(rows)), 0, 9, 1)
    empty = engine("b", [], version=1)
    count = rule.threshold([full, empty])
    moves = rule.plan([full, empty])
    assert moves[0].ids == ("2", "1", "3")[: min(4 - count, count)]


@pytest.mark.parametrize("change", [{"version": 4}, {"free": 50}, {"waiting": 30}])
def test_other_versions_full_caches_and_queues_get_nothing(change):
    full = engine("a", range(100, 124))
    assert planner().plan([full, engine("b", [])])
    assert not planner().plan([full, engine("b", [], **change)])


def test_rounds_correct_the_acceptance():
    drafting = planner()
    drafting.observe([RoundStats(SpecConfig(3), b, 100 * b, 10, 0.0, (0, 0, 0, 10 * b)) for b in (1, 4, 16, 64)])
    assert drafting.acceptance.rates[0] > 0.9

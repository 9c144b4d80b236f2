"""Both rules of rebalancing: their constraints, no oscillation, and the makespan rule against all assignments."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roofline_tables import roofline_table

from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.pace import drained, terms
from megatron_rlspec.extensions.migration.plans.rebalance import WORTH, Rebalancer, Transport, _State, after
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError, PrefillCost, Provenance, RoundCost
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Held, Load, RoundStats, SpecConfig

CANDIDATES = (OFF, SpecConfig(1), SpecConfig(3))
L40S = Roofline.of_hardware(0.864, 362.0, parameters=8e9, host_ms=1.0)
STEEP = Roofline(1.0, 0.3, 1e-4, 0.1, host_ms=0.1)  # batch matters from the third sample on; the threshold is about 8


def planner(rule="makespan", cost=L40S, **options) -> Rebalancer:
    return Rebalancer(cost, CANDIDATES, options.pop("transport", Transport()), rule=rule, **options)


def engine(name, contexts, prompt=16, free=100_000, version=3, waiting=0, accept=2.0, group=-1) -> Load:
    running = tuple(Held(f"{name}-{i:03d}", prompt, c, accept, group) for i, c in enumerate(contexts))
    return Load(name, running, waiting, free, version)


def of_past_rollouts(cap=512) -> Lengths:
    lengths = Lengths()
    drawn = np.random.default_rng(0).lognormal(4.5, 0.8, 400).astype(int)
    lengths.observe(np.minimum(drawn, cap), drawn >= cap)
    return lengths


held = st.builds(
    lambda prompt, length, accept, group: (prompt, prompt + length, accept, group),
    st.integers(1, 60), st.integers(0, 500), st.floats(1, 5), st.integers(-1, 3),
)  # fmt: skip


@st.composite
def fleets(draw, most_engines=4, most_samples=30):
    loads = []
    for i in range(draw(st.integers(2, most_engines))):
        rows = draw(st.lists(held, max_size=most_samples))
        running = tuple(Held(f"{i}-{j:02d}", p, c, a, g) for j, (p, c, a, g) in enumerate(rows))
        free = draw(st.sampled_from([0, 500, 5_000, 1_000_000]))
        loads.append(Load(f"engine-{i}", running, draw(st.integers(0, 2)), free, draw(st.sampled_from([7, 7, 7, 8]))))
    return loads


def check_moves(loads, moves):
    """Every sample moves at most once, from where it is, to an engine of the same version."""
    by_name = {load.engine: load for load in loads}
    moved = [id for move in moves for id in move.ids]
    assert len(moved) == len(set(moved))
    for move in moves:
        assert move.source != move.target and move.ids
        assert set(move.ids) <= {sample.id for sample in by_name[move.source].running}
        assert by_name[move.source].version == by_name[move.target].version


@settings(max_examples=60)
@given(fleets())
def test_the_threshold_rule_keeps_the_constraints_of_equation_6(loads):
    rule = planner("threshold", cost=STEEP)
    threshold = rule.threshold(loads)
    moves = rule.plan(loads, Lengths(), 512)
    check_moves(loads, moves)
    before = {load.engine: len(load.running) for load in loads}
    now = {load.engine: len(load.running) for load in after(loads, moves)}
    for move in moves:
        assert before[move.source] > threshold and now[move.source] >= threshold
        assert before[move.target] < threshold and now[move.target] <= threshold
    pairs = {(move.source, move.target) for move in moves}
    engines = [name for pair in pairs for name in pair]
    assert len(engines) == len(set(engines)), "an engine takes part in one migration of a decision"


@settings(max_examples=30)
@given(fleets())
def test_repeated_plans_of_the_threshold_rule_end(loads):
    rule = planner("threshold", cost=STEEP)
    for _ in range(len(loads) + 1):
        moves = rule.plan(loads, Lengths(), 512)
        loads = after(loads, moves)
    assert not moves


@settings(max_examples=30)
@given(fleets(), st.sampled_from([0.0, 0.1, 40.0]), st.booleans())
def test_a_plan_after_a_plan_of_the_makespan_rule_is_empty(loads, bandwidth, known):
    transport = Transport(bandwidth, 150_000, 2.0)
    rule = planner(cost=STEEP, transport=transport)
    rule.ms_per_unit = 1.0
    lengths = of_past_rollouts() if known else Lengths()
    moves = rule.plan(loads, lengths, 512)
    check_moves(loads, moves)
    assert rule.plan(after(loads, moves), lengths, 512) == []


# PAT, figure 4: ms a token at tensor-parallel sizes 2 and 8, by the samples of one engine.
ANCHORS = {2: {1: 15.37, 32: 24.41, 128: 60.0}, 8: {1: 9.64, 128: 30.87}}


def of_sizes(**options) -> Rebalancer:
    """Engines of size 2, and one of size 8."""
    here = Provenance(model="m", hardware="A40", dtype="bfloat16", engine="e", engine_version="", date="2026-01-01")
    rounds = []
    for tp, line in ANCHORS.items():
        for batch in (1, 4, 16, 32, 64, 128):
            ms = float(np.interp(batch, list(line), list(line.values())))
            rounds += [RoundCost(tp, batch, batch * length, OFF, ms) for length in (512, 16384)]
    fills = [PrefillCost(tp, 1, n, n * 0.17) for tp in ANCHORS for n in (1024, 65536)]
    table = CostTable(here, rounds, fills)
    return Rebalancer(table, [OFF], **options)


def test_stragglers_go_to_a_larger_size_where_that_pays():
    rule = of_sizes(transport=Transport(5.25, 131072))
    wide = replace(engine("wide", []), tp=8)
    moves = rule.plan([engine("a", [4000]), engine("b", [4100]), wide], Lengths(), 16384)
    assert {(move.source, move.target) for move in moves} == {("a", "wide"), ("b", "wide")}
    assert not rule.plan([engine("a", [4000]), engine("b", [4100]), replace(wide, tp=2)], Lengths(), 16384)
    assert not rule.plan([engine("a", [16370]), engine("b", [16372]), wide], Lengths(), 16384)  # they end soon
    slow = of_sizes(transport=Transport(0.001, 131072), modes=["kv"])
    assert not slow.plan([engine("a", [4000]), engine("b", [4100]), wide], Lengths(), 16384)
    others = [engine("a", [], free=10**7), engine("b", [], free=10**7)]
    back = rule.plan([*others, replace(engine("wide", [400] * 128), tp=8)], Lengths(), 16384)
    assert {move.source for move in back} == {"wide"}  # many samples are faster on the others


def test_rounds_correct_the_costs_of_their_engine_s_size():
    def seen(tp: int, factor: float) -> RoundStats:
        return RoundStats(OFF, 4, 4 * 2048, 500, 500 * factor * profiled.ms(OFF, 4, 4 * 2048, tp))

    def factors() -> list[float]:
        return [rule.pace_of(Load("", (), 0, 0, 1, tp)).per_round(4, 2048) / profiled.ms(OFF, 4, 8192, tp)
                for tp in (2, 8)]  # fmt: skip

    rule = of_sizes()
    profiled = rule.cost
    rule.observe([seen(2, 1.5)], 2)
    assert factors() == pytest.approx([1.5, 1.5], rel=0.02)  # nothing is known of size 8 but that the machine is slower
    rule.observe([seen(8, 0.8)], 8)
    assert factors() == pytest.approx([1.5, 0.8], rel=0.02)
    rule.observe([seen(2, 1.2)], 2)
    assert factors() == pytest.approx([1.2, 0.8], rel=0.02)
    with pytest.raises(CostTableError, match="choose one of them"):
        rule.observe([seen(2, 1.0)])


@settings(max_examples=15)
@given(fleets(most_engines=3, most_samples=12), st.sampled_from([0.001, 0.1, 40.0]), st.booleans(), st.integers(0, 3))
def test_moves_between_sizes_save_time_with_their_cost_and_are_not_undone(loads, bandwidth, known, wide):
    """What a plan's first step saves is computed again here, from the finishes of engines before and after it."""
    loads = [replace(load, tp=8 if i == wide else 2) for i, load in enumerate(loads)]
    rule = of_sizes(transport=Transport(bandwidth, 150_000, 2.0))
    lengths = of_past_rollouts() if known else Lengths()
    moves = rule.plan(loads, lengths, 512)
    check_moves(loads, moves)
    assert rule.plan(after(loads, moves), lengths, 512) == []
    if not moves:
        return
    state = _State(rule, loads, lengths, 512)
    source, target, chosen = state.best_step()
    cost = float(state.works(chosen, target).sum())
    before = state.finish[source]
    state.apply(source, target, chosen)
    assert before - max(state.finish[source], state.finish[target] + cost) > rule.gain * before


def saving_by_hand(rule, loads, lengths, cap, times, source, target, chosen):
    """The time that a step saves, one sample after the other; -inf without room."""
    average = np.mean([held.accept for load in loads for held in load.running])

    def finish(load, running):
        rows = []
        for held in running:
            tokens = times * np.clip(held.accept / average, 0.25, 4.0)
            drawn = held.context - held.prompt
            alive = np.where(tokens < cap - drawn, lengths.survival(drawn, tokens), 0.0)
            rows.append((alive, held.context + np.minimum(tokens, cap - drawn)))
        alive, context = (np.reshape(column, (-1, len(times))) for column in zip(*rows, strict=True)) if rows else (
            np.zeros((2, 0, len(times)))
        )  # fmt: skip
        return float(drained(rule.pace_of(load), times, terms(alive, context).sum(1, keepdims=True))[0])

    groups = {held.group for held in target.running} - {-1}
    cost = sum(rule.work(h.context - (h.prompt if h.group in groups else 0), target)[0] for h in chosen)
    length = np.mean([held.context for held in source.running])
    cost += rule.transport.rounds * rule.pace.per_round(np.array(len(target.running) + len(chosen)), length)
    if sum(h.context + lengths.remaining(h.context - h.prompt, cap) for h in chosen) > target.free_tokens:
        return -np.inf
    rest = [held for held in source.running if held not in chosen]
    arrived = [*target.running, *chosen]
    return finish(source, source.running) - max(finish(source, rest), finish(target, arrived) + cost)


@settings(max_examples=15)
@given(fleets(most_engines=3, most_samples=8), st.sampled_from([0.0, 0.1, 40.0]))
def test_a_step_saves_as_much_as_the_best_one_by_hand(loads, bandwidth):
    """All targets, orders and numbers of samples of the engine that gives, each from the start."""
    loads = [replace(load, waiting=0, version=7) for load in loads]
    running = [held.context - held.prompt for load in loads for held in load.running]
    if not running:
        return
    rule = planner(cost=STEEP, transport=Transport(bandwidth, 150_000, 2.0))
    rule.ms_per_unit = 1.0
    lengths = of_past_rollouts().beside(running)
    state = _State(rule, loads, of_past_rollouts(), 512)

    def best(source):
        left = {h.id: lengths.remaining(h.context - h.prompt, 512) / h.accept for h in loads[source].running}
        soon = sorted(loads[source].running, key=lambda held: (left[held.id], held.id))
        found = [-np.inf]
        for target in (load for i, load in enumerate(loads) if state.finish[i] < state.finish[source]):
            groups = {held.group for held in target.running} - {-1}
            cheap = sorted(soon, key=lambda h: (h.context - (h.prompt if h.group in groups else 0), h.id))
            for order in (cheap, soon, soon[::-1]):
                for count in range(1, len(order) + 1):
                    args = (rule, loads, lengths, 512, state.all.times, loads[source], target, order[:count])
                    found.append(saving_by_hand(*args))
        return max(found)

    step = state.best_step()
    sources = [i for i in np.argsort(-state.finish, kind="stable") if state.finish[i] >= WORTH * state.finish.max()]
    for source in sources:
        most = best(source)
        if step is None or source != step[0]:
            assert most <= rule.gain * state.finish[source] * (1 + 1e-9)
            continue
        chosen = [state.all.held[i] for i in step[2]]
        found = saving_by_hand(rule, loads, lengths, 512, state.all.times, loads[source], loads[step[1]], chosen)
        assert found == pytest.approx(most) and found > 0
        break


def test_an_engine_that_gives_nothing_is_asked_again_when_another_has_room():
    """At first neither b nor c has room for a sample of a. Then b gives some to c."""
    small = {"free": 1500}
    loads = [engine("a", [1500] * 12, prompt=1400), engine("b", [100] * 12, **small), engine("c", [], **small)]
    moves = planner(cost=STEEP, gain=0.01).plan(loads, of_past_rollouts(), 512)
    assert [(move.source, move.target) for move in moves] == [("a", "b"), ("b", "c")]


def test_the_paper_s_example_moves():
    """24 samples and 1, RLHFSpec's figure 5: both rules give the almost empty engine some."""
    loads = [engine("a", range(100, 124)), engine("b", [110])]
    for rule in ("threshold", "makespan"):
        moves = planner(rule).plan(loads, of_past_rollouts(), 512)
        assert [(move.source, move.target) for move in moves] == [("a", "b")] or rule == "threshold"
    counts = [len(load.running) for load in after(loads, planner().plan(loads, of_past_rollouts(), 512))]
    assert min(counts) >= 8


def test_the_threshold_is_where_a_sample_adds_a_tenth():
    rule = planner("threshold")
    loads = [engine("a", [200] * 4)]
    found = rule.threshold(loads)
    batch = np.arange(1.0, found + 2)
    cost = np.stack([L40S.grid([c], batch, batch * 200)[0] for c in CANDIDATES])
    tokens = np.array([1.0, *(1 + np.cumsum(np.cumprod(rule._acceptance.rates))[[0, 2]])])
    throughput = batch * (tokens[:, None] / cost).max(0)
    gains = np.diff(throughput) / throughput[0]
    assert gains[-1] < 0.1 <= gains[-2]


def test_short_contexts_and_low_acceptance_move_first():
    rule = planner("threshold", cost=Roofline(1.0, 1.0, 0.0, 0.1))
    rows = [(90, 1), (50, 3), (50, 2), (70, 1)]
    full = Load("a", tuple(Held(f"{i}", 8, c, a) for i, (c, a) in enumerate(rows)), 0, 9, 1)
    empty = engine("b", [], version=1)
    count = rule.threshold([full, empty])
    moves = rule.plan([full, empty], Lengths(), 512)
    assert moves[0].ids == ("2", "1", "3")[: min(4 - count, count)]


def test_other_versions_and_full_caches_get_nothing():
    full = engine("a", range(100, 124))
    assert planner().plan([full, engine("b", [])], of_past_rollouts(), 512)
    assert not planner().plan([full, engine("b", [], version=4)], of_past_rollouts(), 512)
    assert not planner().plan([full, engine("b", [], free=50)], of_past_rollouts(), 512)


def test_a_dear_move_is_not_made_and_the_cheaper_way_is_taken():
    loads = [engine("a", [4000] * 12, prompt=1000), engine("b", [])]
    fast = planner(transport=Transport(40.0, 150_000))
    slow = planner(transport=Transport(0.01, 150_000))
    for rule in (fast, slow):
        rule.ms_per_unit = 1.0
    assert {move.how for move in fast.plan(loads, Lengths(), 8000)} == {"kv"}
    assert {move.how for move in slow.plan(loads, Lengths(), 8000)} == {"recompute"}
    only = planner(transport=Transport(0.001, 150_000), modes=("kv",))
    only.ms_per_unit = 1.0
    assert not only.plan([engine("a", [4000] * 12), engine("b", [])], Lengths(), 4010)


@pytest.mark.parametrize("cost", [STEEP, LearntCost(Roofline.of_layers(24))], ids=["table", "sizes"])
def test_a_link_of_unknown_speed_is_not_free(cost):
    """Else a run's first plan moves every cache, however large, over a link that nothing is known of."""
    work, how = planner(cost=cost, transport=Transport(token_bytes=50_000_000)).work(4000, engine("b", []))
    assert work > 0 and how == "recompute"


@pytest.mark.parametrize(("modes", "there"), [(("kv",), set()), (("kv", "recompute"), {("far", "recompute")})])
def test_between_engines_that_share_no_memory_samples_are_recomputed_or_stay(modes, there):
    full, near, far = engine("a", range(100, 124)), engine("b", []), replace(engine("far", []), node="another machine")
    for rule, loads, here in (("makespan", [full, near, far], {("b", "kv")}), ("threshold", [full, far], set())):
        fast = planner(rule, cost=STEEP, transport=Transport(1e6, 150_000), modes=modes)
        fast.ms_per_unit = 1.0
        moves = fast.plan(loads, of_past_rollouts(), 512)
        assert {(move.target, move.how) for move in moves} == here | there


def test_a_prompt_that_the_target_holds_is_free():
    rule = planner(transport=Transport(1.0, 150_000), modes=("kv",))
    rule.ms_per_unit = 1.0
    alone = [engine("a", [3100] * 6, prompt=3000, group=5), engine("b", [], group=5)]
    beside = [alone[0], engine("b", [3050], prompt=3000, group=5)]
    unknown = [engine("a", [3100] * 6, prompt=3000), engine("b", [3050], prompt=3000)]
    state = [_State(rule, loads, of_past_rollouts(), 512) for loads in (alone, beside, unknown)]
    works = [s.works(s.here[0], 1).sum() for s in state]
    assert works[0] == works[2] > 3 * works[1]


def test_waiting_requests_count():
    busy = engine("a", range(100, 110), waiting=0)
    assert planner().plan([busy, engine("b", [])], of_past_rollouts(), 512)
    assert not planner().plan([busy, engine("b", [], waiting=30)], of_past_rollouts(), 512)


def test_a_move_must_save_the_margin():
    loads = [engine("a", range(100, 112)), engine("b", range(100, 104))]
    assert planner(cost=STEEP, gain=0.05).plan(loads, of_past_rollouts(), 512)
    assert not planner(cost=STEEP, gain=0.6).plan(loads, of_past_rollouts(), 512)


def test_one_straggler_stays():
    loads = [engine("a", [400]), engine("b", []), engine("c", [])]
    assert planner().plan(loads, of_past_rollouts(), 4096) == []
    assert planner("threshold").plan(loads, Lengths(), 4096) == []


def makespan(rule, loads, moved, lengths, cap) -> float:
    """The latest finish, with the costs of moves on the engines that take them."""
    state = _State(rule, loads, lengths, cap)
    finish = state.finish
    for i, here in enumerate(state.here):
        arrived = np.array([sample for sample in here if state.all.held[sample].id in moved[i]], int)
        if len(arrived):
            state.here[i] = np.setdiff1d(here, arrived)
            finish[i] += state.works(arrived, i).sum() + state.missed(arrived, i, np.array([len(arrived)]))[0]
    return float(finish.max())


def best_of_all(rule, loads, lengths, cap) -> float:
    where = [(i, sample) for i, load in enumerate(loads) for sample in load.running]
    found = []
    for places in itertools.product(range(len(loads)), repeat=len(where)):
        rows = [[sample for (_, sample), p in zip(where, places, strict=True) if p == i] for i in range(len(loads))]
        moved = [{s.id for (o, s), p in zip(where, places, strict=True) if p == i != o} for i in range(len(loads))]
        arranged = [Load(load.engine, tuple(r), 0, load.free_tokens, 3) for load, r in zip(loads, rows, strict=True)]
        found.append(makespan(rule, arranged, moved, lengths, cap))
    return min(found)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))])
def test_within_five_percent_of_the_best_assignment(seed):
    """All assignments of up to 6 samples to up to 4 engines. The kept margin (`gain`) is part of the 5 %."""
    rng = np.random.default_rng(seed)
    engines = int(rng.integers(2, 4 if seed else 5))
    rule = planner(cost=STEEP, gain=0.01, transport=Transport(rounds=2.0))
    lengths = of_past_rollouts()
    rows = [[] for _ in range(engines)]
    for _ in range(6 if engines < 4 else 5):
        rows[int(rng.integers(0, engines) * rng.integers(0, 2))].append(int(rng.integers(20, 400)))
    loads = [engine(f"e{i}", contexts) for i, contexts in enumerate(rows)]
    moves = rule.plan(loads, lengths, 512)
    moved = [{id for move in moves if move.target == load.engine for id in move.ids} for load in loads]
    ours = makespan(rule, after(loads, moves), moved, lengths, 512)
    assert ours <= 1.05 * best_of_all(rule, loads, lengths, 512)


def test_observed_rounds_change_costs_and_acceptance():
    rule = planner(cost=LearntCost(Roofline.of_layers(24)))
    stats = [RoundStats(SpecConfig(3), b, 100 * b, 10, 10 * (5 + b), (0, 0, 0, 10 * b)) for b in (1, 4, 16, 64)]
    rule.observe(stats)
    assert rule.ms_per_unit > 0 and rule._acceptance.rates[0] > 0.9
    rule.moved([(10_000_000, 10.0)])
    assert rule.transport.rate == pytest.approx(1.0)
    table = roofline_table(L40S, CANDIDATES, (1, 8, 64), (64, 1024), Provenance("m", "h", "bf16", "e", "1", "d", True))
    rule = planner(cost=table)
    before = rule.pace.per_round(np.array(8), 100)
    rule.observe([RoundStats(SpecConfig(1), 8, 800, 500, 500 * 90.0, (0, 4000))])
    assert rule.pace.per_round(np.array(8), 100) > 1.5 * before

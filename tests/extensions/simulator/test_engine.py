"""A simulated engine and the links between engines, by exact times that follow by hand."""

import numpy as np
import pytest
from fit_acceptance import independent

from megatron_rlspec.extensions.migration.plans.tp_planner import Change, SwitchCosts
from megatron_rlspec.extensions.simulator.events import Clock
from megatron_rlspec.extensions.simulator.links import Links
from megatron_rlspec.extensions.simulator.run_engines import MoveCost, Resizing, run_engines
from megatron_rlspec.extensions.simulator.sim_engine import Durations, SimEngine, SimSample
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, Move, SpecConfig, SpecSchedule

FLAT = Roofline(weights_ms=10.0, token_ms=0.0, context_ms=0.0, drafter=0.1)  # a plain round takes 10 ms
K1 = SpecConfig(1)


def engine(name="e", policy=None, cost=FLAT, accept=0.0, **options) -> SimEngine:
    model = independent([accept])
    policy = policy or SpecSchedule.fixed(OFF)
    return SimEngine(name, Durations(cost, [OFF, K1]), policy, model, np.random.default_rng(0), **options)


def sample(name, length, prompt=100, group=-1) -> SimSample:
    return SimSample(name, prompt, length, group)


def test_prefill_goes_first_in_chunks_and_draws_the_first_token():
    """300 prompt tokens in chunks of 120 take three passes, each 5 ms and 0.1 ms a token; then 3 rounds."""
    one = engine(prefill=lambda tokens: 5 + 0.1 * tokens, chunk=120)
    trace = run_engines([sample("a", 4, 300)], [one], 10)
    assert trace.makespan_ms == pytest.approx(3 * 5 + 30 + 3 * 10)
    assert trace.rounds == 3 and trace.tokens == 4


def test_samples_of_a_prompt_share_its_prefill():
    alone = run_engines([sample("a", 2, 200, 0)], [engine(prefill=float)], 10).makespan_ms
    both = run_engines([sample("a", 2, 200, 0), sample("b", 2, 200, 0)], [engine(prefill=float)], 10).makespan_ms
    other = run_engines([sample("a", 2, 200, 0), sample("b", 2, 200, 1)], [engine(prefill=float)], 10)
    assert both == alone == 210 and other.makespan_ms == 410


def test_an_embedded_engine_reads_a_prompt_again_after_its_last_sample():
    """Each sample runs alone: 200 ms of prompt, and two rounds. SGLang's first token comes with the prefill."""
    pair = [sample("a", 2, 200, 0), sample("b", 2, 200, 0)]
    options = {"prefill": float, "max_running": 1}
    assert run_engines(pair, [engine(embedded=True, **options)], 10).makespan_ms == 2 * (200 + 20)
    pair = [sample("a", 2, 200, 0), sample("b", 2, 200, 0)]
    assert run_engines(pair, [engine(**options)], 10).makespan_ms == 200 + 10 + 10


def test_decoding_waits_for_the_prefill_of_others_unless_the_engine_is_embedded():
    def ends(embedded):
        samples = [sample("a", 3), sample("b", 3), sample("c", 3)]
        one = engine(prefill=lambda tokens: 50.0, chunk=100, embedded=embedded)
        return run_engines(samples, [one], 10).ended_ms

    assert ends(False) == {"a": 170, "b": 170, "c": 170}  # 3 prefills, 2 rounds
    assert ends(True) == {"a": 180, "b": 190, "c": 200}  # each step: a chunk, then a round


def test_a_full_cache_puts_the_shortest_sample_back_until_another_has_ended():
    one = engine(max_tokens=240, prefill=lambda tokens: 0.001 * tokens)
    trace = run_engines([sample("a", 60), sample("b", 40, 110)], [one], 100)
    assert trace.retracted == 1 and trace.tokens == 100
    assert trace.ended_ms["a"] == pytest.approx(59 * 10 + 0.21)  # as if it were alone
    assert trace.ended_ms["a"] < trace.ended_ms["b"] < 59 * 10 + 40 * 10
    assert one.free == 240  # nothing is left in the cache


def test_drafting_after_rounds_without_it_reads_what_was_missed():
    cost = Roofline(10.0, 1.0, 0.0, 0.1, switch_ms=3.0)  # the drafter reads a token in 0.1 ms

    class FromTheSixth(SpecRule):
        def choose(self, *args, **options):
            super().choose(*args, **options)
            self.rounds_ = getattr(self, "rounds_", 0) + 1
            self.catch_up = args[0] if self.rounds_ > 5 else 0
            return K1 if self.rounds_ > 5 else OFF

    plain, drafting = (float(ms) for ms in cost.grid([OFF, K1], np.array(1), np.array(100)))
    one = engine(policy=FromTheSixth([OFF, K1], cost), cost=cost)
    trace = run_engines([sample("a", 8)], [one], 10)  # the first token comes from the prefill
    assert trace.configs == {OFF: 5, K1: 2}
    assert trace.makespan_ms == pytest.approx(5 * plain + 2 * drafting + 3.0 + 5 * cost.catch_up_ms, rel=1e-3)


def test_a_sleeping_engine_has_lost_its_caches():
    one = engine()
    one.give([sample("a", 5), sample("b", 5)])
    one.step()
    left = one.sleep()
    assert [s.drawn for s in left] == [2, 2] and one.idle
    one.now = 100.0
    one.give(left)
    trace = run_engines([], [one], 10)
    assert trace.makespan_ms > 100 and one.tokens == 10


def test_transfers_on_one_way_share_it_and_others_do_not():
    def arrivals(*pairs):
        clock, seen = Clock(), {}
        links = Links(clock, 1.0)  # 1 MB takes 1 ms
        for i, (source, target, size) in enumerate(pairs):
            links.send(source, target, size * 1e6, lambda i=i: seen.update({i: round(clock.now, 6)}))
        clock.run()
        return seen

    assert arrivals(("a", "b", 4)) == {0: 4.0}
    assert arrivals(("a", "b", 4), ("c", "d", 4)) == {0: 4.0, 1: 4.0}
    assert arrivals(("a", "b", 4), ("a", "c", 4)) == {0: 8.0, 1: 8.0}  # one way out
    assert arrivals(("a", "c", 4), ("b", "c", 2)) == {1: 4.0, 0: 6.0}  # one way in; then the rest at full speed


class Once:
    """A planner that says one thing, once."""

    def __init__(self, said, nothing):
        self.said, self.nothing = said, nothing

    def plan(self, *_):
        said, self.said = self.said, self.nothing
        return said

    decide = plan


def test_a_source_decodes_on_while_a_cache_travels():
    """101 tokens at 1 kB a token and 1 MB/s take 101 ms: ten rounds at the source, then the rest, and 7 ms of pause."""
    moves = Once([Move("a", "b", ("s",), "kv")], [])
    a, b = engine("a"), engine("b")
    a.give([sample("s", 50)])
    cost = MoveCost(1000, 0.001, 7.0)
    trace = run_engines([], [a, b], 50, rebalancer=moves, every=1, cost=cost)
    assert len(trace.moves) == 1 and a.tokens > 12 and b.tokens > 30 and a.tokens + b.tokens == 50
    away = trace.makespan_ms - 49 * 10
    assert away == pytest.approx(7 + a.tokens - 3, abs=2)  # the rest of the cache, and the pause


def test_engines_do_not_decode_while_they_work_on_a_move():
    """One sample of 102 tokens moves after two rounds. Each engine works 3 ms, and 0.5 ms a token, for it."""
    moves = Once([Move("a", "b", ("s",), "kv")], [])
    a, b = engine("a", embedded=True), engine("b", embedded=True)
    a.give([sample("s", 50), sample("t", 40)])
    b.give([sample("u", 60)])
    trace = run_engines([], [a, b], 50, rebalancer=moves, every=1, cost=MoveCost(busy_ms=3.0, busy_token_ms=0.5))
    assert len(trace.moves) == 1
    busy = 3 + 0.5 * 102
    assert trace.ended_ms["t"] == pytest.approx(40 * 10 + busy, abs=1)
    assert trace.ended_ms["u"] == pytest.approx(60 * 10 + busy, abs=1)


def test_an_idle_target_works_on_a_move_too():
    def makespan(**busy):
        a, b = engine("a", embedded=True), engine("b", embedded=True)
        a.give([sample("s", 10)])
        moves = Once([Move("a", "b", ("s",), "kv")], [])
        return run_engines([], [a, b], 50, rebalancer=moves, every=1, cost=MoveCost(**busy)).makespan_ms

    assert makespan(busy_ms=50.0) == pytest.approx(makespan() + 2 * 50)  # source and target, one after the other


def test_a_move_without_room_stays_away():
    a, b = engine("a"), engine("b", max_tokens=50)
    a.give([sample("s", 20)])
    trace = run_engines([], [a, b], 50, rebalancer=Once([Move("a", "b", ("s",), "kv")], []), every=1)
    assert trace.refused == 1 and a.tokens == 20 and b.tokens == 0


@pytest.mark.parametrize("how", ["kv", "recompute"])
def test_a_change_of_the_size_waits_for_rounds_and_loses_no_sample(how):
    fast = Roofline(4.0, 0.0, 0.0, 0.1)
    fleet = {"big": engine("big", cost=fast, ranks=2, prefill=lambda tokens: 25.0)}
    change = Once(Change(2, (("s", "t"),), how, 0.0, 0.0, 0.0), None)
    costs = SwitchCosts(42.0, 1000, 0.01)  # caches: 0.1 ms a token
    a, b = engine("a"), engine("b")
    a.give([sample("s", 31)])
    b.give([sample("t", 21)])
    trace = run_engines([], [a, b], 50, every=2, resizing=Resizing(change, 1, lambda tp: [fleet["big"]], costs))
    (at, _, took), drawn = trace.changes[0], a.tokens
    assert took == pytest.approx(42 + (0.1 * (100 + drawn) if how == "kv" else 0))
    left = 31 - drawn - (0 if how == "kv" else 1)  # the prefill draws a token
    assert trace.makespan_ms == pytest.approx(at + took + (0 if how == "kv" else 25) + 4 * left)
    assert trace.tokens == 52 and set(trace.ended_ms) == {"s", "t"}

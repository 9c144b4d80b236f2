"""The simulator: exact makespans in easy cases, the live policies inside, equal traces, and the fits."""

from dataclasses import replace

import numpy as np
import pytest
from fit_acceptance import fit, independent, rounds_of

from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer, Transport
from megatron_rlspec.extensions.simulator.events import Clock
from megatron_rlspec.extensions.simulator.run_engines import MoveCost, run_engines
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, LengthModel
from megatron_rlspec.extensions.simulator.sim_engine import Durations, SimEngine, SimSample
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, Prompt, Sample, SpecConfig, SpecSchedule

FLAT = Roofline(weights_ms=10.0, token_ms=0.0, context_ms=0.0, drafter=0.1)
REAL = Roofline.of_hardware(3.35, 989.0, parameters=8e9, host_ms=1.0)
STEEP = Roofline(1.0, 0.3, 1e-4, 0.1, host_ms=0.1)  # batch matters from the third sample on
PLAIN = independent([0.0])
GOOD = AcceptanceModel(np.array([[0.9, 0.85, 0.8], [0.4, 0.3, 0.2]]), 0.8, np.array([0.3, 0.6, 0.8]))


def engine(name="e0", cost=FLAT, policy=None, acceptance=PLAIN, seed=0, **options) -> SimEngine:
    configs = [OFF, SpecConfig(1), SpecConfig(3)]
    policy = policy or SpecSchedule.fixed(OFF)
    options = {"embedded": True} | options  # one round a token, the first one included
    return SimEngine(name, Durations(cost, configs), policy, acceptance, np.random.default_rng(seed), **options)


def samples(lengths, group=1, prompt=16, acceptance=PLAIN, seed=0) -> list[SimSample]:
    shares, regimes = acceptance.begin(len(lengths), np.random.default_rng(seed))
    return [
        SimSample(f"s{i:04d}", prompt, int(n), i // group, float(shares[i]), int(regimes[i]))
        for i, n in enumerate(lengths)
    ]


def test_callbacks_run_in_the_order_of_time_and_of_making():
    clock = Clock()
    seen = []
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: (seen.append("first"), clock.at(0.0, lambda: seen.append("now"))))
    clock.at(1.0, lambda: seen.append("second"))
    clock.run()
    assert seen == ["first", "second", "now", "late"] and clock.now == 2.0


def test_plain_decoding_takes_one_round_a_token():
    round_ms = float(FLAT.grid([OFF], np.array(1), np.array(16))[0])
    trace = run_engines(samples([5, 9, 3]), [engine()], 100)
    assert trace.makespan_ms == pytest.approx(9 * round_ms)
    assert trace.tokens == 17 and trace.rounds == 9
    assert trace.ended_ms == {"s0000": 5 * round_ms, "s0001": 9 * round_ms, "s0002": 3 * round_ms}


def test_two_engines_run_at_once_and_a_full_one_makes_samples_wait():
    alone = run_engines(samples([50] * 4), [engine(max_running=2)], 100)
    both = run_engines(samples([50] * 4), [engine("a", max_running=2), engine("b", max_running=2)], 100)
    assert alone.makespan_ms == pytest.approx(2 * both.makespan_ms)
    assert both.utilisation == pytest.approx({"a": 1.0, "b": 1.0})


def test_a_prompt_takes_its_prefill():
    without = run_engines(samples([5]), [engine()], 100).makespan_ms
    assert run_engines(samples([5]), [engine(prefill=lambda tokens: 0.5 * tokens)], 100).makespan_ms == pytest.approx(
        without + 8.0
    )


def test_requests_are_taken_as_engines_run_dry():
    lengths = [10, 10, 500, 10, 10, 10, 10, 10, 10, 10]
    dealt = run_engines(samples(lengths), [engine("a", max_running=1), engine("b", max_running=1)], 1000)
    taken = run_engines(samples(lengths), [engine("a", max_running=1), engine("b", max_running=1)], 1000, in_flight=1)
    assert taken.makespan_ms < dealt.makespan_ms
    assert taken.tokens == dealt.tokens == sum(lengths)


@pytest.mark.parametrize("how", ["kv", "recompute"])
def test_moves_of_the_live_rebalancer_shorten_a_skewed_rollout(how):
    lengths = [400] * 48
    past = Lengths()
    past.observe([400] * 50, [False] * 50)

    def run(moves: bool):
        engines = [engine("a", STEEP), engine("b", STEEP)]
        for e, part in zip(engines, (samples(lengths), []), strict=True):
            e.give(part)
        planner = Rebalancer(STEEP, [OFF], Transport(50.0, 131072), modes=[how]) if moves else None
        return run_engines([], engines, 400, rebalancer=planner, lengths=past, cost=MoveCost(131072, 50.0, 20.0))

    moved, stayed = run(True), run(False)
    assert moved.moves and {move.how for _, move in moved.moves} == {how}
    assert moved.makespan_ms < stayed.makespan_ms and moved.tokens == stayed.tokens == 48 * 400


def test_the_live_rule_speculates_for_few_and_stops_for_many():
    def share_off(batch: int) -> float:
        rule = SpecRule([OFF, SpecConfig(1), SpecConfig(3)], REAL)
        e = engine(cost=REAL, policy=rule, acceptance=GOOD, max_running=1024)
        run_engines(samples([300] * batch, acceptance=GOOD), [e], 300)
        return e.rounds.get(OFF, 0) / sum(e.rounds.values())

    assert share_off(2) < 0.2 and share_off(1024) > 0.8


def test_one_seed_gives_one_trace():
    def run(seed):
        rule = SpecRule([OFF, SpecConfig(1), SpecConfig(3)], REAL)
        e = engine(cost=REAL, policy=rule, acceptance=GOOD, seed=seed)
        return run_engines(samples([100, 250, 60] * 5, acceptance=GOOD), [e], 300)

    assert run(1) == run(1)
    assert run(1).ended_ms != run(2).ended_ms


def test_an_acceptance_model_is_recovered_from_its_own_rounds():
    rng = np.random.default_rng(0)
    recorded = []
    for _ in range(60):
        (share,), (regime,) = GOOD.begin(1, rng)
        rounds = []
        for _ in range(80):
            rounds.append(GOOD.accept(regime, 3, rng.random()))
            regime = GOOD.advance(regime, share, rounds[-1] + 1, rng.random())
        recorded.append(rounds)
    fitted = fit(recorded, 3)
    assert np.abs(fitted.rates - GOOD.rates).max() < 0.08
    assert abs(fitted.persistence - GOOD.persistence) < 0.05
    assert abs(fitted.shares.mean() - GOOD.shares.mean()) < 0.08 and fitted.shares.std() > 0.08


def test_rounds_are_read_from_the_spans_of_a_sample():
    prompt = Prompt(0, np.arange(3))
    tokens = np.arange(3 + 10)
    # 0 | 1 2 3* | 4* | 5 6* | 7* | 8 9: the last round's two drafts end the sample
    spans = ((1, 3), (5, 6), (8, 10))
    sample = Sample("s", prompt, tokens, np.zeros(13), np.zeros(13), accepted_spans=spans)
    assert rounds_of(sample) == [2, 0, 1, 0]
    # 0 1* | 2* | 3 4 5* ...: the pass over the prompt drafts, too
    assert rounds_of(replace(sample, accepted_spans=((0, 1), (3, 5)))) == [0, 2, 0, 0, 0]


def test_lengths_pass_through_published_quantiles():
    published = LengthModel.of_quantiles((0.5, 378), (0.95, 1373))
    assert published.sigma == pytest.approx(0.784, abs=0.001)
    rng = np.random.default_rng(0)
    together = np.log(LengthModel(6.0, 0.8, 0.9).draw(500, 2, 1 << 20, rng))
    assert np.corrcoef(together.T)[0, 1] == pytest.approx(0.9, abs=0.05)


def test_a_large_rollout_draws_every_token():
    engines = [
        engine(
            f"e{i}",
            REAL,
            SpecRule([OFF, SpecConfig(1), SpecConfig(3)], REAL),
            GOOD,
            i,
            prefill=lambda tokens: 0.01 * tokens,
        )
        for i in range(8)
    ]
    drawn = LengthModel.of_quantiles((0.5, 378), (0.95, 1373)).draw(16, 8, 2048, np.random.default_rng(0)).ravel()
    trace = run_engines(samples(drawn, 8, acceptance=GOOD), engines, 2048)
    assert trace.tokens == drawn.sum()

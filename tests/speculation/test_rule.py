import json

import numpy as np
import pytest
from roofline_tables import roofline_table

from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError, Provenance
from megatron_rlspec.speculation.probing import FIRST_PROBE, LAST_PROBE, ProbeBudget
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.speculation.solver import chains, compile_schedule
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

CANDIDATES = chains((0, 1, 2, 3, 5))
H100 = Roofline.of_hardware(*HARDWARE["H100"])
H20 = Roofline.of_hardware(*HARDWARE["H20"])


class Engine:
    """Draws what rounds accept and charges what they cost; `rates` may be changed between runs."""

    def __init__(self, rule, cost=H100, rates=(0.7,) * 5, seed=0):
        self.rule, self.cost, self.rates = rule, cost, rates
        self.rng = np.random.default_rng(seed)
        self.chosen, self.ms, self.tokens, self.best_ms = [], 0.0, 0.0, 0.0

    def run(self, rounds, batch=4, length=1000):
        for _ in range(rounds):
            config = self.rule.choose(batch, batch * length)
            k = config.num_steps
            drafts = np.cumprod(self.rng.random((batch, k)) < np.array(self.rates[:k]), axis=1).sum(axis=1).tolist()
            self.rule.observe(config, drafts)
            self.chosen.append(config)
            self.ms += float(self.cost.grid([config], np.array(batch), np.array(batch * length))[0])
            self.tokens += batch + sum(drafts)
        return self.chosen[-rounds:]


def rule(cost=H100, **kwargs):
    return SpecRule(CANDIDATES, cost, start=SpecConfig(3), **kwargs)


@pytest.mark.parametrize("share", [0.01, 0.0005])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_useless_drafts_are_off_soon_and_probes_stay_within_their_share(batch, share):
    engine = Engine(rule(probe_share=share), rates=(0.0,) * 5)
    engine.run(60, batch)
    assert engine.chosen[-1] == OFF
    before = engine.ms
    late = engine.run(4000, batch)
    plain = 4000 * float(H100.grid([OFF], np.array(batch), np.array(batch * 1000))[0])
    assert -1e-9 < (engine.ms - before) / plain - 1 <= share * 4060 / 4000  # earned in all rounds so far
    if share == 0.01:
        assert {c for c in late if c != OFF} == {SpecConfig(1)}  # it does keep looking, as cheaply as it can
    assert engine.rule.report()["probe_share"] <= share
    assert engine.rule.acceptance.draws[0] < 500  # what was seen long ago no longer outweighs a probe


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_a_drafter_that_recovers_is_used_again(batch):
    engine = Engine(rule(), rates=(0.0,) * 5)
    engine.run(2000, batch)
    assert engine.chosen[-1] == OFF
    engine.rates = (0.85,) * 5
    assert any(c.num_steps >= 3 for c in engine.run(2 * LAST_PROBE, batch))
    late = engine.run(200, batch)
    assert sum(c.num_steps >= 3 for c in late) > 190


def test_without_a_probe_budget_off_is_for_good():
    engine = Engine(rule(probe_share=0.0), rates=(0.0,) * 5)
    engine.run(200)
    engine.rates = (0.9,) * 5
    assert set(engine.run(1000)) == {OFF}


def owing(share):
    """A rule of this cost, by a table in which the drafter reads what one round missed in `share` of the round."""
    provenance = Provenance("7b", "H100", "bfloat16", "none", "0", "2025-01-01", simulated=True)
    table = roofline_table(H100, CANDIDATES, (1, 8, 64), (128, 2048), provenance)
    round_ms = table.ms(OFF, 64, 64 * 512)
    return CostTable(provenance, table.rounds, catch_up_ms=share * round_ms / 64)


def test_probes_pay_for_what_the_drafter_has_to_catch_up_on():
    """It counts as probing; beyond `probe_share` there are no probes."""
    probes = []
    for share in (0.0, 0.006, 0.04):
        engine = Engine(SpecRule(CANDIDATES, owing(share)), rates=(0.0,) * 5)
        engine.run(100, batch=64)
        engine.rule.report()
        engine.run(4000, batch=64)
        report = engine.rule.report()
        assert report["probe_share"] <= 0.01
        assert report["catch_up_share"] <= min(share, 0.01)
        probes.append(report["probes"])
    assert 4 < probes[1] == probes[0] and probes[2] == 0, probes


def test_a_probe_lets_few_drafters_catch_up_and_a_switch_lets_all():
    """64 requests; the engine reports the missed tokens of each. Drafts of requests that are behind are ignored."""
    rule, behind, rng = SpecRule(CANDIDATES, owing(0.04)), np.zeros(64, int), np.random.default_rng(0)

    def missed(n):
        return int(np.sort(behind)[:n].sum())

    def run(rounds, rate):
        asked, read, chosen = [], 0, []
        for _ in range(rounds):
            config, order = rule.choose(64, 64 * 512, missed), np.argsort(behind, kind="stable")
            n = rule.catch_up
            read += missed(n)
            behind[order[:n]], behind[order[n:]] = 0, behind[order[n:]] + 1
            accepted = np.cumprod(rng.random((n, config.num_steps)) < rate, axis=1).sum(axis=1).tolist()
            rule.observe(config, accepted, 64 - n)
            asked += [n] if n else []
            chosen.append(config)
        return asked, read, chosen

    run(100, 0.0)
    rule.report()
    asked, read, _ = run(4000, 0.0)
    report = rule.report()
    assert len(asked) == report["probes"] > 20 and max(asked) < 64
    assert report["probe_share"] <= 0.01
    assert read < 0.08 * 64 * 4000 and report["catch_up_share"] <= 0.04 * 0.08
    asked, _, chosen = run(400, 0.9)
    assert chosen[-1].num_steps >= 3 and asked[-1] == 64 and not behind.any()
    assert rule.acceptance.rates[0] == pytest.approx(0.9, abs=0.05)


def test_nothing_is_probed_where_even_perfect_drafts_would_lose():
    assert set(Engine(SpecRule(CANDIDATES, H20), H20).run(3000, batch=192, length=128)) == {OFF}


def test_depth_improves_below_a_known_depth():
    """Acceptance at depth 2 and below appears while the rule sits at k = 1: only a probe can find it."""
    engine = Engine(rule(), rates=(0.6, 0.0, 0.0, 0.0, 0.0))
    engine.run(1500, 8)
    assert engine.chosen[-1] == SpecConfig(1)
    engine.rates = (0.6, 0.9, 0.9, 0.9, 0.9)
    engine.run(2000, 8)
    assert engine.chosen[-1].num_steps >= 3


def test_an_alternating_load_does_not_thrash():
    rates = (0.55,) * 5
    costly = Roofline(**{**H20.to_json(), "switch_ms": 200.0})
    for cost, most in ((H20, 2 * 60 + 2), (costly, 4)):
        engine = Engine(rule(cost), cost, rates)
        for _ in range(60):
            engine.run(10, batch=4)
            engine.run(10, batch=128)
        assert engine.rule.report()["switches"] <= most


def test_every_round_alternation_settles():
    engine = Engine(rule(H20), H20, (0.55,) * 5)
    for _ in range(400):
        engine.run(1, batch=4)
        engine.run(1, batch=128)
    assert engine.rule.report()["switches"] <= 4


def test_a_clear_gain_is_taken_within_rounds_a_small_one_later():
    quick = Engine(rule(), rates=(0.8,) * 5)
    quick.run(300, batch=4)
    now = quick.run(4, batch=512, length=16)  # the load jumps where drafting costs double
    assert now[-1] == OFF


def test_one_odd_round_moves_nothing():
    engine = Engine(rule(), rates=(0.8,) * 5)
    engine.run(300, batch=4)
    engine.rule.report()
    engine.run(1, batch=512, length=16)
    engine.run(50, batch=4)
    assert engine.rule.report()["switches"] == 0


def test_decisions_depend_on_observed_rounds_only(monkeypatch):
    def forbidden():
        raise AssertionError("a decision reads a clock")

    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(f"time.{name}", forbidden)
    engines = [Engine(rule()) for _ in range(2)]
    for engine in engines:
        engine.run(150, batch=3)
    monkeypatch.undo()
    assert engines[0].chosen == engines[1].chosen


def test_late_observations_are_attributed_to_their_own_configuration():
    p = rule()
    pending = []
    rng = np.random.default_rng(0)
    for _ in range(400):
        config = p.choose(8, 8000)
        pending.append((config, rng.binomial(1, 0.9, 8).tolist() if config.num_steps else []))
        if len(pending) > 2:
            p.observe(*pending.pop(0))
    assert p.acceptance.rates[0] == pytest.approx(0.9, abs=0.05)


def test_a_schedule_pins_every_decision_until_a_cost_comes():
    rates = [0.7] * 5
    schedule = compile_schedule(H100, rates, CANDIDATES)
    p = SpecRule(CANDIDATES, schedule=schedule)
    for batch in (1, 30, 200):
        assert p.choose(batch, batch * 1000) == schedule.choose(batch, batch * 1000)
    p.observe(SpecConfig(2), [0] * 50)
    assert p.choose(1, 1000) == schedule.choose(1, 1000)
    assert p.report()["rounds"]
    p.update(cost=H100)
    assert p.schedule is None and p.choose(1, 1000) in CANDIDATES
    p.update(schedule=SpecSchedule.fixed(SpecConfig(5)))
    assert {p.choose(b, b * 500) for b in (1, 8, 300)} == {SpecConfig(5)}


def test_json_carries_settings_and_learned_state(tmp_path):
    provenance = Provenance("7b", "H100", "bfloat16", "none", "0", "2025-01-01", simulated=True)
    table = roofline_table(H100, CANDIDATES, (1, 8, 64), (128, 1024), provenance)
    p = rule(table, probe_share=0.005)
    Engine(p, rates=(0.9, 0.2, 0.2, 0.2, 0.2)).run(300)
    again = SpecRule.from_json(json.loads(json.dumps(p.to_json())))
    assert again.acceptance.rates == p.acceptance.rates
    assert again.probe_budget.share == 0.005
    assert again.candidates == CANDIDATES
    assert again.choose(4, 4000) == p.choose(4, 4000)

    table.save(tmp_path / "t.json")
    by_path = SpecRule.from_json({"candidates": [[0, 0, 0], [3, 1, 4]], "table": str(tmp_path / "t.json"), "tp": 1})
    assert by_path.choose(1, 500) in (OFF, SpecConfig(3))
    pinned = SpecRule.from_json({"candidates": [[3, 1, 4]], "schedule": SpecSchedule.fixed(SpecConfig(3)).to_json()})
    assert SpecRule.from_json(pinned.to_json()).choose(9, 900) == SpecConfig(3)
    assert SpecRule.from_json(rule(H20).to_json()).cost == H20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"table": "none.json"}, "candidates"),
        ({"candidates": [[1, 1, 2]]}, "exactly one of"),
        ({"candidates": [[1, 1, 2]], "colour": 1}, "unknown field 'colour'"),
        ({"candidates": [[1, 1, 2]], "table": "none.json"}, "none.json: No such file"),
        ({"candidates": [[1, 1, 2]], "roofline": H20.to_json(), "start": [3, 1, 4]}, "start=k3 is not among"),
        ({"candidates": [[1, 1, 2], [1, 2, 3]], "roofline": H20.to_json()}, "mix topk"),
        ({"candidates": [[1, 1, 2]], "roofline": H20.to_json(), "probe_share": 1}, "probe_share=1"),
        ({"candidates": [], "roofline": H20.to_json()}, "must not be empty"),
        ({"candidates": [[9, 1, 10]], "roofline": H20.to_json(), "acceptance": Acceptance(3).to_json()}, "drafts 9"),
    ],
)
def test_bad_settings_get_one_line(data, message):
    with pytest.raises((ValueError, CostTableError), match=message):
        SpecRule.from_json(data)


def test_a_candidate_that_was_not_measured_is_refused():
    provenance = Provenance("7b", "H100", "bfloat16", "none", "0", "2025-01-01", simulated=True)
    table = roofline_table(H100, CANDIDATES, (1, 8), (128, 1024), provenance)
    with pytest.raises(CostTableError, match="holds no k7"):
        SpecRule([OFF, SpecConfig(7)], table)
    with pytest.raises(ValueError, match="batch=0"):
        rule().choose(0, 0)


def test_the_report_counts_and_starts_again():
    engine = Engine(rule(), rates=(0.8,) * 5)
    engine.run(100, batch=4)
    report = engine.rule.report()
    assert sum(report["rounds"].values()) == 100
    assert report["predicted_ms"] == pytest.approx(engine.ms)
    assert report["predicted_tokens"] == pytest.approx(engine.tokens, rel=0.1)
    assert 0 <= report["estimated_regret"] < 0.05
    assert json.dumps(report)
    assert engine.rule.report()["rounds"] == {}


def test_probes_start_after_the_first_interval():
    engine = Engine(rule(), rates=(0.0,) * 5)
    engine.run(40, 64)
    off_since = len(engine.chosen) - engine.chosen[::-1].index(next(c for c in engine.chosen[::-1] if c != OFF))
    assert set(engine.run(FIRST_PROBE - (40 - off_since) - 2, 64)) <= {OFF}


def test_where_all_draft_a_probe_is_of_all_that_run(monkeypatch):
    """Also of requests that join while it lasts."""
    for room in ("rule", "probing"):
        monkeypatch.setattr(f"megatron_rlspec.speculation.{room}.MARGIN", 0.2)
    p = rule()
    engine = Engine(p, rates=(0.6, 0.0, 0.0, 0.0, 0.0))
    engine.run(1500, 1)
    while engine.run(1, 1) != [SpecConfig(1)]:  # a probe goes on
        pass
    while engine.run(1, 1) == [SpecConfig(1)]:
        pass
    p.report()
    assert engine.run(1, 6) == [SpecConfig(2)] and p.catch_up == 6
    assert p.report()["predicted_tokens"] == pytest.approx(6 * p.acceptance.totals[2], rel=0.05)


def test_probes_of_a_useless_drafter_become_rare_and_a_forecast_wakes_them():
    """Over pushes, too: with a forecast that it still fails no probe is added; with one that it learnt, one at once."""
    engine = Engine(rule(), rates=(0.0,) * 5)
    engine.run(4000, batch=64)
    engine.rule.report()
    for _ in range(4):
        after = SpecRule(CANDIDATES, H100, acceptance=engine.rule.acceptance, forecast=[0.01])
        after.inherit(engine.rule)
        engine.rule = after
        engine.run(2000, batch=64)
    few = engine.rule.report()["probes"]
    assert few <= 1 and engine.rule.probe_budget.interval >= 4000
    engine.rates = (0.8,) * 5
    learnt = SpecRule(CANDIDATES, H100, acceptance=engine.rule.acceptance, forecast=[0.8] * 5)
    learnt.inherit(engine.rule)
    engine.rule = learnt
    assert engine.run(1, batch=64)[0].num_steps > 0
    assert engine.run(100, batch=64)[-1].num_steps > 0


@pytest.mark.parametrize(("drafts", "interval"), [(0.0, FIRST_PROBE << 15), (0.3, LAST_PROBE), (0.6, FIRST_PROBE)])
def test_the_nearer_a_probe_is_to_paying_off_the_sooner_the_next(drafts, interval):
    """0.5 accepted drafts pay off here. A probe is judged over all its rounds, not by one lucky draft."""
    budget = ProbeBudget(0.01)
    for _ in range(15):
        budget.started()
        for accepted in (1.0, *[(16 * drafts - 1) / 15] * 15) if drafts else (0.0,) * 16:
            budget.charge(SpecConfig(1), 1.0, 1.0, needed=1.5)
            budget.refund(SpecConfig(1), accepted, drafting=1, others=0)
    assert budget.interval == interval

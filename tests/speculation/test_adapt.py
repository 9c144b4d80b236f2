import pytest

from megatron_rlspec.speculation.adapt import Adapter
from megatron_rlspec.speculation.cost_rows import CostTableError, Provenance, RoundCost
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, RoundStats, SpecConfig


def adapter() -> Adapter:
    cost = Roofline.of_layers(12, ridge_tokens=256.0)
    return Adapter((0, 1, 3), "", cost, margin=0.01, probe_share=0.01, learn=False)


def test_engines_accept_the_rule_and_learn_on_from_it():
    mine = adapter()
    mine.observe([RoundStats(SpecConfig(3), 4, 400, rounds=50, ms=100.0, accepted=(0, 0, 0, 200))], [])
    rule = SpecRule.from_json({"candidates": [[0, 0, 0], [1, 1, 2], [3, 1, 4]], **mine.rule()})
    assert rule.acceptance.rates == mine.acceptance.rates and rule.choose(4, 400) == SpecConfig(3)


def test_a_table_of_several_sizes_counts_by_the_engines_size(tmp_path):
    rows = [
        RoundCost(tp, batch, batch * 100, config, ms)
        for tp, drafting in ((1, 9.0), (2, 1.1))  # ms of a round with three drafts: they pay at size 2 only
        for batch in (1, 4)
        for config, ms in ((OFF, 1.0), (SpecConfig(3), drafting))
    ]
    path = tmp_path / "sizes.json"
    CostTable(Provenance("m", "cpu", "float32", "e", "", ""), rows).save(path)

    def chosen(tp):
        mine = Adapter((0, 3), str(path), Roofline.of_layers(2), margin=0.01, probe_share=0.0, tp=tp)
        mine.observe([RoundStats(SpecConfig(3), 4, 400, rounds=50, ms=100.0, accepted=(0, 0, 0, 200))], [])
        return SpecRule.from_json({"candidates": [[0, 0, 0], [3, 1, 4]], **mine.rule()}).choose(4, 400)

    assert (chosen(1), chosen(2)) == (OFF, SpecConfig(3))
    with pytest.raises(CostTableError, match=r"holds tp=\[1, 2\], but this engine runs tp=4"):
        chosen(4)


def test_records_hold_shares_acceptance_and_what_rules_decided():
    stats = [
        RoundStats(SpecConfig(3), 4, 400, rounds=30, ms=90.0, accepted=(60, 0, 0, 60)),
        RoundStats(OFF, 64, 6400, rounds=10, ms=30.0, accepted=(640,)),
    ]
    report = {"predicted_ms": 2.0, "predicted_tokens": 5.0, "emitted_tokens": 6.0, "switches": 3, "probes": 1}
    values = adapter().observe(stats, [report | {"estimated_regret": 0.02}, {}])
    assert values["spec/share_k3"] == 0.75 and values["spec/share_off"] == 0.25
    assert values["spec/ms_per_round"] == pytest.approx(3.0) and 0.5 < values["spec/accept_1"] < 0.6
    assert values["spec/estimated_regret"] == pytest.approx(0.02) and values["spec/switches"] == 3
    assert "spec/predicted_tokens_per_second" not in values  # without a table there are no ms to promise


def test_a_rollout_of_rounds_without_a_time():
    """Only rounds right after a prefill, which have no time: acceptance is learned, shares are unknown."""
    learnt = adapter()
    found = learnt.observe([RoundStats(SpecConfig(3), 4, 400, rounds=0, ms=0.0, accepted=(0, 0, 0, 400))], [])
    assert found["spec/rounds"] == 0 and "spec/share_k3" not in found
    assert found["spec/accept_1"] > 0.9

"""The learning object that both loops hold: what a checkpoint keeps, and what is read of older ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rlspec.speculation.acceptance import Prediction
from megatron_rlspec.speculation.adapt import Adapter
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

TABLE = str(Path(__file__).parents[2] / "examples/cost_tables/h100-simulated.json")


def learning(deepest=3, table="", **options):
    return Learning(Adapter((0, 1, deepest), table, Roofline.of_layers(12), 0.01, 0.01), **options)


def rounds(k, *accepted):
    return RoundStats(SpecConfig(k), 8, 800, sum(accepted) // 8, 900.0, accepted)


def prediction(rate):
    return Prediction((1, 3), np.full((2, 3), 100.0), np.full((2, 3), 100.0 * rate))


def taught():
    made = learning(depth=3)
    made.observe([rounds(3, 200, 100, 50, 50)], [])
    made.expect(prediction(0.4))
    made.observe([rounds(3, 200, 100, 50, 50)], [])
    made.expect(prediction(0.5))
    return made


def test_learned_state_survives_a_checkpoint():
    former, later = taught(), learning(depth=3)
    assert later.restore(json.loads(json.dumps(former.state()))) == ""
    assert later.rule() == former.rule() and later.renews
    assert later.accept_length(SpecConfig(3)) == former.accept_length(SpecConfig(3))
    assert later.observe([rounds(3, 10, 0, 0, 90)], []) == former.observe([rounds(3, 10, 0, 0, 90)], [])
    assert later.state() == former.state()


@pytest.mark.parametrize("missing", [("table",), ("table", "prior"), ("table", "prior", "forecast"), "all"])
def test_checkpoints_of_earlier_releases_are_read(missing):
    """Each release has added a part; a run's checkpoint holds other things beside them."""
    state = json.loads(json.dumps(taught().state()))
    kept = {} if missing == "all" else {name: part for name, part in state.items() if name not in missing}
    later = learning(depth=3)
    assert later.restore(kept | {"pending": []}) == ""
    assert (later.adapter.acceptance.draws[0] > 100) == (missing != "all")


def test_a_checkpoint_that_drafted_fewer_steps_is_refused_in_one_line():
    """Engines refuse a rule whose acceptance has fewer depths than they draft."""
    former, later = learning(1), learning(3)
    former.observe([rounds(1, 200, 200)], [])
    assert "1 drafts, expected 3" in later.restore(former.state())
    SpecRule.from_json({"candidates": [[0, 0, 0], [3, 1, 4]], **later.rule()})


def test_the_times_of_rounds_scale_the_table_if_that_is_wanted():
    measured = CostTable.load(TABLE)
    slow = RoundStats(SpecConfig(3), 8, 800, 400, 2 * 400 * measured.ms(SpecConfig(3), 8, 800), (0, 0, 0, 3200))
    fixed, scaled = learning(table=TABLE), learning(table=TABLE, scale_table=True)
    for made in (fixed, scaled):
        made.observe([slow], [])
    assert fixed.rule()["table"] == TABLE
    ms = CostTable.from_json(scaled.rule()["table"]).ms(SpecConfig(3), 8, 800)
    assert ms == pytest.approx(2 * measured.ms(SpecConfig(3), 8, 800), rel=0.01)
    resumed = learning(table=TABLE, scale_table=True)
    resumed.restore(json.loads(json.dumps(scaled.state())))
    assert resumed.rule() == scaled.rule()


def test_the_accept_length_of_drafting_rounds_leaves_rounds_without_drafts_out():
    made = learning(3)
    plain = RoundStats(OFF, 8, 800, 100, 100.0, (800,))
    drafted = RoundStats(SpecConfig(3), 8, 800, 10, 20.0, (20, 0, 0, 60))
    assert made.observe([plain, drafted], [])["spec/accept_length"] == pytest.approx(1 + 3 * 60 / 80)
    assert "spec/accept_length" not in made.observe([plain], [])


def test_engines_without_a_rule_get_no_forecast():
    made = learning(depth=3, adaptive=False)
    found = made.expect(prediction(0.5))
    assert "predict/next_tokens_k3" in found and "spec/prior_1" not in found and not made.renews
    assert made.accept_length(SpecConfig(3)) == pytest.approx(1.875)

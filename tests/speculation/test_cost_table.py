import json
import math

import numpy as np
import pytest
from roofline_tables import HARDWARE, of_hardware

from megatron_rlspec.speculation.cost_table import CostTable, CostTableError, PrefillCost, Provenance, RoundCost
from megatron_rlspec.types import OFF, SpecConfig

CONFIGS = (OFF, SpecConfig(1), SpecConfig(3))
L40S = of_hardware(*HARDWARE["L40S"])
PROVENANCE = Provenance("tiny", "cpu", "float32", "sglang", "0.5.23", "2025-01-01")


def linear_ms(config: SpecConfig, batch: float, context: float) -> float:
    """A cost that is linear in batch and context, which interpolation must return exactly."""
    width = config.num_draft_tokens or 1
    return 2.0 + 0.01 * batch * width + 1e-4 * context + (0.0 if config.off else 0.3 + 0.2 * config.num_steps)


def rounds(batches=(1, 4, 16), lengths=(100, 400, 1600), tp=1, cost=linear_ms, spread=0.01):
    return [
        RoundCost(tp, b, b * length, c, cost(c, b, b * length), spread, 20)
        for c in CONFIGS
        for b in batches
        for length in lengths
    ]


def table(**kwargs) -> CostTable:
    return CostTable(PROVENANCE, rounds(**kwargs), [PrefillCost(1, 1, 10, 1.0), PrefillCost(1, 1, 110, 3.0)])


@pytest.mark.parametrize(("batch", "context"), [(1, 100), (4, 1600), (16, 16 * 1600)])
def test_a_measured_point_is_returned_as_it_is(batch, context):
    for config in CONFIGS:
        assert table().ms(config, batch, context) == pytest.approx(linear_ms(config, batch, context))


@pytest.mark.parametrize(("batch", "context"), [(2, 1400), (10, 9000), (64, 64 * 200), (2, 2 * 20_000)])
def test_elsewhere_the_fitted_roofline_leads(batch, context):
    def ms(config, batch, context):
        return float(L40S.grid([config], np.array(batch), np.array(context))[0])

    made = table(cost=ms)
    assert made.fit_error() < 0.01
    for config in CONFIGS:
        assert made.ms(config, batch, context) == pytest.approx(ms(config, batch, context), rel=0.03)
        assert table().ms(config, batch, context) == pytest.approx(linear_ms(config, batch, context), rel=0.1)


def test_rounds_that_verify_no_draft_tell_drafting_from_verifying():
    """Over the batches at which tokens are read, and those at which they are computed."""
    cost = of_hardware(*HARDWARE["H100"])

    def ms(config, batch, context, drafts=None):
        return float(cost.grid([config], np.array(batch), np.array(context), drafts and np.array(drafts))[0])

    points = {"batches": (1, 16, 64, 128, 256), "lengths": (100, 400)}
    deepest = SpecConfig(3)
    unverified = [
        RoundCost(1, batch, batch * length, deepest, ms(deepest, batch, batch * length, [0.0]))
        for batch in points["batches"]
        for length in points["lengths"]
    ]
    made = CostTable(PROVENANCE, rounds(cost=ms, **points), unverified=unverified)
    again = CostTable.from_json(json.loads(json.dumps(made.to_json())))
    assert again.unverified == made.unverified and len(made.at(1).unverified) == 10
    for batch in (1, 64, 200):
        drafts = np.array([0.0, 1.0, 2.5])
        expected = cost.grid([deepest], np.array(batch), np.array(batch * 300), drafts)
        assert made.grid([deepest], np.array(batch), np.array(batch * 300), drafts) == pytest.approx(expected, rel=0.04)
        each = made.grid(CONFIGS, np.array(batch), np.array(batch * 300), np.array([0.0, 1.0, 2.5]))
        assert each[2] == pytest.approx(expected[2], rel=0.04) and each.shape == (3,)
        plain = made.grid([OFF], np.array(batch), np.array(batch * 300), drafts)
        assert plain.shape == (3,) and set(plain) == {made.ms(OFF, batch, batch * 300)}


def test_leaving_the_grid_does_not_jump():
    bent = table(cost=lambda c, b, n: linear_ms(c, b, n) * (1 + 0.1 * math.sin(b)))
    edge, past = (bent.ms(SpecConfig(3), 16 + e, (16 + e) * 1600) for e in (0, 1e-6))
    assert edge == pytest.approx(past, rel=1e-5)


def test_grid_equals_single_answers():
    t = table()
    batch, context = np.array([[1], [7], [40]]), np.array([50, 5000])
    grid = t.grid(CONFIGS, batch, context)
    assert grid.shape == (3, 3, 2)
    for i, config in enumerate(CONFIGS):
        for j in range(3):
            for k in range(2):
                assert grid[i, j, k] == pytest.approx(t.ms(config, batch[j, 0], context[k]))


def test_the_file_holds_everything(tmp_path):
    t = CostTable(PROVENANCE, rounds() + rounds(tp=2), [PrefillCost(1, 1, 10, 1.0, 0.1, 5)], switch_ms=0.3)
    t.save(tmp_path / "deep" / "table.json")
    back = CostTable.load(tmp_path / "deep" / "table.json")
    assert (back.rounds, back.prefill, back.provenance) == (t.rounds, t.prefill, t.provenance)
    assert back.switch_ms == 0.3 and back.tps == (1, 2)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["table.json"]
    mixed = (lambda: back.ms(OFF, 1, 100), back.configs, back.batches, back.lengths, back.fit_error)
    for answer in mixed:
        with pytest.raises(CostTableError, match=r"holds tp=\[1, 2\]: choose one of them"):
            answer()


def _break(data, path, value):
    *outer, last = path
    for key in outer:
        data = data[key]
    if value is None:
        del data[last]
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "other", "not a cost table"),
        (("units", "time"), "s", "units"),
        (("rounds", 0, "ms"), float("nan"), "ms=nan"),
        (("rounds", 4), None, "hole at tp=1 batch=4"),
        (("rounds", 1, "context_tokens"), 100, "measured twice"),
        (("rounds", 0, "colour"), "red", "unknown field 'colour'"),
        (("switch_ms",), float("inf"), "switch_ms"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, path, value, message):
    data = table().to_json()
    _break(data, path, value)
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(CostTableError, match=message) as caught:
        CostTable.load(tmp_path / "t.json")
    assert "\n" not in str(caught.value) and "t.json" in str(caught.value)


def test_a_table_without_plain_decoding_is_refused():
    with pytest.raises(CostTableError, match="no plain-decoding row"):
        CostTable(PROVENANCE, [c for c in rounds() if not c.config.off])


def test_a_table_for_something_else_is_refused():
    with pytest.raises(CostTableError, match="this engine runs tp=4"):
        table().at(4)
    with pytest.raises(CostTableError, match="holds no k2"):
        table().ms(SpecConfig(2), 1, 100)


def test_prefill_is_interpolated_and_continued():
    assert table().prefill_ms(60) == pytest.approx(2.0)
    assert table().prefill_ms(210) == pytest.approx(5.0)
    with pytest.raises(CostTableError, match="no prefill row"):
        CostTable(PROVENANCE, rounds()).prefill_ms(5)

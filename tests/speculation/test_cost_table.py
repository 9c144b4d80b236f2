import json
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from roofline_tables import roofline_table

from megatron_rlspec.speculation import cost_table
from megatron_rlspec.speculation.cost_table import (
    CostTable,
    CostTableError,
    PrefillCost,
    Provenance,
    RoundCost,
)
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.speculation.solver import chains
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

CONFIGS = (OFF, SpecConfig(1), SpecConfig(3))
CHAINS = chains((0, 1, 2, 3, 5))
L40S = Roofline.of_hardware(*HARDWARE["L40S"])
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


@pytest.mark.parametrize(("batch", "context"), [(1, 100), (4, 1600), (3, 700), (10, 9000), (16, 16 * 1600)])
def test_interpolation_is_exact_where_the_cost_is_linear(batch, context):
    exact = table(spread=0.0)
    for config in CONFIGS:
        assert exact.ms(config, batch, context) == pytest.approx(linear_ms(config, batch, context))
        assert not exact.extrapolates(config, batch, context)


def test_outside_the_grid_the_fitted_roofline_is_used_and_reported():
    def ms(config, batch, context):
        return float(L40S.grid([config], np.array(batch), np.array(context))[0])

    made = table(cost=ms)
    for batch, context in [(64, 64 * 200), (2, 2 * 20_000)]:
        for config in CONFIGS:
            assert made.extrapolates(config, batch, context)
            assert made.ms(config, batch, context) == pytest.approx(ms(config, batch, context), rel=0.03)
    assert made.fit_error() < 0.01 and made.extrapolates(OFF, 1, 20)
    assert table().ms(OFF, 64, 64 * 200) == pytest.approx(linear_ms(OFF, 64, 64 * 200), rel=0.05)  # of another form


def test_leaving_the_grid_does_not_jump():
    bent = table(cost=lambda c, b, n: linear_ms(c, b, n) * (1 + 0.1 * math.sin(b)))
    edge, past = (bent.ms(SpecConfig(3), 16 + e, (16 + e) * 1600) for e in (0, 1e-6))
    assert edge == pytest.approx(past, rel=1e-5)


def test_one_row_or_one_point_still_answers():
    point = table(batches=(4,), lengths=(100,), spread=0.0)
    assert point.ms(OFF, 4, 400) == pytest.approx(linear_ms(OFF, 4, 400))
    assert point.extrapolates(OFF, 5, 500)
    assert point.ms(OFF, 8, 800) >= point.ms(OFF, 4, 400)


def test_a_context_shorter_than_any_measured_costs_what_the_shortest_does():
    """A slope fitted to noise must not choose between configurations where nothing was measured."""
    for config in CONFIGS:
        for batch in (1, 7, 64):
            shortest = min(table().lengths())
            assert table().ms(config, batch, batch * 1) == table().ms(config, batch, batch * shortest)
            assert table().extrapolates(config, batch, batch * 1)


def test_grid_equals_single_answers():
    t = table()
    batch, context = np.array([[1], [7], [40]]), np.array([50, 5000])
    grid = t.grid(CONFIGS, batch, context)
    assert grid.shape == (3, 3, 2)
    for i, config in enumerate(CONFIGS):
        for j in range(3):
            for k in range(2):
                assert grid[i, j, k] == pytest.approx(t.ms(config, batch[j, 0], context[k]))


def test_noise_that_makes_more_work_cheaper_is_repaired_and_reported():
    noisy = [replace(c, ms=1.0) if (c.batch, c.context_tokens) == (16, 16 * 400) else c for c in rounds()]
    t = CostTable(PROVENANCE, noisy)
    assert any("batch=16 context=6400 k3: 1.000 ->" in str(repair) for repair in t.repairs)
    assert not table().repairs
    for config in CONFIGS:
        at = [t.ms(config, b, b * 400) for b in range(1, 17)]
        assert np.all(np.diff(at) >= -1e-9)


def test_the_file_holds_everything(tmp_path):
    t = CostTable(
        PROVENANCE,
        rounds() + rounds(tp=2),
        [PrefillCost(1, 1, 10, 1.0, 0.1, 5)],
        switch_ms=0.3,
    )
    t.save(tmp_path / "deep" / "table.json")
    back = CostTable.load(tmp_path / "deep" / "table.json")
    assert (back.rounds, back.prefill, back.provenance) == (t.rounds, t.prefill, t.provenance)
    assert back.switch_ms == 0.3 and back.tps == (1, 2)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["table.json"]
    with pytest.raises(CostTableError, match=r"holds tp=\[1, 2\]: choose one of them"):
        back.ms(OFF, 1, 100)


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
        (("version",), 99, "version 99"),
        (("units", "time"), "s", "units"),
        (("rounds", 0, "ms"), float("nan"), "ms=nan"),
        (("rounds", 0, "ms"), -1.0, "ms=-1.0"),
        (("rounds", 4), None, "hole at tp=1 batch=4"),
        (("rounds", 1, "context_tokens"), 100, "measured twice"),
        (("rounds", 0, "num_draft_tokens"), 7, "hole|plain|OFF|verifies"),
        (("rounds", 0, "colour"), "red", "unknown field 'colour'"),
        (("rounds", 0, "batch"), None, "batch"),
        (("provenance", "model"), None, "model"),
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


def test_a_missing_file_and_text_that_is_not_json(tmp_path):
    with pytest.raises(CostTableError, match="No such file"):
        CostTable.load(tmp_path / "none.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CostTableError, match="not valid JSON"):
        CostTable.load(tmp_path / "x.json")


def test_a_table_for_something_else_is_refused():
    assert table().check(1).tps == (1,)
    with pytest.raises(CostTableError, match="this engine runs tp=4"):
        table().check(4)
    with pytest.raises(CostTableError, match="holds no k2"):
        table().ms(SpecConfig(2), 1, 100)


def test_calibration_follows_the_engine_and_ignores_one_slow_round():
    def seen(config, factor, n):
        return RoundStats(config, 4, 1600, n, n * factor * linear_ms(config, 4, 1600))

    t = table().calibrated([seen(OFF, 1.2, 3000), seen(SpecConfig(3), 1.5, 1000), seen(SpecConfig(3), 40.0, 1)])
    assert t.ms(OFF, 1, 100) / linear_ms(OFF, 1, 100) == pytest.approx(1.2, rel=0.01)
    assert t.ms(SpecConfig(3), 1, 100) / linear_ms(SpecConfig(3), 1, 100) == pytest.approx(1.5, rel=0.02)
    assert t.ms(SpecConfig(1), 1, 100) / linear_ms(SpecConfig(1), 1, 100) == pytest.approx(1.2, rel=0.01)
    assert table().calibrated([]).rounds == table().rounds


def test_prefill_is_interpolated_and_continued():
    assert table().prefill_ms(60) == pytest.approx(2.0)
    assert table().prefill_ms(210) == pytest.approx(5.0)
    with pytest.raises(CostTableError, match="no prefill row"):
        CostTable(PROVENANCE, rounds()).prefill_ms(5)


def noisy(spread, seed, systematic=0.0):
    """A profile of a roofline whose cells are off by `spread`, and each configuration by `systematic`."""
    roofline = Roofline.of_hardware(*HARDWARE["H20"])
    batches, lengths = (1, 4, 16, 64), (128, 1024)
    made = roofline_table(
        roofline, CHAINS, batches, lengths, PROVENANCE, noise=spread, systematic=systematic, seed=seed
    )
    batch = np.array(batches)[:, None]
    return made, batch, batch * np.array(lengths)[None], roofline


def errors(spread, systematic, shrink):
    """Return the mean squared error of the logarithms of cost ratios between configurations, over ten profiles."""
    found = []
    for seed in range(10):
        made, batch, context, roofline = noisy(spread, seed, systematic)
        with mock.patch.object(cost_table, "shrunk", cost_table.shrunk if shrink else lambda table, *_: table):
            error = np.log(made.grid(CHAINS, batch, context) / roofline.grid(CHAINS, batch, context))
        found.append(((error - error.mean(axis=0)) ** 2).mean())
    return float(np.mean(found))


def test_what_the_spread_cannot_tell_is_not_believed():
    assert errors(0.06, 0.0, shrink=True) < 0.3 * errors(0.06, 0.0, shrink=False)


def test_differences_that_the_spread_can_tell_are_kept():
    """Differences of 6 % between configurations, of which no roofline knows, in profiles with 1 % spread."""
    made, batch, context, _ = noisy(0.01, 0, systematic=0.06)
    raw = np.log([[[made._points[1, c][b, b * n] for n in (128, 1024)] for b in (1, 4, 16, 64)] for c in CHAINS])
    held = np.log(made.grid(CHAINS, batch, context))
    assert np.abs((raw - raw.mean(axis=0)) - (held - held.mean(axis=0))).max() < 0.02

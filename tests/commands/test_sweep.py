"""The sweep on an engine with known costs; test_profile.py measures the real one."""

import numpy as np
import pytest

from megatron_rlspec.commands.sweep import Bench, Sweep, configs_of, measure_grid, outward
from megatron_rlspec.config import ConfigError
from megatron_rlspec.speculation.cost_table import Provenance
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Sample, SpecConfig, SpecSchedule

PROVENANCE = Provenance("tiny", "none", "float32", "none", "0", "2025-01-01", simulated=True)
CONFIGS = (OFF, SpecConfig(0), SpecConfig(1), SpecConfig(3))
COST = Roofline(5.0, 0.001, 1e-6, 0.1, host_ms=1.0, pass_ms=0.1)


class Known:
    """An engine with a roofline's costs. It refuses every third depth; the round after a switch costs 0.5 ms more."""

    def __init__(self, most_tokens=200_000, noise=0.02):
        self.noise = noise
        configs = [list(c.numbers) for c in CONFIGS]
        self.description = {"speculative": True, "max_total_tokens": most_tokens, "max_running_requests": 256}
        self.description["configs"] = configs
        self.schedule = SpecSchedule.fixed(OFF)
        self.ragged = False  # then no draft is verified
        self.rng = np.random.default_rng(0)
        self.rounds = []
        self.points = []

    def describe(self):
        return self.description

    def set_schedule(self, schedule):
        self.schedule = schedule
        self.ragged = False

    def set_spec_rule(self, rule):
        [triple] = rule["candidates"]
        self.schedule = SpecSchedule.fixed(SpecConfig(*triple))
        self.ragged = rule["ragged"]

    def generate(self, requests, sampling):
        batch = len(requests)
        length = len(requests[0].prompt.tokens)
        if sampling.max_new_tokens > 8:
            self.points.append((batch, length))
        done = 0
        previous = None
        while done < sampling.max_new_tokens:
            context = batch * (length + done)
            config = self.schedule.choose(batch, context)
            ms = true_ms(config, batch, context, 0 if self.ragged else None) * (
                1 + self.noise * self.rng.standard_normal()
            )
            if previous not in (None, config):
                ms += 0.5 + (0.01 * 12 * batch if previous.off else 0)
            self.rounds.append((config, batch, context, None if previous is None else ms))
            previous = config
            done += 1 + min(config.num_steps, 2)
        self.rounds.append((previous, max(batch - 1, 1), context, 99.0))  # a straggler's last round
        return [Sample(r.id, r.prompt, r.prompt.tokens, *[np.zeros(length)] * 2) for r in requests]

    def recent_rounds(self):
        rounds, self.rounds = self.rounds, []
        return rounds


def true_ms(config, batch, context, drafts=None):
    verified = None if drafts is None else np.array([drafts])
    return float(COST.grid([config], np.array(batch), np.array(context), verified)[0])


def sweep_of(**settings):
    engine = Known(**settings)
    return Sweep(Bench(engine, configs_of(engine), 100), PROVENANCE)


def test_the_table_holds_the_costs_of_the_engine():
    sweep = sweep_of()
    assert measure_grid(sweep, (1, 4, 16), (64, 512), seconds=1e9) == "the whole grid"
    table = sweep.table()
    assert table.configs() == CONFIGS and table.batches() == (1, 4, 16)
    for cell in table.rounds:
        assert cell.ms == pytest.approx(true_ms(cell.config, cell.batch, cell.context_tokens), rel=0.03)
        assert 0 < cell.spread_ms / cell.ms < 0.05 and cell.samples >= 12
    assert {(cell.config, cell.batch) for cell in table.unverified} == {(SpecConfig(3), batch) for batch in (1, 4, 16)}
    for cell in table.unverified:
        expected = true_ms(cell.config, cell.batch, cell.context_tokens, drafts=0)
        assert cell.ms == pytest.approx(expected, rel=0.03) and expected < true_ms(SpecConfig(3), 16, 16 * 600)
    assert table.switch_ms == pytest.approx(0.5, abs=0.15)
    assert table.catch_up_ms == pytest.approx(0.01, rel=0.3)
    assert [prefill.tokens for prefill in table.prefill] == [64, 512]


def test_the_budget_stops_it_with_a_usable_table():
    sweep = sweep_of()
    lines = []
    end = measure_grid(sweep, (1, 4, 16), (64, 512), -1.0, lines.append)
    assert len(lines) == 1 and lines[0].startswith("batch 1, prompt 64: off ") and "1 of 6 points" in lines[0]
    assert len(sweep.prefill) == 1
    assert end == "stopped by the time budget before points of batches 1, 4, 16; use more --seconds"
    assert sweep.table().ms(OFF, 1, 100) > 0


def test_points_beyond_the_engine_are_left_out():
    sweep = sweep_of(most_tokens=4000)
    measure_grid(sweep, (1, 4, 64), (64, 512), seconds=1e9)
    assert max(batch * length for batch, length in sweep.steady) < 4000
    with pytest.raises(ConfigError, match="no point of batches"):
        measure_grid(sweep_of(most_tokens=4000), (64,), (512,), seconds=1e9)


def test_the_outermost_batches_come_first():
    assert outward([1, 4, 16, 64, 4]) == [1, 64, 4, 16]


def test_a_sweep_that_gives_no_table_is_refused():
    with pytest.raises(ConfigError, match="decode without a drafter"):
        Sweep(Bench(Known(), CONFIGS[1:], 100), PROVENANCE)
    silent = Known()
    silent.recent_rounds = lambda: []
    with pytest.raises(ConfigError, match="ran no round of off, k0, k1, k3"):
        Bench(silent, CONFIGS, 100).measure((1, 8))

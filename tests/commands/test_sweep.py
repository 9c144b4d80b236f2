"""The sweep on an engine with known costs; test_profile.py measures the real one."""

import numpy as np
import pytest

from megatron_rlspec.commands.profile import summary, validation
from megatron_rlspec.commands.sweep import Bench, Sweep, SweepError, configs_of, sweep
from megatron_rlspec.speculation.cost_table import CostTable, Provenance
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Sample, SpecConfig, SpecSchedule

PROVENANCE = Provenance("tiny", "none", "float32", "none", "0", "2025-01-01", simulated=True)
STEPS = (SpecConfig(0), SpecConfig(1), SpecConfig(3))
SMOOTH = Roofline(5.0, 0.001, 1e-6, 0.1, host_ms=1.0, pass_ms=0.1)
KINKED = Roofline(5.0, 0.1, 1e-6, 0.1)  # computing overtakes reading at 50 tokens


class Known:
    """An engine with a roofline's costs. It refuses every third depth; the round after a switch costs 0.5 ms more."""

    def __init__(self, cost, speculative=True, real_off=False, most_tokens=200_000, noise=0.02):
        self.cost = cost
        self.noise = noise
        self.said = {"speculative": speculative, "max_total_tokens": most_tokens, "max_running_requests": 256}
        runs = [OFF] * real_off + list(STEPS)
        self.said["configs"] = [[c.num_steps, c.topk, c.num_draft_tokens] for c in runs] if speculative else []
        self.schedule = SpecSchedule.fixed(OFF if not speculative else SpecConfig(1))
        self.rng = np.random.default_rng(0)
        self.rounds = []
        self.points = []

    def describe(self):
        return self.said

    def set_schedule(self, schedule):
        assert self.said["speculative"]
        self.schedule = schedule

    def generate(self, requests, sampling):
        batch = len(requests)
        length = len(requests[0].prompt.tokens)
        done = 0
        if sampling.max_new_tokens > 8:
            self.points.append((batch, length))
        previous = None
        while done < sampling.max_new_tokens:
            context = batch * (length + done)
            config = self.schedule.choose(batch, context) if self.said["speculative"] else OFF
            ms = float(self.cost.grid([config], np.array(batch), np.array(context))[0])
            ms *= 1 + self.noise * self.rng.standard_normal()
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


def benches(cost, **kwargs):
    plain = Known(cost, speculative=False, **kwargs)
    return [Bench(plain, [OFF], 100), Bench(Known(cost, **kwargs), STEPS, 100)]


def swept(cost, batches=(1, 4, 16), lengths=(64, 512), seconds=1e9, tolerance=0.5, **kwargs):
    run = Sweep(benches(cost), PROVENANCE, **kwargs)
    return run, sweep(run, batches, lengths, seconds=seconds, tolerance=tolerance)


def test_the_table_holds_the_engines_costs():
    run, end = swept(SMOOTH)
    table = run.table()
    assert end == "able to decide at each of them" and len(run.cells) == 6
    for cell in table.rounds:
        true = float(SMOOTH.grid([cell.config], np.array(cell.batch), np.array(cell.context_tokens))[0])
        assert cell.ms == pytest.approx(true, rel=0.03)
        assert 0 < cell.spread_ms / cell.ms < 0.05 and cell.samples >= 12
    assert table.switch_ms == pytest.approx(0.5, abs=0.15)
    assert [p.tokens for p in table.prefill] == [64, 512]
    errors = [abs(predicted / cell.ms - 1) for cell, predicted in run.validate(run.off_grid(4))]
    assert len(errors) == 16 and np.median(errors) < 0.03
    assert "error off the grid: median" in validation(run.validate(run.off_grid(2)))
    assert "batch" in summary(table, 1)


def test_points_are_added_where_the_cost_bends():
    straight, _ = swept(SMOOTH, batches=(1, 16, 256), lengths=(64,), tolerance=0.05)
    bent, _ = swept(KINKED, batches=(1, 16, 256), lengths=(64,), tolerance=0.05)
    assert len(straight.cells) == 3
    added = {batch for batch, _ in bent.cells} - {1, 16, 256}
    assert added and 4 in added
    coarse, _ = swept(KINKED, batches=(1, 16, 256), lengths=(64,))

    def worst(run):
        table = run.table()
        batch = np.arange(1, 200)
        own, true = (cost.grid([SpecConfig(3)], batch, batch * 130) for cost in (table, KINKED))
        return np.max(np.abs(own / true - 1))

    assert worst(bent) < 0.5 * worst(coarse)


def test_an_interrupted_sweep_continues_where_it_stopped(tmp_path):
    run = Sweep(benches(SMOOTH), PROVENANCE)
    path = tmp_path / "t.part"
    seen = []

    def keep(table):
        table.save(path)
        seen.append(len(table.rounds))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(run, (1, 4, 16), (64, 512), seconds=1e9, tolerance=0.5, keep=keep)
    again = benches(SMOOTH)
    resumed = Sweep(again, PROVENANCE, known=CostTable.load(path))
    assert len(resumed.cells) == 3
    sweep(resumed, (1, 4, 16), (64, 512), seconds=1e9, tolerance=0.5)
    assert sorted(resumed.cells) == [(1, 64), (1, 512), (4, 64), (4, 512), (16, 64), (16, 512)]
    assert not set(again[0].engine.points) & set(run.cells)
    with pytest.raises(SweepError, match="start again with --fresh"):
        Sweep([Bench(Known(SMOOTH, speculative=False), [OFF], 100)], PROVENANCE, known=CostTable.load(path))


def test_the_budget_stops_it_with_a_usable_table():
    run, end = swept(SMOOTH, seconds=-1.0)
    assert end.startswith("stopped by the time budget; it cannot decide at batches 1, 4, 16 (points not measured: 5).")
    assert len(run.cells) == 1 and run.table().ms(OFF, 1, 100) > 0


def test_noisy_points_are_measured_again_until_no_choice_can_lose_much():
    engine = Known(SMOOTH, real_off=True, noise=0.1)
    run = Sweep([Bench(engine, configs_of(engine), 100)], PROVENANCE)
    grid = (run, (1, 16), (64,))
    for point in ((1, 64), (16, 64)):
        run.add(point)
    first = {(cell.batch, cell.config): cell.samples for cells in run.cells.values() for cell in cells}
    said = sweep(*grid, seconds=-1.0, tolerance=0.03)
    assert "cannot decide at batches 1, 16 (points too noisy: 2); a choice may lose" in said and "at most 3%" in said
    assert sweep(*grid, seconds=1e9, tolerance=0.03) == "able to decide at each of them"
    assert not run.undecided(0.03) and min(map(engine.points.count, run.cells)) > 5
    for cells in run.cells.values():
        for cell in cells:
            true = float(SMOOTH.grid([cell.config], np.array(cell.batch), np.array(cell.context_tokens))[0])
            assert cell.ms == pytest.approx(true, rel=0.03) and cell.samples > 3 * first[cell.batch, cell.config]


def test_points_beyond_the_engine_are_left_out():
    small = [Bench(Known(SMOOTH, speculative=False), [OFF], 100), Bench(Known(SMOOTH, most_tokens=4000), STEPS, 100)]
    run = Sweep(small, PROVENANCE)
    sweep(run, (1, 4, 64), (64, 512), seconds=1e9, tolerance=0.01)
    assert max(batch * length for batch, length in run.cells) < 4000 and (64, 64) not in run.cells
    with pytest.raises(SweepError, match="no point of batches"):
        sweep(Sweep(small, PROVENANCE), (64,), (512,), seconds=1e9, tolerance=0.5)


def test_one_engine_is_enough_if_it_has_a_real_off():
    assert configs_of(Known(SMOOTH)) == list(STEPS)
    assert configs_of(Known(SMOOTH, speculative=False)) == [OFF]
    engine = Known(SMOOTH, real_off=True)
    run = Sweep([Bench(engine, configs_of(engine), 100)], PROVENANCE)
    sweep(run, (1, 16, 64), (64,), seconds=1e9, tolerance=0.5)
    assert run.table().configs() == (OFF, *STEPS)
    assert run.table().switch_ms == pytest.approx(0.5, abs=0.15)
    assert run.table().catch_up_ms == pytest.approx(0.01, rel=0.3)


def test_a_sweep_that_gives_no_table_is_refused():
    with pytest.raises(SweepError, match="decodes without a drafter"):
        Sweep([Bench(Known(SMOOTH), STEPS, 100)], PROVENANCE)
    with pytest.raises(SweepError, match="same configuration"):
        Sweep([*benches(SMOOTH), Bench(Known(SMOOTH), STEPS, 100)], PROVENANCE)
    silent = Known(SMOOTH)
    silent.recent_rounds = lambda: []
    with pytest.raises(SweepError, match="ran no round of k0, k1, k3"):
        Bench(silent, STEPS, 100).measure((1, 8), 40, 4)

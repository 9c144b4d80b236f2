import itertools

import numpy as np
import pytest
from roofline_tables import roofline_table

from megatron_rlspec.speculation.cost_table import Provenance
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.speculation.solver import chains, choices, compile_schedule, explain
from megatron_rlspec.types import OFF, SpecConfig

H100 = Roofline.of_hardware(*HARDWARE["H100"])
CANDIDATES = chains((0, 1, 2, 3, 5))
TREES = (*CANDIDATES, SpecConfig(3, 4, 8), SpecConfig(3, 4, 16), SpecConfig(5, 8, 32))


def brute_force(cost, rates, batch, context, candidates):
    """Tokens by enumerating what each depth does; independent of the solver's own sum."""

    def tokens(k):
        total = 0.0
        for outcome in itertools.product([0, 1], repeat=k):
            accepted = k if all(outcome) else outcome.index(0)
            total += (1 + accepted) * np.prod([r if o else 1 - r for r, o in zip(rates, outcome, strict=False)])
        return total

    ms = cost.grid(candidates, np.array(batch), np.array(context))
    return max(tokens(c.num_steps) / t for c, t in zip(candidates, ms, strict=True))


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.7, 0.95])
def test_the_choice_is_the_argmax(batch, rate):
    rates = [rate * 0.95**d for d in range(5)]
    best = choices(H100, rates, batch, 1000 * batch, CANDIDATES)[0]
    assert best.rate == pytest.approx(brute_force(H100, rates, batch, 1000 * batch, CANDIDATES))


def test_off_when_nothing_is_accepted_and_deep_when_everything_is():
    assert choices(H100, [0.0] * 5, 4, 4096, CANDIDATES)[0].config == OFF
    assert choices(H100, [0.99] * 5, 4, 4096, CANDIDATES)[0].config == SpecConfig(5)


def test_a_machine_with_little_arithmetic_turns_speculation_off_at_large_batches():
    """H20: as much bandwidth as an H200, a seventh of its arithmetic."""
    h20, h200 = (Roofline.of_hardware(*HARDWARE[name]) for name in ("H20", "H200"))
    rates = [0.8, 0.75, 0.7, 0.65, 0.6]
    assert choices(h20, rates, 64, 64 * 1000, CANDIDATES)[0].config == OFF
    assert choices(h200, rates, 64, 64 * 1000, CANDIDATES)[0].config != OFF


def test_trees_are_weighed_too():
    ranked = choices(H100, [0.5] * 5, 1, 1000, TREES)
    assert {o.config for o in ranked} == set(TREES)
    assert ranked[0].config.topk > 1  # verification is free at batch 1, so branches pay
    assert choices(H100, [0.5] * 5, 256, 256_000, TREES)[0].config.topk <= 1


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
def test_the_schedule_agrees_with_the_solver(rate):
    rates = [rate * 0.95**d for d in range(5)]
    schedule = compile_schedule(H100, rates, CANDIDATES, max_batch=128, lengths=(64, 8192))
    worst = 0.0
    for batch in (1, 2, 3, 7, 20, 64, 100, 128):
        for length in (64, 300, 1000, 5000, 8192):
            ranked = choices(H100, rates, batch, batch * length, CANDIDATES)
            chosen = next(o for o in ranked if o.config == schedule.choose(batch, batch * length))
            worst = max(worst, 1 - chosen.rate / ranked[0].rate)
    assert worst < 0.02
    assert len(schedule.batch_edges) < 64


def test_why_this_configuration():
    text = explain(H100, [0.8, 0.75, 0.7, 0.6, 0.5], 4, 4096, CANDIDATES)
    assert text.splitlines()[0].startswith("batch 4, context 4096 tokens: k")
    assert text.count("chosen") == 1 and text.count("would need") == len(CANDIDATES) - 1
    crowded = explain(Roofline.of_hardware(*HARDWARE["H20"]), [0.2] * 5, 256, 256 * 128, CANDIDATES)
    assert "more than its maximum of 6" in crowded


def test_a_simulated_profile_is_marked_and_differs_by_its_seed():
    provenance = Provenance("7b", "H100", "bfloat16", "none", "0", "2025-01-01", simulated=True)
    one, two, clean = (
        roofline_table(H100, CANDIDATES, (1, 8, 64), (128, 1024), provenance, systematic=s, noise=s, seed=seed)
        for s, seed in ((0.02, 1), (0.02, 2), (0.0, 0))
    )
    assert one.provenance.simulated
    assert clean.ms(SpecConfig(3), 8, 8192) == pytest.approx(
        float(H100.grid([SpecConfig(3)], np.array(8), np.array(8192))[0])
    )
    ratio = [one.ms(c, 8, 8192) / two.ms(c, 8, 8192) for c in CANDIDATES]
    assert np.std(ratio) > 0.005 and np.max(np.abs(np.log(ratio))) < 0.2


def test_the_rule_without_a_table_depends_on_depth_and_batch():
    rates = [0.6, 0.5, 0.4, 0.3, 0.2]
    deep = Roofline.of_layers(36)
    shallow = Roofline.of_layers(2)
    assert choices(deep, rates, 1, 1000, CANDIDATES)[0].config.num_steps >= 2
    assert choices(shallow, rates, 1, 1000, CANDIDATES)[0].config.num_steps <= 1
    assert choices(deep, rates, 256, 256_000, CANDIDATES)[0].config == OFF

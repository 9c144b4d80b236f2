"""What timings of rounds teach, and which of them do not count."""

import pytest

from megatron_rlspec.speculation.graphs import chains
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.round_times import RoundTimes
from megatron_rlspec.types import OFF, SpecConfig

CANDIDATES = chains((0, 1, 3))
SIZES = Roofline.of_layers(12)
TRUE = {OFF: 10.0, SpecConfig(1): 13.0, SpecConfig(3): 20.0}  # ms at batch 8


def run(times, config, rounds=3, batch=8, factor=1.0):
    times.enter(batch)
    for _ in range(rounds):
        times.timed(config, batch, 100 * batch, factor * TRUE[config])


def against_off(times, batch=8):
    ms = times.ms(batch, 100 * batch)
    return [value / ms[0] for value in ms]


def test_alternating_rounds_tell_the_differences():
    times = RoundTimes(SIZES, CANDIDATES)
    for _ in range(4):
        for config in CANDIDATES:
            run(times, config)
    assert against_off(times) == pytest.approx([1.0, 1.3, 2.0], rel=0.03)
    assert max(times.errors(0)) < 0.06


def test_an_interruption_and_the_first_round_after_a_change_do_not_count():
    times = RoundTimes(SIZES, CANDIDATES)
    for _ in range(3):
        for config in CANDIDATES:
            run(times, config)
    known = against_off(times)
    times.timed(OFF, 8, 800, 500.0)  # the first after a change
    times.timed(OFF, 8, 800, 80.0)  # interrupted
    times.timed(OFF, 8, 800, 10.0)
    times.timed(OFF, 8, 800, None)  # other work is in it
    assert against_off(times) == pytest.approx(known, rel=0.03)


def test_a_round_with_drafts_never_costs_less_than_a_plain_one():
    times = RoundTimes(SIZES, CANDIDATES)
    for _ in range(6):
        run(times, OFF, factor=3.0)  # a busy moment
        run(times, SpecConfig(3))
    assert min(against_off(times)) == 1.0

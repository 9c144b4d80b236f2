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


def test_rounds_of_one_configuration_say_nothing_of_the_others():
    times = RoundTimes(SIZES, CANDIDATES)
    before = against_off(times), times.errors(1)
    times.enter(8)
    before = against_off(times), times.errors(1)
    run(times, SpecConfig(1), 200)
    assert against_off(times) == pytest.approx(before[0], rel=0.05)
    assert times.errors(1) == pytest.approx(before[1], rel=0.2)


def test_a_machine_that_becomes_slower_is_slower_for_all():
    times = RoundTimes(SIZES, CANDIDATES)
    for _ in range(4):
        for config in CANDIDATES:
            run(times, config)
    run(times, SpecConfig(3), 60, factor=1.5)
    assert against_off(times) == pytest.approx([1.0, 1.3, 2.0], rel=0.1)


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


def test_what_is_wrong_of_one_is_likely_wrong_of_its_neighbours():
    """Drafts cost 1.6 times what is expected: one draft was timed, three were not."""
    times = RoundTimes(SIZES, chains((0, 1, 3, 5)))
    expected = times.ms(8, 800)
    for _ in range(4):
        for i, config in ((0, OFF), (1, SpecConfig(1))):
            for _ in range(3):
                times.timed(config, 8, 800, expected[i] * (1.6 if i else 1.0))
    found = times.ms(8, 800)
    assert found[1] / found[0] == pytest.approx(1.6 * expected[1] / expected[0], rel=0.05)
    assert found[2] / found[0] > 1.3 * expected[2] / expected[0]
    assert times.errors(0)[2] > 2 * times.errors(0)[1]


def test_neighbouring_batch_sizes_share_what_is_known():
    times = RoundTimes(SIZES, CANDIDATES)
    for _ in range(4):
        for config in CANDIDATES:
            run(times, config)
    times.enter(16)
    near = times.errors(0)[2]
    assert against_off(times, 16)[2] > 1.5
    times.enter(512)
    assert near < times.errors(0)[2]


def test_a_round_with_drafts_never_costs_less_than_a_plain_one():
    times = RoundTimes(SIZES, CANDIDATES)
    for _ in range(6):
        run(times, OFF, factor=3.0)  # a busy moment
        run(times, SpecConfig(3))
    assert min(against_off(times)) == 1.0

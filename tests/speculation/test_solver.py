"""The best configuration by a cost and acceptance rates: against enumeration."""

import itertools

import numpy as np
import pytest
from roofline_tables import HARDWARE, of_hardware

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.graphs import chains
from megatron_rlspec.speculation.solver import choices
from megatron_rlspec.types import SpecConfig

H100 = of_hardware(*HARDWARE["H100"])
CANDIDATES = chains((0, 1, 2, 3, 5))


def enumerated(steps, rates):
    """Tokens by enumerating what each depth does; independent of the package's sum."""
    total = 0.0
    for outcome in itertools.product((True, False), repeat=steps):
        chance = np.prod([rate if hit else 1 - rate for hit, rate in zip(outcome, rates, strict=True)])
        accepted = next((depth for depth, hit in enumerate(outcome) if not hit), steps)
        total += chance * (1 + accepted)
    return total


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_tokens_are_those_of_all_outcomes(steps):
    rates = [0.9, 0.7, 0.5, 0.3, 0.2][:steps]
    assert expected_tokens(SpecConfig(steps), rates) == pytest.approx(enumerated(steps, rates))


@pytest.mark.parametrize(("batch", "rate"), [(1, 0.9), (16, 0.6), (256, 0.1)])
def test_the_best_choice_has_the_most_tokens_per_ms(batch, rate):
    ranked = choices(H100, [rate], batch, 500 * batch, CANDIDATES)
    rates = {}
    for config in CANDIDATES:
        ms = float(H100.grid([config], np.array(batch), np.array(500 * batch))[0])
        rates[config] = expected_tokens(config, [rate]) / ms
    assert ranked[0].config == max(rates, key=rates.get)
    assert [choice.config for choice in ranked] == sorted(rates, key=rates.get, reverse=True)

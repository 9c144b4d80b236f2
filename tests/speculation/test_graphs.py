"""Graphs are captured where a candidate can be chosen."""

from __future__ import annotations

import numpy as np

from megatron_rlspec.speculation import graphs
from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig

CANDIDATES = graphs.chains((0, 1, 2, 3, 5))
LAYERS = 36


def test_no_acceptance_chooses_a_candidate_beyond_its_range():
    most = graphs.largest_batches(CANDIDATES, 256, LAYERS)
    cost = Roofline.of_layers(LAYERS, graphs.WIDEST_RIDGE)
    assert most[OFF] == 256 >= most[SpecConfig(1)] > most[SpecConfig(3)] > most[SpecConfig(5)] >= 1
    rng = np.random.default_rng(0)
    for batch in (1, 8, 20, 33, 60, 100, 180, 256):
        for _ in range(40):
            rates = rng.uniform(0, graphs.MOST_ACCEPTANCE) * np.cumprod([1.0, *rng.uniform(0.5, graphs.DECAY, 4)])
            ms = cost.grid(CANDIDATES, np.array(batch), np.array(batch))
            best = CANDIDATES[int(np.argmax([expected_tokens(c, rates) for c in CANDIDATES] / ms))]
            assert batch <= most[best], (batch, best, rates)


def test_ranges_end_at_the_next_captured_size():
    most = {OFF: 256, SpecConfig(1): 256, SpecConfig(3): 61, SpecConfig(5): 3}
    config = graphs.adaptive_config(most, 256)
    assert {int(start): slot["candidate_steps"] for start, slot in config.items()} == {
        1: [0, 1, 3, 5],
        4: [0, 1, 3],
        65: [0, 1],
    }

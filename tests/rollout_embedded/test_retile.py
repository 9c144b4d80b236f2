"""Switches of the tensor-parallel size on four gloo ranks: weights and caches bit for bit, texts, and their limits."""

from __future__ import annotations

import pytest
import retile_rank
from train_ranks import on_ranks


@pytest.mark.parametrize("gather", [False, True], ids=["exchange", "gather"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_are_those_of_a_model_loaded_at_the_new_size(tmp_path, gather, tied):
    assert on_ranks(4, retile_rank.weights, str(tmp_path / "meeting"), gather, tied) == [[]] * 4


@pytest.mark.parametrize("share", [True, False], ids=["shared", "alone"])
def test_keys_values_and_hidden_states_arrive_bit_for_bit(tmp_path, share):
    assert on_ranks(4, retile_rank.caches, str(tmp_path / "meeting"), share, 256) == [[]] * 4

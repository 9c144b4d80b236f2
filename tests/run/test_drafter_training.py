"""What a drafter learns from: a part of a step's samples."""

import pytest

from megatron_rlspec.run.drafter_training import chosen_samples


@pytest.mark.parametrize(
    ("lengths", "share", "expected"),
    [
        ([25] * 32, None, 32),  # a small step: all
        ([25] * 128, None, 82),  # the floor of 2,048 tokens
        ([1000] * 128, None, 32),  # plenty: a quarter
        ([100] * 128, 0.25, 32),
        ([100], 0.1, 1),
    ],
)
def test_a_small_step_teaches_the_drafter_all_its_samples(lengths, share, expected):
    chosen = chosen_samples(lengths, share, (1, 2))
    assert chosen.sum() == expected and set(chosen) <= {0, 1}
    assert (chosen == chosen_samples(lengths, share, (1, 2))).all()

"""Division of a rollout into mini-batches."""

import numpy as np
import pytest

from megatron_rlspec.run.batches import mini_batches
from megatron_rlspec.types import Group, Prompt


@pytest.mark.parametrize(
    ("sizes", "updates", "ends"),
    [
        ([3, 1, 2, 2], 1, [8]),
        ([3, 1, 2, 2], 2, [4, 8]),
        ([3, 1, 2, 2, 1], 2, [6, 9]),
        ([3, 1], 5, [3, 4]),  # a replay of a run with fewer prompts
    ],
)
def test_all_samples_of_a_prompt_are_in_one_mini_batch(sizes, updates, ends):
    groups = [Group(Prompt(i, np.zeros(1, np.int64)), [None] * size) for i, size in enumerate(sizes)]
    assert mini_batches(groups, updates) == [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

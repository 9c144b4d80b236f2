"""Old answers as drafts: what is kept, and how a new answer may begin."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rlspec.speculation.history import Answers, agreed


def test_the_last_steps_answers_are_kept_within_a_number_of_tokens():
    kept = Answers(most=10)
    kept.keep(7, 0, [np.arange(4)])
    kept.keep(7, 0, [np.arange(3)])  # the prompt came twice in this step
    kept.keep(8, 0, [np.arange(2)])
    assert [len(tokens) for tokens in kept.of(7)] == [4, 3]
    kept.keep(7, 1, [np.arange(5)])
    assert [len(tokens) for tokens in kept.of(7)] == [5] and kept.tokens == 7
    again = Answers(most=10)
    again.restore(kept.state())
    for one in (kept, again):
        one.keep(9, 1, [np.arange(4)])  # 8 is the oldest, though its id is not the lowest
        assert not one.of(8) and one.of(7) and one.tokens == 9
    assert [(prompt, step) for prompt, step, _ in again.state()] == [(7, 1), (9, 1)]
    kept.clear()
    assert not kept.of(7) and kept.tokens == 0


@pytest.mark.parametrize(
    ("answers", "shared"),
    [
        ([], []),
        ([[1, 2, 3]], []),
        ([[1, 2, 3], [1, 2, 4]], [1, 2]),
        ([[5, 1], [5, 2, 7, 9], [5, 2, 7, 8], [6, 2]], [5, 2, 7]),
        ([[5, 2], [5, 2], []], [5, 2]),
    ],
)
def test_the_beginning_that_answers_share_is_what_two_of_them_say(answers, shared):
    assert agreed([np.array(answer, np.int64) for answer in answers]).tolist() == shared

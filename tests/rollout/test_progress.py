"""Lines of a sample that is being generated: what they hold."""

import math

import pytest

from megatron_rlspec.rollout.sglang.http.progress import Progress, logprobs

CHUNK = 64


def lines_of(tokens, marks):
    """The lines of a sample that grows by chunks, as SGLang tells it: all of it, every time."""
    sent = Progress()
    found = []
    for n in range(CHUNK, tokens + 1, CHUNK):
        ids = list(range(n))
        entries = [(-float(i), i, None) for i in range(n)]
        found.append(sent.line(ids, entries, marks[:n], 1))
    return found


def test_rounds_are_those_of_all_tokens():
    marks = [0, *([1, 1, 0] * 100)]
    found = lines_of(256, marks)
    for i, line in enumerate(found, 1):
        assert line["rounds"] == sum(not mark for mark in marks[: i * CHUNK]) - 1


def test_marks_that_come_late_are_counted_then():
    sent = Progress()
    assert sent.line([1, 2], [(0.0,), (0.0,)], [0], 1)["rounds"] == 0
    assert sent.line([1, 2, 3], [(0.0,)] * 3, [0, 0, 0], 1)["rounds"] == 2
    assert sent.line([1, 2, 3], [(0.0,)] * 3, [0, 0, 0], 1) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_told(value):
    with pytest.raises(ValueError, match="the weights give a log-prob of"):
        logprobs([(-1.0,), (value,)])

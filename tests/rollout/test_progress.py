"""Lines of a sample that is being drawn: what they hold, and that no token is looked at twice."""

import json
import math

import numpy as np
import pytest

from megatron_rlspec.rollout.sglang.client import engine
from megatron_rlspec.rollout.sglang.http.progress import Progress, logprobs
from megatron_rlspec.types import Prompt, Request

CHUNK = 64


class Watched(list):
    """Counts the elements that are read."""

    touched = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        Watched.touched += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        Watched.touched += len(self)
        return super().__iter__()


def lines_of(tokens, marks):
    """The lines of a sample that grows by chunks, as SGLang tells it: all of it, every time."""
    sent = Progress()
    found = []
    for n in range(CHUNK, tokens + 1, CHUNK):
        ids, entries = Watched(range(n)), Watched((-float(i), i, None) for i in range(n))
        found.append(sent.line(ids, entries, Watched(marks[:n]), 1))
    return found


@pytest.mark.parametrize("tokens", [1024, 8192])
def test_every_token_is_looked_at_once(tokens):
    Watched.touched = 0
    found = lines_of(tokens, [0] * tokens)
    assert Watched.touched <= 4 * tokens  # tokens, log-probs, marks, and the marks that are counted
    assert [i for line in found for i in line["drawn"]["output_ids"]] == list(range(tokens))
    assert [p for line in found for p in line["drawn"]["logprobs"]] == [-float(i) for i in range(tokens)]


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


def test_the_client_keeps_lines_without_reading_those_before(monkeypatch):
    monkeypatch.setattr(engine, "runs", lambda marks: pytest.fail("reads all marks"))
    marks = [0, *([1, 0] * 200)]
    begun = None
    for line in lines_of(320, marks):
        begun = engine._longer(begun, json.loads(json.dumps({"id": "a", "version": "3", **line})))
    assert begun["output_ids"] == list(range(320)) and begun["drafted"] == marks[:320]
    assert begun["weight_versions"] == [{"version": 3, "start": 0, "end": 320}]


def test_no_body_has_more_tokens_than_the_limit(monkeypatch):
    monkeypatch.setattr(engine, "_TOKENS", 10)
    asked = [Request(f"r{i}", Prompt(i, np.arange(6)), 0) for i in range(3)]
    assert [len(part) for part in engine._parts(asked)] == [1, 1, 1]

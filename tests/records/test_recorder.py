"""Records of a run: lines on disk, a resume, and pieces of a response."""

import json
import math

import numpy as np
import pytest

from megatron_rlspec.files import FileError
from megatron_rlspec.records.recorder import Recorder, pieces, read_records
from megatron_rlspec.types import Prompt, Sample


def test_values_that_are_not_finite_are_null(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(0, {"policy/loss": math.nan, "policy/grad_norm": math.inf, "rollout/reward": 0.5})
    recorder.event("evaluation", "m", reward=math.nan, parts=[1.0, -math.inf])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert (record["policy/loss"], record["policy/grad_norm"], record["rollout/reward"]) == (None, None, 0.5)
    (event,) = read_records(tmp_path / "events.jsonl")
    assert event["reward"] is None and event["parts"] == [1.0, None]


def test_a_resume_drops_later_steps_and_torn_lines(tmp_path):
    recorder = Recorder(tmp_path)
    for step in range(3):
        recorder.write(step, {})
    recorder.event("a", "m")
    for name in ("metrics", "events"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 3, "ti')  # a killed run
    Recorder(tmp_path, first_step=2).event("b", "m")
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [0, 1]
    assert [event["kind"] for event in read_records(tmp_path / "events.jsonl")] == ["a", "b"]


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(FileError, match=r"m.jsonl:2: not valid JSON"):
        read_records(tmp_path / "m.jsonl")


def test_a_response_is_split_at_accepted_drafts():
    text = "añ b"  # the second character is two tokens
    tokens = np.array([7, *text.encode()])
    sample = Sample("s", Prompt(0, tokens[:1]), tokens, np.ones(6), np.zeros(6), accepted_spans=((0, 1), (2, 4)))
    found = pieces(sample, lambda ids: bytes(int(i) for i in ids).decode(errors="replace"))
    assert found == [("a", True), ("ñ ", True), ("b", False)]

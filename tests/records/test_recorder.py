"""Records of a run: lines on disk, on the terminal and in other places (`log.sinks`), and pieces of a response."""

import importlib.util
import json
import math
import sys

import numpy as np
import pytest

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.files import FileError
from megatron_rlspec.records import sinks
from megatron_rlspec.records.live import line
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


STEP = {
    "rollout/reward": 0.5,
    "rollout/failed_rewards": 0.0,
    "rollout/accept_length": 2.25,
    "rollout/groups_without_advantage": 0.25,
    "rollout/truncated": 0.0,
    "policy/loss": 0.0,
    "spec/share_k3": 0.75,
    "spec/share_off": 0.25,
    "spec/share_k5": 0.0,
    "seconds_generate": 3.0,
    "seconds_train": 1.0,
}


def test_a_step_is_one_line_of_what_changes():
    shown = "reward 0.500  no advantage 25%  accept length 2.25  generate 3.0 s  train 1.0 s  k3 75%, off 25%"
    assert line(4, 30, STEP, 125.0) == f"step 5/30  {shown}  2 min left"
    record = {"rollout/accept_length": math.nan, "policy/loss": 1.5, "seconds_train": 0.5}
    assert line(2, 9, record) == "step 3/9  loss 1.500  train 0.5 s"


TOKENS = np.arange(4)
SAMPLE = Sample("r0", Prompt(0, TOKENS[:2], text="1+1="), TOKENS, np.ones(4, np.float32), np.zeros(4, np.float32))
ROW = {"step": 0, "prompt": "1+1=", "response": "2", "label": "2", "reward": 1.0, "status": "finished"}
TEXTS = {name: str(value) for name, value in ROW.items()}


def log(names):
    return load(None, {"log.sinks": names}).log


def test_tensorboard_holds_the_records(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen = log("tensorboard")
    for first, steps in ((0, 3), (2, 2)):  # the second one resumes at step 2
        recorder = Recorder(tmp_path, first, lambda first=first: sinks.open_sinks(chosen, {}, tmp_path, first))
        for step in range(first, first + steps):
            recorder.samples(step, [SAMPLE], str)
            recorder.write(step, {"rollout/reward": 10.0 * first + step, "policy/loss": math.nan, "note": "text"})
        recorder.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["rollout/reward", "policy/loss"]
    assert {e.step for e in board.Tensors("sample/0/text_summary")} == {0, 1, 2, 3}
    assert [(e.step, e.value) for e in board.Scalars("rollout/reward")] == [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0)]


STAND_IN = """
calls = []
Error = type("Error", (Exception,), {})
Table = lambda columns, data: [dict(zip(columns, row)) for row in data]
class Run:
    def log(self, values, step): calls.append((step, values))
    def finish(self): calls.append("finish")
def init(**settings):
    calls.append(settings)
    return Run()
"""


def test_weights_and_biases_is_told_which_run_goes_on(tmp_path, monkeypatch):
    """By a stand-in, as the tests' environment lacks the package: what we tell it, and not what it makes of that."""
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("wandb", None))
    exec(STAND_IN, vars(module))
    monkeypatch.setitem(sys.modules, "wandb", module)
    starts = []
    for folder, first in ((tmp_path, 0), (tmp_path, 2), (tmp_path, 0), (tmp_path / tmp_path.name, 0)):
        [sink] = sinks.open_sinks(log("wandb"), {"train": {"steps": 4}}, folder, first)
        sink.write(first, {"rollout/reward": 0.5})
        sink.samples(first, [ROW])
        sink.close()
        settings, *calls = module.calls[-4:]
        assert calls == [(first, {"rollout/reward": 0.5}), (first, {"samples": [TEXTS]}), "finish"]
        assert settings["config"] == {"train": {"steps": 4}} and settings["resume"] == "allow"
        starts.append(settings["id"])
    assert starts[0] == starts[1] and len(set(starts)) == 3


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match="log.sinks=tensorboard,wandb: .* not installed here: pip install tensorboard"
    ):
        sinks.check_installed(log("tensorboard,wandb"))


def test_a_package_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise TypeError('no descriptors.\\nDowngrade protobuf')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="^log.sinks=wandb: it cannot be imported: TypeError: no descr.* protobuf$"):
        sinks.open_sinks(log("wandb"), {}, tmp_path, 0)

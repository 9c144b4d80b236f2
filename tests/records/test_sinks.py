"""`log.sinks`: what TensorBoard and Weights & Biases hold after a run, and what is refused."""

import importlib.util
import math

import pytest

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.records import sinks
from megatron_rlspec.records.recorder import Recorder


def log(names):
    return load(None, {"log.sinks": names}).log


def test_tensorboard_holds_the_records(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen = log("tensorboard")
    for first, steps in ((0, 3), (2, 2)):  # the second one resumes at step 2
        recorder = Recorder(tmp_path, first, lambda first=first: sinks.open_sinks(chosen, {}, tmp_path, first))
        for step in range(first, first + steps):
            recorder.write(step, {"rollout/reward": 10.0 * first + step, "policy/loss": math.nan, "note": "text"})
        recorder.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["rollout/reward", "policy/loss"]
    assert [(e.step, e.value) for e in board.Scalars("rollout/reward")] == [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0)]


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match="log.sinks=tensorboard,wandb: .* not installed here: pip install tensorboard"
    ):
        sinks.check(log("tensorboard,wandb"))


def test_a_package_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise TypeError('no descriptors.\\nDowngrade protobuf')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="^log.sinks=wandb: it cannot be imported: TypeError: no descr.* protobuf$"):
        sinks.open_sinks(log("wandb"), {}, tmp_path, 0)

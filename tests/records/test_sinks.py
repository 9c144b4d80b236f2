"""`log.sinks`: what TensorBoard, Weights & Biases and trackio hold after a run, and what is refused."""

import importlib.util
import math
import sys

import numpy as np
import pytest

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.records import sinks
from megatron_rlspec.records.recorder import Recorder
from megatron_rlspec.types import Prompt, Sample

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


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_trackers_hold_records_and_samples_and_go_on_after_a_resume(package, tmp_path, monkeypatch):
    """It needs the package, which the tests' environment does not have."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    module = pytest.importorskip(package)
    names = []
    [other] = sinks.open_sinks(log(package), {}, tmp_path / "other" / tmp_path.name, 0)  # of the same name
    other.close()
    for first in (0, 2):
        [sink] = sinks.open_sinks(log(package), {"train": {"steps": 4}}, tmp_path, first)
        names.append((sink._run.id, sink._run.name) if package == "wandb" else sink._run.name)
        sink.samples(first, [ROW])
        sink.write(first, {"rollout/reward": 0.5 + first})
        sink.close()
    assert names[0] == names[1]
    if package == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        [run] = [run for run in module.Api().runs("megatron_rlspec") if run.name == names[0]]
        rows = SQLiteStorage.get_logs("megatron_rlspec", run.name, run_id=run.id)
        assert [row["rollout/reward"] for row in rows if "rollout/reward" in row] == [0.5, 2.5]
        assert sum("samples" in row for row in rows) == 2


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


@pytest.mark.parametrize(("package", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_tracker_is_told_which_run_goes_on(package, key, tmp_path, monkeypatch):
    """By a stand-in, as the tests' environment lacks the packages: what we tell them, and not what they make of it."""
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(package, None))
    exec(STAND_IN, vars(module))
    monkeypatch.setitem(sys.modules, package, module)
    starts = []
    for folder, first in ((tmp_path, 0), (tmp_path, 2), (tmp_path, 0), (tmp_path / tmp_path.name, 0)):
        [sink] = sinks.open_sinks(log(package), {"train": {"steps": 4}}, folder, first)
        sink.write(first, {"rollout/reward": 0.5})
        sink.samples(first, [ROW])
        sink.close()
        settings, *calls = module.calls[-4:]
        assert calls == [(first, {"rollout/reward": 0.5}), (first, {"samples": [TEXTS]}), "finish"]
        assert settings["config"] == {"train": {"steps": 4}} and settings["resume"] == "allow"
        starts.append(settings[key])
    assert starts[0] == starts[1] and len(set(starts)) == 3


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

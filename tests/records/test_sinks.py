"""`log.sinks`: what TensorBoard and Weights & Biases hold after a run, and what is refused."""

import importlib.util
import json
import math
import struct
import time

import pytest

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.records import sinks
from megatron_rlspec.records.recorder import Recorder


def config(tmp_path, names):
    return load(None, {"model.path": "m", "data.path": "d", "train.run_dir": str(tmp_path), "log.sinks": names})


def test_tensorboard_holds_the_records(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen = config(tmp_path, "tensorboard")
    for first, steps in ((0, 3), (2, 2)):  # the second one resumes at step 2
        recorder = Recorder(tmp_path, first, lambda first=first: sinks.open_sinks(chosen, tmp_path, first))
        for step in range(first, first + steps):
            recorder.write(step, {"rollout/reward": 10.0 * first + step, "policy/loss": math.nan, "note": "text"})
        recorder.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["rollout/reward", "policy/loss"]
    assert [(e.step, e.value) for e in board.Scalars("rollout/reward")] == [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0)]


def test_without_sinks_the_records_are_written(tmp_path):
    recorder = Recorder(tmp_path, 0, lambda: sinks.open_sinks(config(tmp_path, ""), tmp_path, 0))
    recorder.write(0, {"rollout/reward": 1.0})
    recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["rollout/reward"] == 1.0
    assert not (tmp_path / "tensorboard").exists()


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match="log.sinks=tensorboard,wandb: .* not installed here: pip install tensorboard"
    ):
        sinks.check(config(tmp_path, "tensorboard,wandb"))


@pytest.mark.parametrize("names", ["mlflow", "wandb,wandb"])
def test_other_sinks_are_refused(tmp_path, names):
    with pytest.raises(ConfigError, match="log.sinks"):
        config(tmp_path, names)


def log_records(content):
    """Yield the records of a file in LevelDB's log format: blocks of 32 KiB; checksum, length and type of each part."""
    place = 7  # after wandb's own header
    record = b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="no wandb here")
def test_weights_and_biases_holds_the_records_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    chosen = config(tmp_path, "wandb")
    for first in (0, 2):
        opened = sinks.open_sinks(chosen, tmp_path, first)
        for step in range(first, first + 2):
            opened[0].write(step, {"rollout/reward": float(step)})
        opened[0].close()
    until = time.monotonic() + 30  # wandb's own process writes the files
    while len(found := written(tmp_path)) < 4 and time.monotonic() < until:
        time.sleep(0.2)
    identity = (tmp_path / "wandb_id").read_text()
    assert found == {step: (identity, float(step)) for step in range(4)}


def written(run_dir):
    """Return step -> (id of the run, reward) of what wandb wrote offline."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        identity = ""
        for content in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            identity = record.run.run_id or identity
            items = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "rollout/reward" in items:
                found[int(items["_step"])] = identity, json.loads(items["rollout/reward"])
    return found

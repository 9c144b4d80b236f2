"""`rlspec watch`: files that grow, are replaced or cut while they are read, and how it ends."""

import json
import math
import os
import subprocess
import sys
import threading
import time

import pytest

from megatron_rlspec.commands import watch
from megatron_rlspec.records.metrics import Recorder, RecordError


def record(step, **values):
    return json.dumps({"step": step, "time": 100.0 + step, "rollout/reward": 0.1 * step, **values}) + "\n"


def looks(*changes):
    """Return a `sleep` that makes one change after each look, and fails after the last."""
    waiting = iter(changes)
    return lambda seconds: next(waiting)()


def test_a_run_is_followed_to_its_end(tmp_path, monkeypatch, capsys):
    """The directory comes later; lines come in parts; a resumed run rewrites its records; the end is written last."""
    run = tmp_path / "run"
    steps = run / "metrics.jsonl"

    def begin():
        run.mkdir()
        (run / "config.json").write_text('{"train": {"steps": 4}}')
        (run / "process.jsonl").write_text('{"kind": "start"}\n')
        steps.write_text(record(0) + record(1) + record(2)[:20])

    def resume():  # from the checkpoint after step 0, as `Recorder` does: another file in its place
        (run / "new").write_text(record(0) + record(1, time=200.0))
        (run / "new").rename(steps)

    def more():
        with steps.open("a") as file:
            file.write(record(2, time=201.0) + record(3, time=202.0))

    def end():
        (run / "process.jsonl").write_text('{"kind": "start"}\n{"kind": "end"}\n')

    assert watch.main([str(run)], looks(lambda: None, begin, resume, more, end)) == 0
    out, err = capsys.readouterr()
    assert err == f"rlspec watch: {run}: no such directory yet; waiting (Ctrl-C ends this)\n"
    assert [line.split("  ")[0] for line in out.splitlines()[:-1]] == [f"step {n}/4" for n in (1, 2, 2, 3, 4)]
    assert out.splitlines()[-1] == f"{run}: the run has ended after 4 steps"


def test_events_are_shown_once(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(record(0))
    events = tmp_path / "events.jsonl"
    events.write_text('{"kind": "health", "message": "engine-1: drop"}\n')

    def more():
        with events.open("a") as file:
            file.write('{"kind": "push", "message": "repeated"}\n')

    def end():
        (tmp_path / "process.jsonl").write_text('{"kind": "end"}\n')

    assert watch.main([str(tmp_path)], looks(lambda: None, more, end)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[health] engine-1: drop", "[push] repeated"]


def test_a_pipe_is_refused_and_does_not_block(tmp_path):
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(RecordError, match=f"{name}: expected a regular file, found a pipe"):
            watch.main([str(tmp_path)])
        (tmp_path / name).unlink()
        (tmp_path / name).write_text("")


@pytest.mark.parametrize(
    "values",
    [
        {"rollout/reward": 10**400},
        {"seconds_train": math.nan, "seconds_push": math.inf, "seconds_generate": -1},
        {"time": math.nan},
        {"time": 1e300},
        {"spec/share_\x1b[2J": 0.5},
    ],
    ids=lambda values: next(iter(values))[:20].replace("\x1b", "escape"),
)
def test_edited_records_neither_fail_nor_drive_the_terminal(tmp_path, capsys, values):
    (tmp_path / "metrics.jsonl").write_text(record(0) + record(1, **values))
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "[red]", "message": "\x1b]0;mine\x07[/bold]"}) + "\n")
    (tmp_path / "config.json").write_text('{"train": {"steps": 1%s}}' % ("0" * 300))
    (tmp_path / "process.jsonl").write_text('{"kind": "end"}\n')
    assert watch.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step 2" in out and "\x1b" not in out


@pytest.mark.parametrize("step", ["-1", "1.5", "true"])
def test_a_step_that_is_no_count_is_one_line(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    with pytest.raises(RecordError, match="expected an object with a number `step`"):
        watch.main([str(tmp_path)])


def test_a_file_is_no_run(tmp_path, capsys):
    (tmp_path / "f").write_text("")
    with pytest.raises(SystemExit) as stop:
        watch.main([str(tmp_path / "f")])
    assert stop.value.code == 2 and "it is a file; expected a run directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_follows_another_one(tmp_path):
    """The records of a `Recorder`, written while the command reads them."""
    command = [sys.executable, "-m", "megatron_rlspec.cli", "watch", str(tmp_path / "run"), "--every", "0.05"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def write():
        recorder = Recorder(tmp_path / "run")
        recorder.started(0)
        for step in range(20):
            recorder.write(step, {"rollout/reward": 0.5})
            time.sleep(0.1)
        recorder.ended(20)
        recorder.close()

    writing = threading.Thread(target=write)
    writing.start()
    out, err = following.communicate(timeout=120)
    writing.join()
    assert following.returncode == 0, err
    assert [line.split("/")[0] for line in out.splitlines()[:-1]] == [f"step {n + 1}" for n in range(20)]

"""One run at a time has a run directory, and none once its process has ended."""

import os
import signal
import subprocess
import sys

import pytest

from megatron_rlspec.config import ConfigError, load
from megatron_rlspec.config.run_dir import claimed
from megatron_rlspec.records.clock import Clock
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run.recording import Records

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from megatron_rlspec.config.run_dir import claimed
with claimed(Path(sys.argv[1]), True):
    started = subprocess.Popen(["sleep", "600"], close_fds=False)
    print(started.pid, flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_refused_until_the_first_ones_process_has_ended(tmp_path):
    run_dir = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE, text=True)
    children = [int(pid) for pid in holder.stdout.readline().split()]
    try:
        for resume in (False, True):
            with pytest.raises(ConfigError) as told, claimed(run_dir, resume):
                pass
            assert f"process {holder.pid} on " in str(told.value) and "another run goes on" in str(told.value)
        assert [path.name for path in run_dir.iterdir()] == [".lock"]
        holder.kill()
        holder.wait()
        with claimed(run_dir, True):  # what it had started lives
            assert [os.kill(pid, 0) for pid in children] == [None]
            (run_dir / "x").touch()
        assert [path.name for path in run_dir.iterdir()] == ["x"]
    finally:
        holder.kill()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        holder.communicate()


def test_nothing_is_left_of_a_run_that_wrote_nothing(tmp_path, monkeypatch):
    with claimed(tmp_path / "a/run", False), pytest.raises(ConfigError), claimed(tmp_path / "a/run", False):
        pass
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "1")  # rank 0 has it
    with claimed(tmp_path / "run", False):
        assert not (tmp_path / "run").exists()


def test_a_resume_without_a_checkpoint_says_which_records_it_drops(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    config = load(None, {"train.run_dir": str(tmp_path), "train.resume": "true"})
    Records(config, Clock(), 0, is_rank0=True).close()
    assert "the run begins anew, and the records of 2 steps are dropped" in capsys.readouterr().err
    Records(config, Clock(), 0, is_rank0=True).close()
    assert len(read_records(tmp_path / "events.jsonl")) == 1

"""Engines that die or hang during a rollout: no sample is lost or doubled, or the run stops and can be resumed."""

import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from short_run import finish, run, train

from megatron_rlspec.records.recorder import read_records

LOSING = Path(__file__).parent / "losing_run.py"
WATCHED = ("rollout/samples", "rollout/reward", "rollout/response_tokens", "rollout/longest_response")
SGLANG = {"rollout__max_new_tokens": 96, "rollout__timeout_seconds": 10, "train__steps": 4, "train__eval_prompts": 1}
EMBEDDED = {"rollout__engine": "embedded", "tail__every": 4, "train__steps": 4}


def drawn(run_dir: Path) -> list[list[float]]:
    """Return numbers about every step's samples, which are equal if the text is equal."""
    return [[record[name] for name in WATCHED] for record in read_records(run_dir / "metrics.jsonl")]


def stopped(process: subprocess.Popen) -> str:
    """Return the one line of a run that stopped by itself."""
    output, _ = process.communicate(timeout=840)
    assert process.returncode == 1, output[-3000:]
    (line,) = [line for line in output.splitlines() if line.startswith("rlspec:")]
    return line


@pytest.mark.slow
def test_without_any_engine_the_run_stops_with_a_checkpoint(start, tmp_path):
    """The third step's samples are generated beside the second step, which is finished before the stop."""
    options = EMBEDDED | {"rollout__staleness": 1}
    line = stopped(train(start, tmp_path, program=LOSING, train__save_every=0, **options))
    assert line.startswith(
        "rlspec: no engine is left; the last one failed with: embedded engine: closed; the last good "
    )
    assert line.endswith("checkpoints/step-000002") and Path(line.split()[-1]).is_dir()
    run(start, tmp_path, train__resume="true", **options)
    # The step that was training when the last engine was lost has its record, without the push that did not happen.
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert [record["rollout/samples"] for record in records] == [16.0] * 4
    assert ["push/seconds" in record for record in records] == [True, False, True, True]


@pytest.mark.slow
def test_the_only_engine_is_restarted_and_the_run_continues(start, tmp_path, monkeypatch):
    """A restarted engine has the weights of model.path, so its samples show that it received a push before."""
    options = EMBEDDED | {"ranks": 2}
    run(start, tmp_path / "whole", **options)
    line = stopped(train(start, tmp_path / "ended", program=LOSING, **options))
    assert line.endswith("ended/checkpoints/step-000002")
    run(start, tmp_path / "ended", train__resume="true", **options)
    monkeypatch.setenv("BACK", "1")
    finish(train(start, tmp_path / "lost", program=LOSING, **options))
    assert drawn(tmp_path / "lost") == drawn(tmp_path / "ended") == drawn(tmp_path / "whole")
    for name, restarts in {"whole": [0.0] * 4, "lost": [0.0, 0.0, 1.0, 0.0]}.items():
        assert [r["engine/restarts"] for r in read_records(tmp_path / name / "metrics.jsonl")] == restarts
    told = [e["message"] for e in read_records(tmp_path / "lost/events.jsonl") if e["kind"] == "engine"]
    assert told == [
        "embedded: left out, 0 remain: embedded engine: closed; restart 1 of 3 begins",
        "embedded: started again, 1 serve",
    ]


def engines(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "serve" in child.cmdline()]


def during_rollout(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until that step's samples are being drawn."""
    deadline = time.monotonic() + 600
    while len(read_records(run_dir / "metrics.jsonl")) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-3000:]
        time.sleep(0.02)
    time.sleep(0.3)


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    finish(train(start, run_dir, **SGLANG))
    return run_dir


@pytest.mark.slow
def test_the_other_engine_draws_the_samples_of_a_silent_one(start, undisturbed, tmp_path):
    """Samples are position-keyed, so they do not depend on the engine: every step equals that of an undisturbed run."""
    process = train(start, tmp_path, rollout__engines=2, **SGLANG, rollout__restarts=0)
    during_rollout(tmp_path, 1, process)
    engines(process)[0].send_signal(signal.SIGSTOP)
    finish(process)
    assert drawn(tmp_path) == drawn(undisturbed)
    (event,) = [event for event in read_records(tmp_path / "events.jsonl") if event["kind"] == "engine"]
    assert "engine-0: left out, 1 remain:" in event["message"] and "silent for 10 s" in event["message"], event
    # It was lost in a rollout, not in a push: in the middle of an answer, or on a busy machine before its first line.
    assert re.search("generate (broke off|failed)", event["message"]), event


@pytest.mark.slow
def test_a_lost_engine_is_started_again_pushed_to_and_draws_the_same(start, undisturbed, tmp_path):
    process = train(start, tmp_path, **SGLANG)
    during_rollout(tmp_path, 2, process)
    engines(process)[0].kill()
    finish(process)
    assert drawn(tmp_path) == drawn(undisturbed)
    assert sum(record["engine/restarts"] for record in read_records(tmp_path / "metrics.jsonl")) == 1
    lost, back = [e["message"] for e in read_records(tmp_path / "events.jsonl") if e["kind"] == "engine"]
    assert lost.startswith("engine-0: left out, 0 remain:") and "ended with code -9" in lost
    assert lost.endswith("restart 1 of 3 begins") and back == "engine-0: started again, 1 serve"
    assert (tmp_path / "logs/engine-0.log").exists() and (tmp_path / "logs/engine-0.1.log").exists()

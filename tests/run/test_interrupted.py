"""Runs that get a signal, or whose launcher is killed: one line, a checkpoint, and no process left behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from short_run import run, train

from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run.checkpoints import Checkpoints

OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1, "train__save_every": 0}
STEPS = 60
WATCHED = ("rollout/reward", "rollout/response_tokens", "policy/loss", "policy/grad_norm", "drafter/objective")


def records(run_dir: Path) -> list[list[float]]:
    return [[record[name] for name in WATCHED] for record in read_records(run_dir / "metrics.jsonl")]


def reach(process: subprocess.Popen, run_dir: Path, steps: int) -> list[psutil.Process]:
    """Wait for this number of records; return the run's processes."""
    deadline = time.monotonic() + 840
    while len(read_records(run_dir / "metrics.jsonl")) < steps:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-3000:]
        time.sleep(0.005)
    return psutil.Process(process.pid).children(recursive=True)


def told(process: subprocess.Popen, code: int | None, processes: list[psutil.Process], count: int = 1) -> str:
    """Return the one line of a run that a signal ended, or `count` lines; no traceback and no process is left."""
    output, _ = process.communicate(timeout=840)
    assert process.returncode in ({1, 143} if code is None else {code}), output[-3000:]
    assert "Traceback (most recent call last)" not in output, output[-3000:]
    lines = [line for line in output.splitlines() if line.startswith("rlspec:")]
    assert len(lines) == count, output[-3000:]
    assert_gone(processes)
    return "\n".join(lines)


def assert_gone(processes: list[psutil.Process], seconds: float = 10) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], alive


def ranks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes of ranks, in order."""
    found = {}
    for process in processes:
        command = process.cmdline()
        if "megatron_rlspec.cli" in command and "serve" not in command and "RANK" in process.environ():
            found[int(process.environ()["RANK"])] = process
    return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize(("delay", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM), (3, signal.SIGINT)])
def test_a_signal_before_the_first_step(start, tmp_path, number, delay):
    process = train(start, tmp_path / "run", **OPTIONS, train__steps=STEPS)
    deadline = time.monotonic() + 840
    handler = f"/proc/{process.pid}/status"
    while True:  # until our handler is there
        caught = int(
            next(li for li in Path(handler).read_text().splitlines() if li.startswith("SigCgt")).split()[1], 16
        )
        if caught >> (signal.SIGTERM - 1) & 1:
            break
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay)
    processes = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    line = told(process, 128 + number, processes)
    assert line.startswith(f"rlspec: interrupted by {signal.Signals(number).name}")


@pytest.mark.slow
def test_signals_in_the_middle_of_a_run_end_it_with_a_checkpoint_that_continues_as_if_uninterrupted(start, tmp_path):
    """One run is interrupted again and again: first all its processes, then one rank, and the launcher."""
    options = OPTIONS | {"train__steps": STEPS, "train__resume": "true"}
    run_dir = tmp_path / "run"

    def interrupted(number: int, code: int | None, victims) -> None:
        """Send the signal to the processes that `victims` chooses, after three more steps."""
        before = len(records(run_dir))
        process = train(start, run_dir, ranks=2, **options)
        processes = reach(process, run_dir, before + 3)
        for one in victims(process, processes):
            one.send_signal(number)
        line = told(process, code, processes)
        assert f"interrupted by {signal.Signals(number).name}" in line and Path(line.split()[-1]).is_dir()
        assert len(records(run_dir)) == int(Checkpoints(run_dir).whole()[-1].name.removeprefix("step-"))

    interrupted(signal.SIGINT, 130, lambda process, found: [process, *ranks(found)])
    # the launcher reads 1 or 143, as the ranks end
    interrupted(signal.SIGTERM, None, lambda _, found: [ranks(found)[1]])
    interrupted(signal.SIGTERM, 143, lambda process, _: [process])
    run(start, run_dir, ranks=2, **options)
    run(start, tmp_path / "whole", ranks=2, **options)
    assert records(run_dir) == records(tmp_path / "whole")
    for name in ("model.safetensors", "config.json"):
        assert (run_dir / "hf" / name).read_bytes() == (tmp_path / "whole/hf" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_process(start, tmp_path, number):
    process = train(start, tmp_path, **OPTIONS, train__steps=STEPS)
    processes = reach(process, tmp_path, 3)
    process.send_signal(number)
    line = told(process, 128 + number, processes)
    assert line.startswith(f"rlspec: interrupted by {signal.Signals(number).name}; the last good parameters are in ")
    assert Path(line.split()[-1]).is_dir()


@pytest.mark.slow
def test_when_torchrun_is_killed_its_ranks_end_with_a_checkpoint(start, tmp_path):
    process = train(start, tmp_path, ranks=2, **OPTIONS, train__steps=100000)
    processes = reach(process, tmp_path, 3)
    assert len(ranks(processes)) == 2
    process.kill()
    assert_gone(processes)
    assert Checkpoints(tmp_path).whole()


@pytest.mark.slow
def test_when_a_rank_is_killed_the_other_reports_it_in_one_line(start, tmp_path):
    process = train(start, tmp_path, ranks=2, **OPTIONS, train__steps=100000)
    processes = reach(process, tmp_path, 3)
    ranks(processes)[1].kill()
    lines = told(process, 1, processes, count=2)
    assert "another rank ended or cannot be reached" in lines and "rank 1 was ended by SIGKILL" in lines


def test_a_second_ctrl_c_ends_at_once():
    """A run in the middle of a step records the first one. A repeated delivery of it has no effect."""
    code = """
import signal
from types import SimpleNamespace
from megatron_rlspec.host import interruption
now = 0.0
interruption.time = SimpleNamespace(monotonic=lambda: now)
asked = interruption.Interruption().install()
asked.defer()
for now in (10.0, 10.3, 11.5):
    signal.raise_signal(signal.SIGINT)
    print(now, asked.reason, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert done.stdout.splitlines() == ["10.0 interrupted by SIGINT", "10.3 interrupted by SIGINT"]


# ---- files that cannot be written -----------------------------------------------------------------------------------


def limited(start: Path, run_dir: Path, most: int, **options: object) -> tuple[int, str]:
    """Start a run whose files may not grow beyond `most` bytes: the effect of a full disk at a chosen place."""
    process = train(start, run_dir, **{**OPTIONS, "train__save_every": 1, "train__steps": 3} | options)
    psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (most, most))
    output, _ = process.communicate(timeout=840)
    assert "Traceback" not in output, output[-3000:]
    (line,) = [line for line in output.splitlines() if line.startswith("rlspec:")]
    return process.returncode, line


def leftovers(run_dir: Path) -> list[str]:
    return [str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if "partial" in p.name or p.name.endswith(".old")]


@pytest.mark.slow
@pytest.mark.parametrize(("most", "name"), [(100_000, "policy-tensor0"), (120, "process.jsonl"), (8000, "checkpoints")])
def test_a_file_that_cannot_grow_is_reported_in_one_line_and_leaves_nothing(start, tmp_path, most, name):
    code, line = limited(start, tmp_path, most)
    assert code == 1 and "File too large" in line and name in line, line
    assert leftovers(tmp_path) == [] and Checkpoints(tmp_path).whole() == []
    assert not list(tmp_path.glob("checkpoints/*"))
    run(start, tmp_path, **OPTIONS, train__steps=2, train__resume="true")
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [0, 1]

"""SIGKILL of one part of a job at a chosen place; resumed, it ends with the same bytes, and leaves nothing behind."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import forked
import psutil
import pytest
from short_run import TESTS, run, words

from megatron_rlspec import ports
from megatron_rlspec.metrics import read_records

OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1, "train__steps": 150}
KILLS = 10
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Job:
    """The ranks of one job, forked from a process that has imported the package."""

    def __init__(self, start: Path, run_dir: Path, ranks: int, **options: object) -> None:
        self.run_dir = run_dir
        arguments = words(start, run_dir, "train", OPTIONS | {"train__resume": "true"} | options)
        port = ports.free_port(ports.JOBS)
        self._logs = tempfile.TemporaryDirectory()
        outputs = [(f"{self._logs.name}/{rank}.out", f"{self._logs.name}/{rank}.err") for rank in range(ranks)]
        (run_dir / "config.json").unlink(missing_ok=True)
        self.processes = []
        for rank in range(ranks):
            own = {**os.environ, "OMP_NUM_THREADS": "1"}
            own |= forked.rank_environment(rank, ranks, port) if ranks > 1 else {}
            started = ("megatron_rlspec.cli", arguments, str(TESTS), own, outputs[rank])
            self.processes.append(forked.context().Process(target=forked._run, args=started))
        for process in self.processes:
            process.start()

    def await_steps(self, count: int) -> None:
        """Wait until this number of further steps is recorded."""
        upto = len(read_records(self.run_dir / "metrics.jsonl")) + count
        self.await_(lambda: (self.run_dir / "config.json").exists())
        self.await_(lambda: len(read_records(self.run_dir / "metrics.jsonl")) >= upto)

    def await_(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not there():
            dead = [p for p in self.processes if not p.is_alive()]
            assert not dead and time.monotonic() < deadline, self.errors()
            time.sleep(0.001)

    def errors(self) -> str:
        return "".join(path.read_text()[-2000:] for path in Path(self._logs.name).glob("*.err"))

    def all(self) -> list[psutil.Process]:
        ranks = [psutil.Process(process.pid) for process in self.processes]
        return [*ranks, *(child for rank in ranks for child in rank.children(recursive=True))]

    def kill(self, rank: int) -> None:
        """SIGKILL one rank. The others end by themselves, and so does all that they started."""
        everything = self.all()
        self.processes[rank].kill()
        for process in self.processes:
            process.join(30)
            assert process.exitcode is not None
        others = [process.exitcode for i, process in enumerate(self.processes) if i != rank]
        assert others == [1] * len(others), self.errors()
        assert "Traceback" not in self.errors()
        _, alive = psutil.wait_procs(everything, timeout=10)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def reward_processes(job: Job) -> list[psutil.Process]:
    """Return the workers and their guards."""
    found = []
    for process in job.all():
        with suppress(psutil.Error):  # a zombie, or gone
            if "megatron_rlspec.rl.reward_worker" in process.cmdline():
                found.append(process)
    return found


def result(run_dir: Path) -> dict[str, bytes]:
    folders = (run_dir / f"checkpoints/step-{OPTIONS['train__steps']:06d}", run_dir / "hf")
    return {str(f.relative_to(run_dir)): f.read_bytes() for folder in folders for f in folder.glob("*.safetensors")}


def left() -> set[str]:
    return {str(path) for place in ("/dev/shm", "/tmp") for path in Path(place).glob("rlspec-*")}


def ends_as(whole: Path, killed: Path, start: Path, ranks: int, **options: object) -> None:
    run(start, killed, ranks=ranks, **OPTIONS, train__resume="true", **options)
    expected = result(whole)
    found = result(killed)
    assert len(expected) >= 4 and found == expected
    assert [r["step"] for r in read_records(killed / "metrics.jsonl")] == list(range(OPTIONS["train__steps"]))
    assert [p for p in killed.rglob("*") if "partial" in p.name] == []


PLACES = {
    "rank 0 of one, in a checkpoint": (1, 0, ".step-*.partial"),
    "rank 0 of two": (2, 0, ""),
    "rank 1 of two": (2, 1, ""),
    "rank 0 of two, in a checkpoint": (2, 0, ".step-*.partial"),
    "rank 1 of two, in a checkpoint": (2, 1, ".step-*.partial"),
}


@pytest.mark.parametrize("place", PLACES)
def test_killed_there_and_resumed_ends_with_the_same_bytes(start, tmp_path, place):
    ranks, victim, pattern = PLACES[place]
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    before = left()
    run(start, whole, ranks=ranks, **OPTIONS)
    killed.mkdir()
    moments = random.Random(place)
    for _ in range(KILLS):
        job = Job(start, killed, ranks)
        job.await_steps(moments.randint(0, 2))
        if pattern:
            job.await_(lambda: any((killed / "checkpoints").glob(pattern)))
        else:
            time.sleep(moments.uniform(0, 0.3))
        job.kill(victim)
    assert 0 < len(read_records(killed / "metrics.jsonl")) < OPTIONS["train__steps"]
    ends_as(whole, killed, start, ranks)
    assert left() <= before


def test_killed_reward_workers_are_replaced(start, tmp_path):
    """Kill workers and their guards between samples: no reward is lost, and the run continues by itself."""
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    before = left()
    run(start, whole, **OPTIONS)
    killed.mkdir()
    job = Job(start, killed, 1)
    job.await_steps(1)
    kills = 0
    for index in range(2 * KILLS):
        workers = reward_processes(job)
        if workers:
            workers[index % len(workers)].send_signal(signal.SIGKILL)
            kills += 1
        time.sleep(0.2)
        if not job.processes[0].is_alive():
            break
    job.processes[0].join(120)
    assert kills >= KILLS and job.processes[0].exitcode == 0, job.errors()
    failed = sum(record["rollout/failed_rewards"] for record in read_records(killed / "metrics.jsonl"))
    assert failed <= kills  # a kill costs at most the sample that was being judged, and that is on record
    assert failed or result(killed) == result(whole)
    assert left() <= before


@pytest.mark.parametrize("part", ["reward worker", "rank 1"])
def test_stopped_for_a_minute_and_continued(start, tmp_path, part):
    ranks = 2 if part == "rank 1" else 1
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    run(start, whole, ranks=ranks, **OPTIONS)
    stopped.mkdir()
    job = Job(start, stopped, ranks)
    job.await_steps(3)
    if part == "rank 1":
        victims = [psutil.Process(job.processes[1].pid)]
    else:
        victims = reward_processes(job)
    for victim in victims:
        victim.suspend()
    time.sleep(60)
    for victim in victims:
        if victim.is_running():
            victim.resume()
    for process in job.processes:
        process.join(120)
    assert [process.exitcode for process in job.processes] == [0] * ranks, job.errors()
    failed = sum(record["rollout/failed_rewards"] for record in read_records(stopped / "metrics.jsonl"))
    assert failed <= 1 and (failed or result(stopped) == result(whole))

"""SIGKILL of one part of a job at a chosen place; resumed, it ends with the same bytes, and leaves nothing behind."""

import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest
from killed_job import Job, await_nothing_left, check_same, result
from short_run import run

from megatron_rlspec.records.recorder import read_records

STEPS = 150
OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1, "train__steps": STEPS}
KILLS = 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def reward_processes(job: Job) -> list[psutil.Process]:
    """Return the workers and their guards."""
    found = []
    for process in job.all():
        with suppress(psutil.Error):  # a zombie, or gone
            if "megatron_rlspec.tasks.reward_worker" in process.cmdline():
                found.append(process)
    return found


@pytest.fixture
def temporary(monkeypatch) -> Iterator[None]:
    """Give runs a directory for temporary files, where other runs leave nothing, and check that it is empty later."""
    folder = Path(tempfile.mkdtemp())  # not below tmp_path, whose name is too long for sockets
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    await_nothing_left(folder, set())
    folder.rmdir()


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory) -> Callable[[int], Path]:
    """Return the directory of a run on this many ranks that nothing happens to; each is run once."""

    @cache
    def of_ranks(ranks: int) -> Path:
        run_dir = tmp_path_factory.mktemp("whole")
        run(start, run_dir, ranks=ranks, **OPTIONS)
        return run_dir

    return of_ranks


PLACES = {
    "rank 1 of two": (2, 1, ""),
    "rank 0 of two, in a checkpoint": (2, 0, ".step-*.partial"),
    "rank 1 of two, in a checkpoint": (2, 1, ".step-*.partial"),
}


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("place", PLACES)
def test_killed_there_and_resumed_ends_with_the_same_bytes(start, whole, tmp_path, place):
    ranks, victim, pattern = PLACES[place]
    killed = tmp_path / "killed"
    killed.mkdir()
    moments = random.Random(place)
    for _ in range(KILLS):
        job = Job(start, killed, ranks, **OPTIONS)
        job.await_steps(moments.randint(0, 2))
        if pattern:
            job.await_(lambda: any((killed / "checkpoints").glob(pattern)))
        else:
            time.sleep(moments.uniform(0, 0.3))
        job.kill(victim)
    assert 0 < len(read_records(killed / "metrics.jsonl")) < STEPS
    run(start, killed, ranks=ranks, **OPTIONS, train__resume="true")
    check_same(whole(ranks), killed, STEPS)


@pytest.mark.usefixtures("temporary")
def test_killed_reward_workers_are_replaced(start, whole, tmp_path):
    """Kill workers and their guards between samples: no reward is lost, and the run continues by itself."""
    killed = tmp_path / "killed"
    killed.mkdir()
    job = Job(start, killed, 1, **OPTIONS)
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
    assert failed or result(killed, STEPS) == result(whole(1), STEPS)


@pytest.mark.parametrize("part", ["reward worker", "rank 1"])
def test_stopped_for_a_minute_and_continued(start, whole, tmp_path, part):
    ranks = 1 if part == "reward worker" else 2
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    job = Job(start, stopped, ranks, **OPTIONS)
    job.await_steps(3)
    if part == "reward worker":
        victims = reward_processes(job)
    else:
        victims = [psutil.Process(job.processes[int(part[-1])].pid)]
    for victim in victims:
        victim.suspend()
    time.sleep(60)
    for victim in victims:
        if victim.is_running():
            victim.resume()
    assert job.wait() == [0] * ranks, job.errors()
    failed = sum(record["rollout/failed_rewards"] for record in read_records(stopped / "metrics.jsonl"))
    assert failed <= 1 and (failed or result(stopped, STEPS) == result(whole(ranks), STEPS))

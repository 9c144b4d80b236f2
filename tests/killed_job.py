"""A job of `rlspec train` whose ranks are forked, so that tests can start, kill and stop it many times."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import forked
import psutil
from short_run import CLI, TESTS, words

from megatron_rlspec.host import ports
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run import state_file
from megatron_rlspec.run.trajectory import Trajectory


class Job:
    """The ranks of one job, forked from a process that has imported the package. It continues what `run_dir` holds."""

    def __init__(self, start: Path, run_dir: Path, ranks: int, module: str = CLI, **options: object) -> None:
        self.run_dir = run_dir
        arguments = words(start, run_dir, "train", {"train__resume": "true"} | options)
        port = ports.free_port(ports.JOBS)
        self._logs = tempfile.TemporaryDirectory()
        outputs = [(f"{self._logs.name}/{rank}.out", f"{self._logs.name}/{rank}.err") for rank in range(ranks)]
        self._config_before = self._config_written()
        self.processes = []
        for rank in range(ranks):
            own = os.environ | (forked.rank_environment(rank, ranks, port) if ranks > 1 else {})
            started = (module, arguments, str(TESTS), own, outputs[rank])
            self.processes.append(forked.context().Process(target=forked._run, args=started))
        for process in self.processes:
            process.start()

    def await_steps(self, count: int) -> None:
        """Wait until this number of further steps is recorded."""
        upto = len(read_records(self.run_dir / "metrics.jsonl")) + count
        self.await_(lambda: self._config_written() != self._config_before)
        self.await_(lambda: len(read_records(self.run_dir / "metrics.jsonl")) >= upto)

    def _config_written(self) -> int:
        """Return when a job last began in the run directory, in ns; 0: none has."""
        config = self.run_dir / "config.json"
        return config.stat().st_mtime_ns if config.exists() else 0

    def await_(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not there():
            dead = [p for p in self.processes if not p.is_alive()]
            assert not dead and time.monotonic() < deadline, self.errors()
            time.sleep(0.005)

    def errors(self) -> str:
        return "".join(path.read_text()[-2000:] for path in Path(self._logs.name).glob("*.err"))

    def all(self) -> list[psutil.Process]:
        ranks = [psutil.Process(process.pid) for process in self.processes]
        return [*ranks, *(child for rank in ranks for child in rank.children(recursive=True))]

    def wait(self) -> list[int | None]:
        """Wait for the end of all ranks. Returns their exit codes."""
        for process in self.processes:
            process.join(240)
        return [process.exitcode for process in self.processes]

    def stop(self, rank: int, seconds: float) -> None:
        """Let a rank stand still for some time."""
        os.kill(self.processes[rank].pid, signal.SIGSTOP)
        time.sleep(seconds)

    def kill(self, rank: int) -> None:
        """SIGKILL one rank. The others end by themselves, and so does all that they started."""
        everything = self.all()
        self.processes[rank].kill()
        for process in self.processes:
            process.join(240)
            assert process.exitcode is not None
        others = [process.exitcode for i, process in enumerate(self.processes) if i != rank]
        assert others == [1] * len(others), self.errors()
        assert "Traceback" not in self.errors()
        _, alive = psutil.wait_procs(everything, timeout=240)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def result(run_dir: Path, steps: int) -> dict[str, bytes]:
    """Return the files of policy, drafter, both optimizers and generators, and the exported ones."""
    folders = (run_dir / f"checkpoints/step-{steps:06d}", run_dir / "hf", run_dir / "hf_drafter")
    return {str(f.relative_to(run_dir)): f.read_bytes() for folder in folders for f in folder.rglob("*.safetensors")}


def check_same(whole: Path, killed: Path, steps: int) -> None:
    """Check that a run that was killed ended as the undisturbed one: its bytes, its records, and nothing else left."""
    expected, found = result(whole, steps), result(killed, steps)
    assert len(expected) >= 4 and found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    records = [read_records(folder / "metrics.jsonl") for folder in (whole, killed)]
    assert [r["step"] for r in records[1]] == list(range(steps))
    for name in ("rollout/reward", "rollout/continued_tokens", "policy/loss", "policy/staleness"):
        assert [r.get(name) for r in records[1]] == [r.get(name) for r in records[0]], name
    assert [path for path in killed.rglob("*") if "partial" in path.name or path.name == ".lock"] == []


def check_same_samples(whole: Path, killed: Path, steps: int) -> None:
    """Check that a run with partial rollouts that was killed trained each begun sample once, with its text.

    Which groups a step trains depends on time there, so the two runs must have one policy throughout.
    """
    texts = []
    for run_dir in (whole, killed):
        recorded = Trajectory(run_dir)
        assert recorded.steps == steps
        trained = [s for step in range(steps) for group in recorded.groups(step) for s in group.samples]
        found = {s.request_id: (s.tokens[: s.prompt_len].tolist(), s.tokens.tolist()) for s in trained}
        assert len(found) == len(trained)
        begun = state_file.read(run_dir / f"checkpoints/step-{steps:06d}.state").drawn.begun
        left = {request.id for group in begun for request in group.requests}
        assert not left & found.keys()
        texts.append((found, left | found.keys()))
    (one, all_one), (other, all_other) = texts
    assert all_one == all_other
    both = one.keys() & other.keys()
    # In a new epoch a prompt whose group still goes on is taken later, so a few ids can have other prompts.
    same = [name for name in both if one[name][0] == other[name][0]]
    assert len(same) > 0.8 * len(both)
    assert [name for name in same if one[name][1] != other[name][1]] == []
    assert [r["step"] for r in read_records(killed / "metrics.jsonl")] == list(range(steps))
    assert [path for path in killed.rglob("*") if "partial" in path.name or path.name == ".lock"] == []


def await_nothing_left(temporary: Path, names: set[str]) -> None:
    """Wait until directories of engines, of these names, are gone from `temporary` and from shared memory."""
    deadline = time.monotonic() + 60  # processes of their own remove them
    while left := [*temporary.iterdir(), *(n for n in os.listdir("/dev/shm") if any(name in n for name in names))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def forget(*folders: Path) -> None:
    """Remove run directories that are no longer needed."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)

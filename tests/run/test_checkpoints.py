"""Run directories: a second start, damaged checkpoints, and what a resumed run must not write twice."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from short_run import TESTS, run, words

from megatron_rlspec.run import state_file
from megatron_rlspec.run.checkpoints import Checkpoints
from megatron_rlspec.run.state_file import Drawn

OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1, "train__steps": 2}


def refused(start: Path, run_dir: Path, code: int = 2, ranks: int = 1, **options: object) -> str:
    """Return the one line of a run that must not continue."""
    arguments = words(start, run_dir, "train", OPTIONS | options)
    ended = forked.run_module("megatron_rlspec.cli", arguments, folder=TESTS, ranks=ranks)
    output = ended.stdout + ended.stderr
    assert "Traceback" not in output, output[-3000:]
    lines = [line for line in output.splitlines() if line.startswith("rlspec:")]
    assert len(lines) == 1 and ended.returncode == code, output[-3000:]
    return lines[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def stopped(start, tmp_path_factory) -> Path:
    """Return a run that was killed after its second step, before its end."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    run(start, run_dir, **OPTIONS)
    shutil.rmtree(run_dir / "hf")
    return run_dir


@pytest.fixture
def copy(stopped, tmp_path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


# ---- a second start -------------------------------------------------------------------------------------------------


def test_a_second_start_without_resume_is_refused_and_changes_nothing(start, copy):
    before = contents(copy)
    line = refused(start, copy)
    assert "holds a run already (checkpoint step-000002)" in line
    assert "--train.resume true" in line and "another train.run_dir" in line
    assert contents(copy) == before


def test_a_run_is_not_continued_with_other_data(start, tmp_path, copy):
    other = Path(shutil.copytree(start, tmp_path / "start"))
    rows = (start / "task/rl.jsonl").read_text()
    (other / "task/rl.jsonl").write_text(rows.replace('"label": "', '"label": "1'))
    before = contents(copy)
    line = refused(other, copy, train__resume="true", train__steps=3)
    assert "step-000002 is of a run with another content of data.path" in line
    assert contents(copy) == before


def test_a_result_has_its_name_once_its_card_is_there_too(start, copy):
    arguments = words(start, copy, "train", OPTIONS | {"train__resume": "true"})
    assert forked.run_module("killed_at_end", arguments, folder=TESTS).returncode == -signal.SIGKILL
    assert not (copy / "hf").exists() and (copy / ".hf.partial/config.json").exists()
    run(start, copy, **OPTIONS, train__resume="true")
    assert (copy / "hf/README.md").exists() and not (copy / ".hf.partial").exists()


# ---- damaged checkpoints --------------------------------------------------------------------------------------------


def flip(path: Path, share: float) -> None:
    """Change one bit at this position, a share of the file's length."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 16
    path.write_bytes(content)


def flip_in(pattern: str, share: float) -> Callable[[Path], None]:
    return lambda folder: flip(next(folder.glob(pattern)), share)


def state(**values: object) -> Callable[[Path], None]:
    """Change values of the state and make its checksum right again."""

    def act(folder: Path) -> None:
        path = next(folder.glob("*.state"))
        before = state_file.read(path)
        state_file.write(path, before.values | values, before.drawn)

    return act


POLICY = "*/policy-*"
DRAFTER = "*/drafter-*"
DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "bit of the policy": (flip_in(POLICY, 0.3), ("policy-tensor0", "checksum differs", "to go on with")),
    "bit of the state": (flip_in("*.state", 0.5), ("step-000002.state", "checksum differs", "to go on with")),
    "another version": (state(version="9.9"), ("version 9.9 of megatron_rlspec wrote it", "go on with that version")),
    "state missing": (
        lambda folder: next(folder.glob("*.state")).unlink(),
        ("step-000002.state: no such file", "an earlier version of megatron_rlspec", "to go on with"),
    ),
    "file cut": (lambda f: os.truncate(next(f.glob(DRAFTER)), 5000), ("drafter-tensor0", "truncated")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_line(start, copy, damage):
    for path in (copy / "checkpoints").glob("step-000001*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    act, parts = DAMAGE[damage]
    act(copy / "checkpoints")
    before = contents(copy)
    line = refused(start, copy, train__resume="true", train__steps=3)
    assert all(part in line for part in parts), line
    assert contents(copy) == before


def test_a_checkpoint_beyond_the_runs_end_is_refused(start, copy):
    line = refused(start, copy, train__resume="true", train__steps=1)
    assert line.endswith("checkpoints/step-000002 is after step 2, but the run has only 1 steps")


def test_pruning_removes_what_killed_writes_left(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        checkpoints.path(step).mkdir(parents=True)
    for step in (1, 2, 3, 4):
        state_file.write(state_file.of(checkpoints.path(step)), {}, Drawn())
    (checkpoints.folder / ".step-000004.partial").mkdir()
    (checkpoints.folder / ".step-000004.state.123.partial").write_text("")
    checkpoints.prune()
    names = {path.name for path in checkpoints.folder.iterdir()}
    assert names == {"step-000002", "step-000002.state", "step-000003", "step-000003.state"}

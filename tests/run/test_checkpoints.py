"""Run directories: a second start, damaged checkpoints, and what a resumed run must not write twice."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from short_run import TESTS, run, words

from megatron_rlspec.config.run_dir import claimed
from megatron_rlspec.records.recorder import read_records
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


def test_a_run_that_goes_on_elsewhere_is_not_resumed(start, copy):
    with claimed(copy, True):
        before = contents(copy)
        assert f"(process {os.getpid()} on " in refused(start, copy, train__resume="true")
        assert contents(copy) == before


def other_weights(start: Path) -> None:
    path = start / "model/model.safetensors"
    save_file({name: tensor * 1.3 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def other_labels(start: Path) -> None:
    path = start / "task/rl.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"label": "x"}) + "\n" for row in rows))


@pytest.mark.parametrize(("change", "option"), [(other_weights, "model.path"), (other_labels, "data.path")])
def test_a_run_is_not_continued_with_another_model_or_other_data(start, tmp_path, copy, change, option):
    other = Path(shutil.copytree(start, tmp_path / "start"))
    change(other)
    before = contents(copy)
    line = refused(other, copy, train__resume="true", train__steps=3)
    assert f"step-000002 is of a run with another content of {option}" in line
    assert contents(copy) == before


def test_a_result_has_its_name_once_its_card_is_there_too(start, copy):
    arguments = words(start, copy, "train", OPTIONS | {"train__resume": "true"})
    assert forked.run_module("killed_at_end", arguments, folder=TESTS).returncode == -signal.SIGKILL
    assert not (copy / "hf").exists() and (copy / ".hf.partial/config.json").exists()
    run(start, copy, **OPTIONS, train__resume="true")
    assert (copy / "hf/README.md").exists() and not (copy / ".hf.partial").exists()


def test_resumed_runs_repeat_no_sample_and_no_record(start, copy):
    run(start, copy, **OPTIONS | {"train__steps": 4, "train__resume": "true"})
    for name in ("metrics.jsonl", "samples.jsonl"):
        steps = [record["step"] for record in read_records(copy / name)]
        assert steps == sorted(steps) and set(steps) == {0, 1, 2, 3}, name
    assert len(read_records(copy / "samples.jsonl")) == 16


# ---- damaged checkpoints --------------------------------------------------------------------------------------------


def flip(path: Path, share: float) -> None:
    """Change one bit at this position, a share of the file's length."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 16
    path.write_bytes(content)


def flip_in(pattern: str, share: float) -> Callable[[Path], None]:
    return lambda folder: flip(next(folder.glob(pattern)), share)


def rewrite(pattern: str, edit: Callable[[dict, dict], None]) -> Callable[[Path], None]:
    """Write a file again with other tensors or metadata."""

    def act(folder: Path) -> None:
        path = next(folder.glob(pattern))
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = dict(file.metadata())
        edit(tensors, metadata)
        save_file(tensors, path, metadata)

    return act


def state(**values: object) -> Callable[[Path], None]:
    """Change values of the state and make its checksum right again."""

    def act(folder: Path) -> None:
        path = next(folder.glob("*.state"))
        before = state_file.read(path)
        state_file.write(path, before.values | values, before.drawn)

    return act


NAME = "parameter.decoder.final_layernorm.weight"
POLICY = "*/policy-*"
DRAFTER = "*/drafter-*"
DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "bit of the policy": (flip_in(POLICY, 0.3), ("policy-tensor0", "checksum differs", "to go on with")),
    "bit of the drafter": (flip_in(DRAFTER, 0.7), ("drafter-tensor0", "checksum differs")),
    "tensor missing": (rewrite(POLICY, lambda t, _: t.pop(NAME)), ("policy-tensor0", NAME)),
    "bit of the state": (flip_in("*.state", 0.5), ("step-000002.state", "checksum differs", "to go on with")),
    "another version": (state(version="9.9"), ("version 9.9 of megatron_rlspec wrote it", "go on with that version")),
    "state missing": (
        lambda folder: next(folder.glob("*.state")).unlink(),
        ("step-000002.state: no such file", "an earlier version of megatron_rlspec", "to go on with"),
    ),
    "file missing": (lambda folder: next(folder.glob(DRAFTER)).unlink(), ("drafter-tensor0", "no such file")),
    "file cut": (lambda f: os.truncate(next(f.glob(POLICY)), 5000), ("policy-tensor0", "truncated")),
    "layout": (lambda f: (f / "step-000002/layout.json").write_text("{}"), ("was written with tensor=None",)),
}


FAST = ("another version", "bit of the policy", "tensor missing", "bit of the state", "state missing")


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in DAMAGE]
)
def test_a_damaged_checkpoint_is_refused_in_one_line(start, copy, damage):
    for path in (copy / "checkpoints").glob("step-000001*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    act, parts = DAMAGE[damage]
    act(copy / "checkpoints")
    before = contents(copy)
    line = refused(start, copy, train__resume="true", train__steps=3)
    assert all(part in line for part in parts), line
    assert contents(copy) == before


@pytest.mark.slow
def test_damage_on_one_rank_is_reported_by_all(start, tmp_path):
    """Rank 1 alone reads the damaged file; the line comes from rank 0."""
    options = OPTIONS | {"optimizer__distributed": "true", "ranks": 2}
    run(start, tmp_path, **options)
    shutil.rmtree(tmp_path / "hf")
    flip(tmp_path / "checkpoints/step-000002/policy-tensor0-pipeline0-replica1.safetensors", 0.9)
    line = refused(start, tmp_path, code=2, **options | {"train__resume": "true", "train__steps": 3})
    assert "replica1" in line and "checksum differs" in line


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

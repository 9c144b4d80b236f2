"""Recorded trajectories, and drafters that `rlspec replay` trains along them."""

import shutil
from pathlib import Path

import forked
import pytest
import torch
from short_run import TESTS, run

from megatron_rlspec.models.hf_files import CheckpointError, read_hf
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run.trajectory import Trajectory, TrajectoryWriter, file_of
from megatron_rlspec.types import Group, Prompt, Sample

OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1, "drafter__lr": 1e-2}
STEPS = 3


CASES = [
    pytest.param({"model__dtype": "bfloat16", "drafter__replay": "uniform"}, id="buffer"),
    pytest.param({"drafter__overlap": "true", "drafter__update_every": 2}, id="overlap", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES)
def recorded(request, start, tmp_path_factory) -> Path:
    """Return a run on two ranks that recorded its steps."""
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    options = OPTIONS | {"train__record_gib": 1, "train__steps": STEPS, "train__drift_every": 1}
    run(start, run_dir, ranks=2, **options, **request.param, train__tokens_per_micro_batch=256)
    return run_dir


def replay(recorded: Path, out: Path, ranks: int = 1, code: int = 0, **options: object) -> str:
    """Run `rlspec replay`. Returns what it printed."""
    values = {"train.run_dir": out} | {name.replace("__", "."): value for name, value in options.items()}
    words = ["replay", str(recorded), *(text for name, value in values.items() for text in (f"--{name}", str(value)))]
    ended = forked.run_module("megatron_rlspec.cli", words, folder=TESTS, ranks=ranks)
    output = ended.stdout + ended.stderr
    assert ended.returncode == code and "Traceback" not in output, output[-3000:]
    return output


def drafter(run_dir: Path) -> dict[str, torch.Tensor]:
    tensors = read_hf(run_dir / "hf")[1]
    return {name: tensors[name] for name in tensors if ".mtp_layers." in name}


def test_a_replay_trains_the_same_drafter_bit_for_bit(recorded, start, tmp_path):
    assert "rlspec replay: loading " in replay(recorded, tmp_path / "same", ranks=2, train__export_every=2)
    kept = read_hf(tmp_path / "same/hf-step-000002")[1]
    assert all(torch.equal(kept[name], tensor) for name, tensor in Trajectory(recorded).policy(2).items())
    ours = read_hf(tmp_path / "same/hf")[1]
    theirs = read_hf(recorded / "hf")[1]
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    before = read_hf(start / "model")[1]
    assert any(not torch.equal(tensor.float(), before[name]) for name, tensor in drafter(recorded).items())
    records = [read_records(folder / "metrics.jsonl") for folder in (recorded, tmp_path / "same")]
    for name in ("drafter/loss_1", "drafter/grad_norm", "drafter/match_3"):
        assert [r.get(name) for r in records[0]] == [r.get(name) for r in records[1]]


@pytest.mark.slow
def test_a_variant_differs_and_a_resumed_replay_does_not(recorded, tmp_path):
    replay(recorded, tmp_path / "whole", drafter__lr=1e-3)
    replay(recorded, tmp_path / "parts", drafter__lr=1e-3, train__steps=1)
    shutil.rmtree(tmp_path / "parts/hf")
    replay(recorded, tmp_path / "parts", drafter__lr=1e-3, train__resume="true")
    whole, parts, co_trained = (drafter(path) for path in (tmp_path / "whole", tmp_path / "parts", recorded))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert any(not torch.equal(whole[name], co_trained[name]) for name in whole)


@pytest.mark.parametrize("staleness", [0, 1])
def test_engines_draw_from_one_recorded_policy(recorded, tmp_path, staleness):
    """At step 0 they draw what the run drew; later the policy is still that of step 0."""
    replay(recorded, tmp_path / "control", replay__policy_step=0, rollout__staleness=staleness)
    first, *later = read_records(tmp_path / "control/metrics.jsonl")
    began = read_records(recorded / "metrics.jsonl")[0]
    assert first["rollout/reward"] == began["rollout/reward"] and len(later) == STEPS - 1
    policy = Trajectory(recorded).policy(0)
    kept = read_hf(tmp_path / "control/hf")[1]
    assert all(torch.equal(kept[name], tensor) for name, tensor in policy.items())


def test_more_steps_than_were_recorded_are_refused_in_one_line(recorded, tmp_path):
    output = replay(recorded, tmp_path / "out", code=2, train__steps=9)
    (line,) = [line for line in output.splitlines() if line.startswith("rlspec:")]
    assert f"has {STEPS} recorded steps" in line
    assert not (tmp_path / "out").exists()


# ---- the files ------------------------------------------------------------------------------------------------------


WORDS = 3  # of the vocabulary


def groups(step: int) -> list[Group]:
    prompt = Prompt(step, torch.arange(WORDS).numpy())
    zeros = torch.zeros(WORDS).numpy()
    return [Group(prompt, [Sample(f"{step}", prompt, prompt.tokens, zeros, zeros)])]


def policies(steps: int, changed: int) -> list[dict[str, torch.Tensor]]:
    """Return policies of which `changed` elements of one tensor change each step; one value changes its sign of 0."""
    torch.manual_seed(0)
    found = [{"a": torch.randn(50, 4, dtype=torch.bfloat16), "b": torch.zeros(7)}]
    for step in range(1, steps):
        after = {name: tensor.clone() for name, tensor in found[-1].items()}
        after["a"].view(-1)[torch.randperm(200)[:changed]] += 1
        after["b"][step] = -0.0
        found.append(after)
    return found


@pytest.mark.parametrize("changed", [0, 5, 200])
def test_differences_give_the_policies_back_bit_for_bit(tmp_path, changed):
    written = policies(4, changed)
    writer = TrajectoryWriter(tmp_path, 1 << 20, 0)
    for step, policy in enumerate(written):
        writer.write(step, policy.items(), groups(step) if step < 3 else ())
    read = Trajectory(tmp_path)
    assert read.steps == 3 and [read.groups(step)[0].prompt.id for step in range(3)] == [0, 1, 2]
    for step in (0, 1, 3, 2):  # also backwards
        for name, tensor in read.policy(step).items():
            assert torch.equal(tensor.view(torch.uint8), written[step][name].view(torch.uint8)), (step, name)
    sizes = [file_of(tmp_path, step).stat().st_size for step in range(3)]
    assert changed == 200 or sizes[2] < sizes[0] - 50


def test_recording_ends_at_the_bound_and_says_so_once(tmp_path):
    written = policies(4, 200)
    writer = TrajectoryWriter(tmp_path, 1200, 0)
    lines = []
    for step in range(2):
        if not writer.ended:
            lines.append(writer.write(step, written[step].items(), groups(step)))
    assert "recording ends when train.record_gib=" in lines[0]
    assert "recording ends before step 2" in lines[1] and "0 steps can be replayed" in writer.ended
    assert Trajectory(tmp_path).steps == 0
    assert "step 1 was not" in TrajectoryWriter(tmp_path, 1 << 20, 3).ended


def test_a_resumed_run_records_later_steps_anew(tmp_path):
    written = policies(4, 5)
    first = TrajectoryWriter(tmp_path, 1 << 20, 0)
    for step in range(4):
        first.write(step, written[step].items(), groups(step))
    unfinished = tmp_path / "trajectory/.step-000002.safetensors.17.partial"  # a kill left it
    unfinished.touch()
    second = TrajectoryWriter(tmp_path, 1 << 20, 2)
    assert not unfinished.exists()
    assert not second.ended and Trajectory(tmp_path).steps == 1
    second.write(2, written[3].items(), groups(7))
    read = Trajectory(tmp_path)
    assert read.groups(2)[0].prompt.id == 7
    assert all(torch.equal(tensor, written[3][name]) for name, tensor in read.policy(2).items())


def test_a_damaged_file_is_refused(tmp_path):
    writer = TrajectoryWriter(tmp_path, 1 << 20, 0)
    writer.write(0, policies(1, 0)[0].items(), groups(0))
    path = file_of(tmp_path, 0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        read = Trajectory(tmp_path)
        read.policy(0), read.groups(0)
    path.unlink()
    with pytest.raises(CheckpointError, match="expected a run with --train.record_gib 20"):
        Trajectory(tmp_path)
    file_of(tmp_path, 1).touch()
    with pytest.raises(CheckpointError, match="step-000000.*no such file; a replay needs every step"):
        Trajectory(tmp_path)

"""Runs with an EAGLE-3 drafter: records, replay, resume, and what the next run starts from."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from short_run import run

from megatron_rlspec.commands.convert import main
from megatron_rlspec.config import ConfigError
from megatron_rlspec.conversion.drafter_files import make_drafter
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records

# Without tis_clip, rounding of the engine's log-probs, which drafts change, does not reach the policy.
OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1, "train__steps": 2}
OPTIONS |= {"algorithm__tis_clip": 0}
EAGLE3 = {"drafter__kind": "eagle3", "drafter__lr": 1e-2, "drafter__loss": "forward_kl"}


@pytest.fixture(scope="module")
def path(start, tmp_path_factory) -> Path:
    """Return the directory of a fresh drafter."""
    folder = tmp_path_factory.mktemp("eagle3") / "drafter"
    make_drafter(start / "model", folder, 24)
    return folder


@pytest.fixture(scope="module")
def recorded(start, path, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    run(start, run_dir, **OPTIONS, **EAGLE3, drafter__path=path, train__record_gib=1)
    return run_dir


def same(ours: Path, theirs: Path) -> bool:
    (_, a), (_, b) = read_hf(ours), read_hf(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def test_a_run_leaves_policy_and_drafter(recorded, path):
    config, policy = read_hf(recorded / "hf")
    assert "eagle3" not in config and not any("eagle3" in name or "mtp" in name for name in policy)
    assert not same(recorded / "hf_drafter", path)
    ours, theirs = read_hf(recorded / "hf_drafter")[1], read_hf(path)[1]
    assert all(torch.equal(ours[name], theirs[name]) for name in ("d2t", "t2d"))
    records = read_records(recorded / "metrics.jsonl")
    assert all(r["rollout/accept_length"] >= 1 and r["drafter/covered_1"] > 0 for r in records)


def test_a_checkpoint_becomes_policy_and_drafter(recorded, tmp_path):
    checkpoint = str(recorded / "checkpoints/step-000002")
    assert main([checkpoint, str(tmp_path / "out")]) == 0
    assert same(tmp_path / "out", recorded / "hf") and same(tmp_path / "out_drafter", recorded / "hf_drafter")
    assert [read_hf(tmp_path / f"out{end}")[0] for end in ("", "_drafter")] == [
        read_hf(recorded / f"hf{end}")[0] for end in ("", "_drafter")
    ]
    shutil.copytree(checkpoint, tmp_path / "checkpoints/step-000002")
    shutil.copy(recorded / "config.json", tmp_path)
    layout = tmp_path / "checkpoints/step-000002/layout.json"
    layout.write_text(re.sub("words [0-9a-f]{8}", "words 00000000", layout.read_text()))
    with pytest.raises(ConfigError, match="drafts from other words"):
        main([str(layout.parent), str(tmp_path / "other")])


@pytest.mark.slow
def test_the_policy_is_that_of_a_run_with_mtp_and_a_resumed_run_is_the_same(recorded, start, path, tmp_path):
    run(start, tmp_path / "mtp", **OPTIONS)
    ours, theirs = read_hf(recorded / "hf")[1], read_hf(tmp_path / "mtp/hf")[1]
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    parts = {**OPTIONS, **EAGLE3, "drafter__path": path}
    run(start, tmp_path / "parts", **{**parts, "train__steps": 1})
    for name in ("hf", "hf_drafter"):
        shutil.rmtree(tmp_path / "parts" / name)
    run(start, tmp_path / "parts", **parts, train__resume="true")
    assert same(tmp_path / "parts/hf_drafter", recorded / "hf_drafter")
    assert same(tmp_path / "parts/hf", recorded / "hf")

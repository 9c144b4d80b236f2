"""Runs of a plain model that give it a drafter (`drafter.fresh`), which starts to draft when that pays."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from short_run import run, without_drafter

from megatron_rlspec.commands.convert import main
from megatron_rlspec.config import load
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run import fresh, identity

# Without tis_clip, rounding of the engine's log-probs, which drafts change, does not reach the policy.
OPTIONS = {"rollout__engine": "embedded", "algorithm__tis_clip": 0, "train__eval_prompts": 1, "train__steps": 8}
# train.deterministic: the fresh drafter's updates depend on no clock.
FRESH = {"drafter__fresh": "true", "train__deterministic": "true"}


@pytest.fixture(scope="module")
def plain(start, tmp_path_factory) -> Path:
    """Return a folder like `start`, whose model has no drafter."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "task").symlink_to(start / "task")
    without_drafter(start / "model", folder / "model")
    return folder


@pytest.fixture(scope="module")
def ended(plain, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("ended") / "run"
    options = OPTIONS | FRESH | {"drafter__lr": 1e-2, "drafter__warmup_steps": 0}
    run(plain, run_dir, module="given_costs", **options)
    return run_dir


@pytest.mark.slow
def test_a_run_drafts_when_that_pays_and_its_policy_is_that_of_a_run_without_a_drafter(plain, ended, tmp_path):
    records = read_records(ended / "metrics.jsonl")
    plain_steps = [record.get("spec/share_off", 0.0) > 0.5 for record in records]
    assert plain_steps[0] and not plain_steps[-1]
    run(plain, tmp_path, **OPTIONS, drafter__train="false", spec__mode="off")
    ours, theirs = (read_hf(folder / "hf")[1] for folder in (ended, tmp_path))
    assert set(theirs) <= set(ours) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    texts = [
        [(row["prompt"], row["response"]) for row in read_records(folder / "samples.jsonl")]
        for folder in (ended, tmp_path)
    ]
    assert texts[0] == texts[1] and len(texts[0]) > 8


def test_a_rank_says_what_it_waits_for(plain, tmp_path, monkeypatch, capsys):
    options = {"drafter.fresh": "true", "model.max_length": "256", "rollout.max_new_tokens": "64"}
    config = load(None, options | {"model.path": str(plain / "model"), "train.run_dir": str(tmp_path)})
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            (tmp_path / f"start-mtp-{identity.of_model(config.model.path)[:8]}").mkdir()

    monkeypatch.setattr(fresh.time, "sleep", sleep)
    monkeypatch.setattr(fresh, "SAY_AFTER", -1.0)
    monkeypatch.setenv("RANK", "1")
    fresh.with_fresh_drafter(config)
    said = capsys.readouterr().out
    assert said.count("which rank 0 writes; expected train.run_dir in a directory that all nodes share") == 1


@pytest.mark.slow
def test_the_start_holds_links_and_a_resumed_run_finds_it(plain, ended, tmp_path):
    (made,) = ended.glob("start-mtp-*")
    config, tensors = read_hf(made)
    assert config["architectures"] == ["MiMoForCausalLM"] and any("mtp_layers" in name for name in tensors)
    assert [path.is_symlink() for path in sorted(made.glob("*.safetensors"))] == [True, False]
    again = tmp_path / "run"
    options = OPTIONS | FRESH | {"drafter__lr": 1e-2, "drafter__warmup_steps": 0}
    run(plain, again, **options | {"train__steps": 2})
    shutil.rmtree(again / "hf")
    output = run(plain, again, **options, train__resume="true")
    assert "gets a fresh drafter" not in output and len(list(again.glob("start-*"))) == 1
    assert main([str(again / "checkpoints/step-000008"), str(tmp_path / "out")]) == 0
    for folder in (again / "hf", tmp_path / "out"):
        found, whole = read_hf(folder)[1], read_hf(ended / "hf")[1]
        assert set(found) == set(whole) and all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_a_model_gets_an_eagle3_drafter_on_two_ranks(plain, tmp_path):
    options = {**OPTIONS, **FRESH, "train__steps": 1, "drafter__kind": "eagle3"}
    run(plain, tmp_path / "run", ranks=2, **options)
    (made,) = (tmp_path / "run").glob("start-eagle3-*")
    ours, theirs = (read_hf(folder)[1] for folder in (tmp_path / "run/hf_drafter", made))
    assert ours.keys() == theirs.keys() and not torch.equal(ours["fc.weight"], theirs["fc.weight"])
    assert json.loads((tmp_path / "run/config.json").read_text())["model"]["path"] == str(plain / "model")


def test_a_model_with_a_drafter_is_refused(start, tmp_path):
    output = run(start, tmp_path / "run", code=2, **OPTIONS, drafter__fresh="true")
    assert "has a drafter; expected drafter.fresh=false" in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()

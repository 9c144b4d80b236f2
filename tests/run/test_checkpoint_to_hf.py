"""`rlspec convert RUN/checkpoints/step-N OUT` makes the model that the run would have written at that step."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from short_run import run

from megatron_rlspec.commands.convert import main
from megatron_rlspec.models.headers import read_object
from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records.recorder import read_records

OPTIONS = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1}


def same(ours: Path, theirs: Path) -> bool:
    (a, b), (c, d) = read_hf(ours), read_hf(theirs)
    return a == c and b.keys() == d.keys() and all(torch.equal(b[name], d[name]) for name in d)


@pytest.fixture(scope="module")
def ended(start, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("ended") / "run"
    run(start, run_dir, **OPTIONS, train__steps=2)
    return run_dir


def test_a_killed_run_becomes_a_model_that_transformers_loads(ended, start, tmp_path):
    shutil.copytree(ended, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))  # as after a kill before its end
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    assert main([str(checkpoint), str(tmp_path / "both")]) == 0
    assert same(tmp_path / "both", ended / "hf")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "both", output_loading_info=True)
    assert all("mtp" in name for name in told.pop("unexpected_keys")) and not any(told.values())
    expected = transformers.Qwen2ForCausalLM.from_pretrained(ended / "hf")
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    left = {file.name for file in (start / "model").iterdir() if "safetensors" not in file.name}
    assert left <= {file.name for file in (tmp_path / "both").iterdir()}


@pytest.mark.slow
def test_the_model_of_the_best_evaluation_is_kept(start, tmp_path):
    options = OPTIONS | {"train__eval_prompts": 4, "train__eval_every": 1}
    options |= {"train__export_every": 1, "train__save_best": "true", "optimizer__lr": 3e-2}
    run(start, tmp_path / "run", ranks=2, **options, train__steps=3)
    shutil.rmtree(tmp_path / "run/hf")  # as if the run had been interrupted here
    run(start, tmp_path / "run", ranks=2, **options, train__steps=4, train__resume="true")
    events = read_records(tmp_path / "run/events.jsonl")
    found = [e for e in events if e["kind"] == "evaluation" and e["name"] != "first"]
    names, rewards = [e["name"] for e in found], [e["reward"] for e in found]
    assert names == ["step-000001", "step-000002", "last", "step-000003", "last"]  # a resumed run evaluates its start
    told = [e["message"].split(":")[0] for e in events if e["kind"] == "best"]
    assert told == [name for i, name in enumerate(names) if all(rewards[i] > before for before in rewards[:i])]
    assert len(set(rewards)) > 1
    assert same(tmp_path / "run/hf-best", tmp_path / f"run/hf-step-{found[np.argmax(rewards)]['step']:06d}")


@pytest.mark.slow
def test_models_of_steps_are_kept_and_every_layout_of_ranks_is_read(start, tmp_path):
    """Four ranks, of which no two hold the same shards but for the data-parallel ones."""
    options = OPTIONS | {"parallel__pipeline": 2, "optimizer__distributed": "true", "train__export_every": 1}
    run(start, tmp_path / "run", ranks=4, **options, train__steps=2)
    assert read_object(tmp_path / "run/checkpoints/step-000002/layout.json")["replicas"] == 2
    assert sorted(path.name for path in (tmp_path / "run").glob("hf*")) == ["hf", "hf-step-000001", "hf-step-000002"]
    assert same(tmp_path / "run/hf-step-000002", tmp_path / "run/hf")
    for step in (1, 2):
        assert main([str(tmp_path / f"run/checkpoints/step-00000{step}"), str(tmp_path / f"out{step}")]) == 0
        assert same(tmp_path / f"out{step}", tmp_path / f"run/hf-step-00000{step}")


@pytest.mark.slow
def test_shards_of_tensor_parallel_ranks_are_joined(start, tmp_path):
    layout = {"parallel__tensor": 2, "parallel__sequence": "true", "optimizer__distributed": "true"}
    run(start, tmp_path / "run", ranks=2, **OPTIONS, **layout, train__steps=1)
    assert main([str(tmp_path / "run/checkpoints/step-000001"), str(tmp_path / "out")]) == 0
    assert same(tmp_path / "out", tmp_path / "run/hf")

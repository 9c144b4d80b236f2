"""RL runs of a Qwen2 with YaRN: trainer and engine agree about every token, and a resumed run is the same."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from short_run import finish, run, train

from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.records.recorder import read_records

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
FRESH = {"drafter__fresh": "true", "drafter__kind": "eagle3", "drafter__lr": "1e-2", "drafter__warmup_steps": 0}


@pytest.fixture(scope="module")
def model(start, tmp_path_factory) -> Path:
    """Return the directory of a plain Qwen2 with the quickstart's decoder and YaRN over 8 times 32 tokens."""
    config, tensors = read_hf(start / "model")
    config |= {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0, "rope_scaling": YARN}
    config["max_position_embeddings"] = 256
    kept = {name: tensors[name] * (4 if "q_proj.weight" in name else 1) for name in tensors if "mtp" not in name}
    folder = tmp_path_factory.mktemp("yarn") / "qwen2"
    write_hf(folder, config, kept, tokenizer_from=start / "model")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_run_with_yarn_trains_pushes_and_resumes(engine, start, model, tmp_path):
    options = {**FRESH, "model__path": model, "rollout__engine": engine, "algorithm__tis_clip": 0}
    options["model__max_length"] = 250  # SGLang keeps 6 of the model's 256 tokens for drafts
    if engine == "embedded":
        run(start, tmp_path / "whole", train__steps=2, **options)
    finish(train(start, tmp_path / "parts", train__steps=1, **options))
    for name in ("hf", "hf_drafter"):
        shutil.rmtree(tmp_path / "parts" / name)
    finish(train(start, tmp_path / "parts", train__steps=2, train__resume="true", **options))
    records = read_records(tmp_path / "parts/metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        assert record["push/failed_engines"] == 0 and record["drafter/grad_norm"] > 0
        assert record["policy/train_rollout_logprob_abs_diff"] < 1e-4
    assert not [event for event in read_records(tmp_path / "parts/events.jsonl") if event["kind"] == "health"]
    (drafter,) = (tmp_path / "parts").glob("start-eagle3-*")
    for folder in (tmp_path / "parts/hf", drafter):
        assert json.loads((folder / "config.json").read_text())["rope_scaling"] == YARN
    if engine == "embedded":
        for name in ("hf", "hf_drafter"):
            ours, theirs = (read_hf(tmp_path / part / name)[1] for part in ("whole", "parts"))
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs) and ours.keys() == theirs.keys()

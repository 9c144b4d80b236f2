"""Runs of a small GLM4-MoE on two ranks, with whole experts and with experts split over the ranks."""

import json
import shutil

import pytest
import torch
from moe_oracles import GLM4_MOE, checkpoint
from short_run import finish, run, train

from megatron_rlspec.commands.convert import main
from megatron_rlspec.models.hf_files import read_hf, write_hf
from megatron_rlspec.records.recorder import read_records

OPTIONS = {"sft__samples_per_step": 4, "sft__eval_every": 0, "sft__held_out": 0, "sft__drafter_only": "false"}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def mixture(start, tmp_path_factory):
    """Make the task with a mixture of experts in place of its model, and the same tokenizer."""
    folder = tmp_path_factory.mktemp("mixture")
    shutil.copytree(start / "task", folder / "task")
    dense = json.loads((start / "model/config.json").read_text())
    same = ("vocab_size", "eos_token_id", "max_position_embeddings")
    config = GLM4_MOE | SMALL | {name: dense[name] for name in same}
    write_hf(folder / "model", config, checkpoint(config, folder / "made"))
    for file in (start / "model").iterdir():
        if not (folder / "model" / file.name).exists() and "safetensors" not in file.name:
            shutil.copy(file, folder / "model")
    return folder


def sft(mixture, run_dir, steps, expert, **options):
    given = {"sft__path": mixture / "task/train.jsonl", "sft__steps": steps, "parallel__expert": expert}
    return run(mixture, run_dir, ranks=2, command="sft", **OPTIONS | given | options)


@pytest.mark.slow
def test_split_experts_learn_what_whole_ones_do_and_resume(mixture, tmp_path):
    whole, split, again = (tmp_path / name for name in ("whole", "split", "again"))
    sft(mixture, whole, 3, 1)
    sft(mixture, split, 3, 2)
    ours, theirs = (read_records(folder / "metrics.jsonl") for folder in (split, whole))
    for a, b in zip(ours, theirs, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "drafter/grad_norm", "drafter/objective"):
            assert a[name] == pytest.approx(b[name], rel=1e-3), name
    ours, theirs, before = (read_hf(folder)[1] for folder in (split / "hf", whole / "hf", mixture / "model"))
    assert set(ours) == set(theirs)
    learnt, gap = (sum(float((ours[n] - other[n]).square().sum()) for n in ours) for other in (before, theirs))
    assert gap < 1e-4 * learnt  # float32; where a gradient is almost 0, Adam's first steps follow its rounding
    assert len([name for name in ours if ".mlp.experts." in name]) == 2 * 4 * 3  # a layer and the drafter, gate up down

    assert main([str(split / "checkpoints/step-000003"), str(tmp_path / "converted")]) == 0
    converted = read_hf(tmp_path / "converted")[1]
    assert set(ours) <= set(converted) and all(torch.equal(converted[name], ours[name]) for name in ours)

    sft(mixture, again, 2, 2)
    shutil.rmtree(again / "hf")  # as if the run had been interrupted here
    told = sft(mixture, again, 3, 1, code=2, train__resume="true").strip().splitlines()
    assert len([line for line in told if "was written with expert=2, but this run has 1" in line]) == 1
    sft(mixture, again, 3, 2, train__resume="true")
    for file in (split / "hf").glob("*.safetensors"):
        assert file.read_bytes() == (again / "hf" / file.name).read_bytes(), file.name


@pytest.mark.slow
def test_a_mixture_goes_through_rl_with_split_experts_and_a_real_engine(mixture, tmp_path):
    """Warm start, then GRPO with SGLang's engine: the reward rises, and pushes are whole."""
    sft(mixture, tmp_path / "warm", 40, 2, optimizer__lr="3e-3", drafter__lr="3e-3")
    options = {"model__path": tmp_path / "warm/hf", "parallel__expert": 2, "spec__mode": "fixed", "drafter__lr": "1e-2"}
    options |= {"reward__kind": "run_reward:share_of_ones", "train__steps": 16}
    finish(train(mixture, tmp_path / "whole", ranks=2, **options))
    records = read_records(tmp_path / "whole/metrics.jsonl")
    tensors = read_hf(tmp_path / "whole/hf")[1]
    for record in records:
        assert record["push/failed_engines"] == 0 and record["push/tensors"] == len(tensors)
        assert record["policy/train_rollout_logprob_abs_diff"] < 1e-3 and record["drafter/grad_norm"] > 0
    reward = [record["rollout/reward"] for record in records]
    assert sum(reward[-4:]) > 4 * sum(reward[:4]), reward
    assert records[-1]["drafter/loss_1"] < records[0]["drafter/loss_1"]
    assert max(record["spec/verified_tokens"] for record in records) > 1
    events = read_records(tmp_path / "whole/events.jsonl")
    assert not [event for event in events if event["kind"] == "health"]

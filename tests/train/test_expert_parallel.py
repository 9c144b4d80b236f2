"""Expert parallelism in the trainer: GLM4-MoE whose experts are split over ranks learns as with whole experts."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from test_experts import SMALL, build, check_isolation, data_of, isolation, made
from train_ranks import digest, moments, on_ranks

from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.train import experts

# Gradients are float64 and differ by the order of sums only. Megatron sums their squares in float32. The norm, and what
# it clips, carries that rounding of 6e-8 on.
CLOSE = 1e-6
# Clipping takes effect, so a wrong norm changes every weight.
CLIPPED = {"optimizer": {"lr": 1e-2, "clip_grad": 0.05}, "drafter": {"lr": 1e-2}}
EXACT = {"dtype": "float64"}
SPLIT = {
    "expert": {"expert": 2},
    "expert and context": {"expert": 2, "context": 2},
    "expert and tensor": {"expert": 2, "tensor": 2, "sequence": True},
    "expert and pipeline": {"expert": 2, "pipeline": 2},
}


def trained(weights, parallel, hf=SMALL, **sections):
    """Train three GRPO steps from these weights; return each step's metrics, the export, and digests of the shards."""
    trainer = build(hf, parallel=parallel, **{"model": EXACT} | {k: dict(v) for k, v in CLIPPED.items()} | sections)
    trainer.load_hf(weights)
    loaded = {name: tensor.clone() for name, tensor in trainer.export()}
    metrics = [trainer.train_step(data_of(trainer, seed, budget=160), objective="grpo") for seed in range(3)]
    return {
        "metrics": metrics,
        "loaded": loaded,
        "exported": dict(trainer.export()),
        "dense": dense_bits(trainer),
        "experts": digest(p for _, p, is_expert in parameters(trainer) if is_expert),
        "policy": digest([*trainer.policy.parameters(), *experts.biases(trainer.policy).values()]),
    }


def parameters(trainer):
    for learner in trainer.learners().values():
        for name, parameter in learner.ddp.module.named_parameters():
            yield name, parameter, ".mlp.experts." in name


def dense_bits(trainer):
    """Return digests of all tensors except experts, from the ranks of one tensor- and pipeline-parallel position."""
    mine = digest(parameter for _, parameter, is_expert in parameters(trainer) if not is_expert)
    group = ps.get_data_parallel_group(with_context_parallel=True)
    everyone = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def whole_and_split(weights, names):
    """Train each layout with expert 1 and with its own `expert`."""
    return {name: (trained(weights, SPLIT[name] | {"expert": 1}), trained(weights, SPLIT[name])) for name in names}


def far(ours, theirs):
    """Return the largest difference of two dictionaries of tensors, relative to each tensor's norm."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - t).double().norm() / t.double().norm().clamp(min=1e-30)) for n, t in theirs.items())


def compare(weights, size, names):
    ranks = on_ranks(size, whole_and_split, weights, names)
    for name in names:
        for rank in ranks:
            whole, split = rank[name]
            assert len(set(split["dense"])) == 1, f"{name}: replicas have drifted apart"
            assert split["metrics"] == ranks[0][name][1]["metrics"], f"{name}: ranks disagree"
            for ours, theirs in zip(split["metrics"], whole["metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=CLOSE, abs=CLOSE), name
            assert whole["metrics"][0]["policy/grad_norm"] > 0.05 < whole["metrics"][0]["drafter/grad_norm"]
        whole, split = ranks[0][name]
        assert split["loaded"].keys() == whole["loaded"].keys()
        assert all(torch.equal(split["loaded"][n], t) for n, t in whole["loaded"].items()), f"{name}: export"
        assert far(split["exported"], whole["exported"]) < CLOSE, name
        assert far(split["exported"], split["loaded"]) > 1e-3, "nothing was learnt"
        assert any("mlp.experts.3." in n for n in split["exported"])


@pytest.fixture(scope="module")
def weights():
    (found,) = on_ranks(1, made)
    return {name: tensor.double() for name, tensor in found.items()}


@pytest.mark.slow
def test_two_ranks_learn_as_with_whole_experts(weights):
    compare(weights, 2, ["expert and context"])


@pytest.mark.slow
def test_four_ranks_learn_as_with_whole_experts(weights):
    compare(weights, 4, ["expert and tensor", "expert and pipeline", "expert"])


# ---- checkpoints, isolation -----------------------------------------------------------------------------------------


def states(trainer):
    """Return the digest of all that this rank's next step depends on."""
    found = []
    for learner in trainer.learners().values():
        for part in learner.parts:
            found += [parameter for group in part.groups for parameter in group["params"]]
            found += moments(part.optimizer.optimizer) if part.groups else []
        found += [*learner.ddp.module.parameters(), *experts.biases(learner.ddp.module).values()]
    return digest(found)


def resumed(folder):
    sections = {k: dict(v) for k, v in CLIPPED.items()}
    sections["optimizer"]["distributed"] = True
    trainer = build(parallel={"expert": 2}, **sections)
    data = data_of(trainer, budget=160)
    trainer.train_step(data, objective="grpo")
    trainer.save(folder / "checkpoint")
    saved = states(trainer)
    trainer.train_step(data, objective="grpo")
    again = build(parallel={"expert": 2}, **sections)
    again.load(folder / "checkpoint")
    loaded = states(again)
    again.train_step(data, objective="grpo")
    again.save(folder / "again/step")
    trainer.save(folder / "through/step")
    try:
        build(**sections).load(folder / "checkpoint")
        refused = ""
    except CheckpointError as error:
        refused = str(error)
    return loaded == saved, states(again) == states(trainer), digest(again.policy.parameters()), refused


def test_resume_gives_every_rank_its_own_experts(tmp_path):
    first, second = on_ranks(2, resumed, tmp_path)
    assert first[:2] == second[:2] == (True, True)
    assert first[2] != second[2], "both ranks hold the same experts"
    assert "written with expert=2, but this run has 1" in first[3] and "\n" not in first[3]
    assert json.loads((tmp_path / "checkpoint/layout.json").read_text())["expert"] == 2
    names = sorted(p.name for p in (tmp_path / "checkpoint").glob("policy-experts*"))
    assert [n.split("-")[3] for n in names] == ["expert0", "expert1"]
    for file in (tmp_path / "again/step").iterdir():
        assert file.read_bytes() == (tmp_path / "through/step" / file.name).read_bytes(), file.name


def test_policy_is_the_same_with_and_without_drafter():
    check_isolation(on_ranks(2, partial(isolation, parallel={"expert": 2})))

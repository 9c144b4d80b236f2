"""What a trainer loads from a checkpoint and reads from its configuration, and what it refuses."""

import forked
import pytest
import torch
from moe_oracles import GLM4_MOE
from test_parallel_equality import PLAIN, build, own_batches
from train_ranks import HF_CONFIG, config, digest, on_ranks

from megatron_rlspec.config import ConfigError
from megatron_rlspec.train import model, runtime

CELL = PLAIN | {"dtype": "float32"}


def loading():
    trainer = build(CELL)
    weights = dict(trainer.export())
    seen = {}
    target = {name: tensor for name, tensor in weights.items() if "mtp" not in name}
    assert set(target) == set(dict(trainer.export("target")))
    assert set(weights) - set(target) == set(dict(trainer.export("drafter")))
    for name, tensors in {"drafter": target, "shape": weights | {"model.norm.weight": torch.ones(3)}}.items():
        with pytest.raises(ValueError) as caught:
            trainer.load_hf(tensors)
        seen[name] = str(caught.value)
    before = digest(trainer.drafter.parameters())
    trainer.load_hf({name: tensor + 1 for name, tensor in target.items()}, fresh_drafter=True)
    seen["kept"] = digest(trainer.drafter.parameters()) == before
    seen["loaded"] = all(torch.equal(t, target[n] + 1) for n, t in trainer.export("target"))
    return seen


def test_load_names_the_missing_tensor():
    (seen,) = on_ranks(1, loading)
    assert "no model.mtp_layers.0." in seen["drafter"] and "fresh" in seen["drafter"]
    assert "model.norm.weight" in seen["shape"] and "[3]" in seen["shape"] and "[32]" in seen["shape"]
    assert seen["kept"] and seen["loaded"]


def initialisations():
    """Return policy and drafter as constructed, and the random state after that."""
    out = {}
    for name, how in {"with": {}, "without": {"drafter": False}}.items():
        trainer = build(CELL, **how)
        out[name] = digest(trainer.policy.parameters()), digest([torch.get_rng_state()])
        if trainer.drafter is not None:
            out["drafter"] = digest(trainer.drafter.parameters())
    return out


def test_the_drafters_initialisation_draws_from_a_stream_of_its_own():
    first, second = (on_ranks(1, initialisations)[0] for _ in range(2))
    assert first["with"] == first["without"]
    assert first == second


REFUSED = {
    "expert parallel": ({}, {"expert": 2}, "parallel.expert=2"),
    "weights": (GLM4_MOE | {"norm_topk_prob": False}, {}, "norm_topk_prob=false"),
    "groups of experts": (GLM4_MOE | {"n_group": 2, "topk_group": 2}, {}, "2 for each of topk_group"),
    "no sequence": (GLM4_MOE, {"tensor": 2}, "need parallel.sequence=true"),
    "groups": ({"num_key_value_heads": 1}, {"tensor": 2}, "num_key_value_heads=1"),
    "layers": ({}, {"pipeline": 3}, "num_hidden_layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_would_be_ignored_are_refused(case):
    changes, parallel, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        made = config(parallel=parallel)
        model.transformer_config(HF_CONFIG | changes, made.model, made.parallel)


def test_float64_is_refused_under_transformer_engine(monkeypatch):
    exact = config(model={"dtype": "float64"})
    monkeypatch.setattr(runtime, "has_transformer_engine", lambda: True)
    model.check_model(HF_CONFIG, exact.model, exact.parallel)
    monkeypatch.setattr(runtime, "device", lambda: torch.device("cuda", 0))
    model.check_model(HF_CONFIG, config(model={"dtype": "float32"}).model, exact.parallel)
    with pytest.raises(ConfigError, match=r"^model.dtype=float64: Transformer Engine has no float64; use bfloat16$"):
        model.check_model(HF_CONFIG, exact.model, exact.parallel)


@pytest.mark.parametrize(
    ("parallel", "ranks", "message"),
    [
        ({"context": 2}, 3, "needs a multiple of 2 ranks, but 3"),
        ({"expert": 3}, 8, "parallel.expert=3 must divide the 8 ranks that share experts: 8 ranks /"),
    ],
)
def test_ranks_must_fit_the_layout(parallel, ranks, message):
    with pytest.raises(ConfigError, match=message):
        config(parallel=parallel, model={"path": "model"}, data={"path": "rows"}).check_run("train", ranks)


def nothing_trained():
    """Train steps in which some, or all, micro-batches have no trained token."""
    trainer = build(CELL)
    batches = own_batches(trainer)
    for field in ("loss_mask", "policy_weight"):
        getattr(batches[0], field).zero_()
    for mask in batches[0].drafter_mask:
        mask.zero_()
    part = trainer.train_step(batches, objective="grpo")
    whole = trainer.train_step(batches[:1], objective="grpo")
    return part, whole


def test_a_batch_without_trained_tokens_contributes_nothing():
    ((part, whole),) = on_ranks(1, nothing_trained)
    assert all(value == value for value in {**part, **whole}.values()), "not a number"
    assert whole["policy/loss"] == 0 and whole["policy/grad_norm"] == 0
    assert whole["drafter/objective"] == 0 and whole["drafter/grad_norm"] == 0
    assert part["policy/tokens"] > 0


PROGRAM = """
import os
import psutil
from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.train import runtime

runtime.set_launch_env()
runtime.init_distributed(ParallelConfig())
listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print([place.ip for place in listening if place.port == int(os.environ["MASTER_PORT"])])
"""


def test_the_store_of_a_single_process_listens_on_loopback_only(tmp_path):
    (tmp_path / "a_single_process.py").write_text(PROGRAM)
    ended = forked.run_module("a_single_process", [], folder=tmp_path)
    assert ended.stdout.splitlines()[-1:] == ["['127.0.0.1']"], ended.stdout + ended.stderr

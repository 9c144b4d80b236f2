"""`CoTrainer` in examples/own_trainer/train.py: a plain megatron-core model, a real engine, on a CPU."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.speculation.acceptance import accept_length, pooled
from megatron_rlspec.types import Prompt, Request, SpecConfig

HERE = Path(__file__).parent
sys.path += [str(HERE / "rollout"), str(HERE.parent / "examples/own_trainer")]
import tiny_mimo  # noqa: E402
import train  # noqa: E402

SHAPE = tiny_mimo.config(hidden=32, layers=4, heads=2, kv_heads=1, ffn=64, vocab=64)
SERVE = "--device cpu --dtype float32 --max-total-tokens 8192 --max-running-requests 64 --candidate-steps 0,1,3"
STEPS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_mimo.write(tmp_path_factory.mktemp("own") / "model", SHAPE, tiny_mimo.weights(SHAPE)))


def accepted(engine):
    """Return the accept length of 3 drafts a round, of the weights that the engine has."""
    engine.set_config(SpecConfig(3))
    requests = [Request(f"last-{i:05d}", Prompt(i, torch.arange(3, 9).numpy()), seed=i) for i in range(64)]
    return accept_length(pooled(sample.accepted for sample in engine.generate(requests, train.SAMPLING)))


def trained_alone(model, rollouts):
    """Train a policy on the same rollouts, without the class."""
    policy = train.load_policy(model)
    optimizer = torch.optim.Adam(policy.parameters(), train.LEARNING_RATE)
    for samples in rollouts:
        train.train_policy(policy, optimizer, samples)
    return policy


@pytest.mark.slow
def test_the_drafter_learns_beside_a_plain_trainer_and_changes_no_bit_of_its_policy(model, tmp_path, monkeypatch):
    monkeypatch.setenv("RLSPEC_API_KEY", "of-this-test")
    lengths = {}
    with launch(model, tmp_path / "log", arguments=SERVE.split()) as process:
        engine = SGLangEngine.of(process.wait(), timeout=300)
        for learns in (True, False):
            policy, cotrainer, rollouts = train.run(model, process.url, STEPS, learns)
            lengths[learns] = accepted(engine)
            rewards = [np.mean([train.reward(sample) for sample in samples]) for samples in rollouts]
            assert rewards[-1] > rewards[0] + 0.2
            for name, parameter in trained_alone(model, rollouts).named_parameters():
                assert torch.equal(policy.get_parameter(name), parameter)
            before = tiny_mimo.weights(SHAPE)
            same = [torch.equal(tensor, before[name]) for name, tensor in cotrainer._export("drafter")]
            assert not any(same) if learns else all(same)
    assert lengths[True] > lengths[False] + 0.2

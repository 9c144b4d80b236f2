"""Policy parameters, gradients and optimizer state are bit-identical with and without a drafter, on three ranks.

On two ranks the test could not fail: a + b = b + a. The controls do what other packages do, and they must differ.
"""

import math
import os

import pytest
import torch
from test_parallel_equality import PLAIN, build, own_batches, state
from train_ranks import digest, on_ranks

from megatron_rlspec.train import model

CELL = PLAIN | {"dtype": "float32", "objective": "sft"}

# On a CPU `offload` runs Megatron's functions, which move nothing there.
VARIANTS = {
    "plain": CELL,
    "distributed": CELL | {"distributed": True},
    "offloaded": CELL | {"dtype": "bfloat16", "distributed": True, "offload": True},
}


def five_steps(trainer, objective="sft", releases=False):
    for seed in range(5):
        if releases:  # as while engines on the same GPUs generate
            for learner in trainer.learners().values():
                learner.release_memory()
            assert all(p.main_grad.untyped_storage().nbytes() == 0 for p in trainer.policy.parameters())
        metrics = trainer.train_step(own_batches(trainer, seed), objective=objective)
    return metrics


def isolation():
    """Return digests of several variants of one run, in one job."""
    out = {}
    for name, cell in VARIANTS.items():
        for drafter in (True, False):
            trainer = build(cell, drafter=drafter, clip=0.3)
            metrics = five_steps(trainer)
            out[name, drafter] = state(trainer)
            assert metrics["policy/grad_norm"] > 0.3, "the clip must act for this test to mean anything"
            if drafter:
                out[name, "drafter"] = metrics["drafter/grad_norm"]
            trainer = build(cell, drafter=drafter, clip=0.3)
            five_steps(trainer, releases=True)
            out[name, drafter, "released"] = state(trainer)

    # Control 1: one clip for both.
    trainer = build(CELL, clip=0.3)
    policy = trainer.learner.optimizer
    drafter = trainer.drafter_learner

    def joint_norm(own=policy.get_grad_norm):
        drafter.finalize()
        drafter.finalize = lambda: None
        drafter.optimizer.prepare_grads()
        return math.hypot(own(), drafter.optimizer.get_grad_norm())

    policy.get_grad_norm = joint_norm
    trainer.train_step(own_batches(trainer), objective="sft")
    out["joint clip"] = state(trainer)
    trainer = build(CELL, clip=0.3)
    trainer.train_step(own_batches(trainer), objective="sft")
    out["own clip"] = state(trainer)

    # Control 2: the drafter's parameters are in the policy's gradient buffer. Their gradient there is 0.
    original = model.Policy.__init__

    def crowded(self, *args):
        original(self, *args)
        self.register_parameter("drafter", torch.nn.Parameter(torch.zeros(9157)))

    model.Policy.__init__ = crowded
    trainer = build(CELL, drafter=False, clip=0.3)
    model.Policy.__init__ = original
    head = trainer.policy.head_weight
    trainer.policy.head_weight = lambda: head() + 0 * trainer.policy.drafter.sum()
    five_steps(trainer)
    out["crowded"] = digest([p for name, p in trainer.policy.named_parameters() if name != "drafter"])
    trainer = build(CELL, drafter=False, clip=0.3)
    five_steps(trainer)
    out["alone"] = digest(trainer.policy.parameters())
    return out


@pytest.fixture(scope="module")
def three():
    return on_ranks(3, isolation)


@pytest.mark.parametrize("variant", VARIANTS)
def test_policy_is_the_same_with_and_without_drafter(three, variant):
    for rank in three:
        assert rank[variant, True] == rank[variant, False]
        assert rank[variant, "drafter"] > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_that_was_released_between_steps_changes_no_bit(three, variant):
    for rank in three:
        for drafter in (True, False):
            assert rank[variant, drafter, "released"] == rank[variant, drafter]


def test_a_joint_clip_and_a_shared_buffer_change_the_policy(three):
    assert all(rank["joint clip"] != rank["own clip"] and rank["crowded"] != rank["alone"] for rank in three)


def broken_batch(drafter):
    """Train a step whose policy loss is infinite, between two good ones."""
    trainer = build(CELL | {"objective": "grpo"}, drafter=drafter)
    data = own_batches(trainer)
    trainer.train_step(data, objective="grpo")
    before = digest(trainer.policy.parameters())
    data[0].advantages.fill_(float("inf"))
    metrics = trainer.train_step(data, objective="grpo")
    parameters = digest(trainer.policy.parameters())
    after = trainer.train_step(own_batches(trainer), objective="grpo")
    later = digest(trainer.policy.parameters())
    with torch.no_grad():
        next(iter(trainer.policy.parameters())).fill_(float("nan"))
    predictions = [trainer.prediction]
    trainer.train_step(own_batches(trainer), objective="grpo")
    return before, metrics, parameters, later, after, [*predictions, trainer.prediction]


def test_a_loss_that_is_not_finite_skips_the_policys_step_only():
    ((before, metrics, parameters, later, after, (prediction, of_nan)),) = on_ranks(1, broken_batch, True)
    assert metrics["policy/skipped"] == 1 and not math.isfinite(metrics["policy/loss"])
    assert metrics["drafter/skipped"] == 0 and math.isfinite(metrics["drafter/objective"])
    assert before == parameters != later and after["policy/skipped"] == 0 and math.isfinite(after["policy/loss"])
    assert prediction is not None and of_nan is None


def samples_of_another_model():
    """Train on samples whose log-probs differ from the policy's by more than is allowed."""
    trainer = build(CELL | {"objective": "grpo"})
    data = own_batches(trainer)
    before = digest(trainer.policy.parameters())
    gap = "policy/train_rollout_logprob_abs_diff"
    refused = trainer.train_step(data, objective="grpo", logprob_gap=0.01)
    assert refused["policy/skipped"] == 1 and refused["drafter/skipped"] == 0 and refused[gap] > 0.01
    assert digest(trainer.policy.parameters()) == before
    allowed = trainer.train_step(data, objective="grpo", logprob_gap=refused[gap] * 1.01)
    assert allowed["policy/skipped"] == 0 and digest(trainer.policy.parameters()) != before


def test_samples_of_another_model_are_not_trained_on():
    on_ranks(1, samples_of_another_model)


def modes():
    """Return which parameters each mode changes, and the gradients that reach the policy."""
    out = {}
    for name, how in {"both": {}, "drafter": {"train_policy": False}}.items():
        trainer = build(CELL)
        before = digest(trainer.policy.parameters()), digest(trainer.drafter.parameters())
        metrics = trainer.train_step(own_batches(trainer), objective="sft", **how)
        after = digest(trainer.policy.parameters()), digest(trainer.drafter.parameters())
        out[name] = (
            [a != b for a, b in zip(before, after, strict=True)],
            "policy/loss" in metrics,
            trainer.learner.steps,
        )
    return out


def test_drafter_only_training_keeps_the_policy():
    (seen,) = on_ranks(1, modes)
    assert seen["both"] == ([True, True], True, 1)
    assert seen["drafter"] == ([False, True], False, 0)


def deterministic(length: int) -> tuple[list[str], bool, list[str | None]]:
    """Return the digests of `test_gpu.long_policies` on a CPU, torch's mode, and the variables of the libraries."""
    from test_gpu import long_policies

    found = long_policies({"dtype": "float32", "deterministic": True}, length)
    names = "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return found, strict, [os.environ.get(name) for name in names]


@pytest.mark.slow
def test_train_deterministic_asks_every_library_for_one_order():
    """Under `warn_only` torch's flash attention would go on adding in any order."""
    [((alone, again, beside), strict, variables)] = on_ranks(1, deterministic, 48)
    assert alone == again == beside and strict and variables == [":4096:8", "0"]

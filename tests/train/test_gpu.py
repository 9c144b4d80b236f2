"""The trainer on one GPU: the numbers of the CPU, and a policy that no drafter moves."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from test_parallel_equality import PLAIN, TOLERANCE, build, make_weights, measure, own_batches, state
from train_ranks import on_ranks, samples

from megatron_rlspec.train import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CELLS = {
    "plain": {},
    "tied": {"tied": True, "unrolling": 1, "objective": "sft"},
    "recomputed": {"unrolling": 2, "loss": "forward_kl", "recompute": True},
    "forward KL": {"unrolling": 2, "loss": "forward_kl", "ratio": "sequence"},
}


def measured(device: str, cell: dict[str, Any], weights: Any) -> dict[str, Any]:
    """Return what `measure` does, and the kind of device that it ran on."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return {**measure(cell, weights), "device": runtime.device().type}


@pytest.mark.skipif(runtime.has_transformer_engine(), reason="Transformer Engine has no float64")
@pytest.mark.parametrize("name", CELLS)
def test_a_step_is_the_one_of_the_cpu(name: str) -> None:
    cell = PLAIN | {"dtype": "float64"} | CELLS[name]
    [weights] = on_ranks(1, make_weights, [cell])
    [cpu] = on_ranks(1, measured, "cpu", cell, weights)
    [gpu] = on_ranks(1, measured, "cuda", cell, weights)
    assert (cpu["device"], gpu["device"]) == ("cpu", "cuda")
    assert gpu["same"] and gpu["exported"] == cpu["exported"]
    assert gpu["policy"] == gpu["policy_alone"], "the drafter moved the policy"
    # The angles of rotary embeddings are float32 everywhere, and a GPU rounds their cosines otherwise.
    first, later, gradient = TOLERANCE["float32"]
    assert gpu["logprobs"] == pytest.approx(cpu["logprobs"], rel=first)
    for ours, reference, allowed in zip(gpu["steps"], cpu["steps"], (first, later), strict=True):
        assert ours == pytest.approx(reference, rel=allowed, abs=allowed)
    for key, expected in cpu["gradients"].items():
        largest = expected.abs().max().clamp_min(1e-30)
        assert (gpu["gradients"][key] - expected).abs().max() <= gradient * largest, key


def policies(dtype: str, objective: str) -> list[str]:
    """Return digests of policy and optimizer after five steps: with a drafter, without, and with one, again."""
    found = []
    for drafter in (True, False, True):
        trainer = build(PLAIN | {"dtype": dtype, "objective": objective}, drafter=drafter, clip=0.3)
        for seed in range(5):
            metrics = trainer.train_step(own_batches(trainer, seed), objective=objective)
        assert metrics["policy/grad_norm"] > 0.3, "the clip must act"
        found.append(state(trainer))
    return found


@pytest.mark.parametrize("objective", ["sft", "grpo"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_policy_is_the_same_with_and_without_drafter(dtype: str, objective: str) -> None:
    [(first, without, again)] = on_ranks(1, policies, dtype, objective)
    assert first == without == again


def offloaded() -> tuple[list[str], list[int]]:
    """Return digests after three steps, without and with `optimizer.offload`, and the bytes that each release freed."""
    digests = []
    freed = []
    for offload in (False, True):
        trainer = build(PLAIN | {"dtype": "bfloat16", "offload": offload})
        for seed in range(3):
            trainer.train_step(own_batches(trainer, seed), objective="sft")
            before = torch.cuda.memory_allocated()
            for learner in trainer.learners().values():
                learner.release_memory()
            freed.append(before - torch.cuda.memory_allocated())
        digests.append(state(trainer))
    return digests, freed


def test_an_optimizer_in_host_memory_changes_no_bit_and_frees_the_gpu() -> None:
    [((without, with_offload), freed)] = on_ranks(1, offloaded)
    assert without == with_offload
    assert min(freed[3:]) > 2 * max(freed[:3]), "float32 weights and two moments are three times the gradients"


def long_policies(cell: dict[str, Any], length: int) -> list[str]:
    """Return digests of policy and optimizer after three steps on long samples: twice without a drafter, once with."""
    found = []
    for drafter in (False, False, True):
        trainer = build(PLAIN | cell, drafter=drafter, clip=0.03)
        for seed in range(3):
            made = samples(2, seed, shortest=length, longest=length)
            metrics = trainer.train_step(own_batches(trainer, seed, 2 * length, made), objective="grpo")
        assert metrics["policy/grad_norm"] > 0.03, "the clip must act"
        found.append(state(trainer))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_policy_is_the_same_at_the_length_of_real_samples(dtype: str) -> None:
    """At 4,096 tokens attention's backward adds over many blocks. The control is two runs without a drafter."""
    cell = {"dtype": dtype, "deterministic": True}
    [(alone, again, beside)] = on_ranks(1, long_policies, cell, 4096)
    assert alone == again, "two runs without a drafter differ: a kernel adds in any order"
    assert alone == beside, "the drafter moved the policy"

"""Simulated RL steps: what runs beside what, and a drafter that drifts and learns."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_rlspec.extensions.simulator.cluster import Cluster, Policies, Workload
from megatron_rlspec.extensions.simulator.hardware import ModelSizes, hardware_table
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, LengthModel
from megatron_rlspec.extensions.simulator.step import Training, steps

ACCEPTANCE = AcceptanceModel(np.array([[0.9, 0.85, 0.8], [0.5, 0.4, 0.3]]), 0.8, np.array([0.4, 0.7]))
CLUSTER = Cluster(hardware_table("A40", ModelSizes(), (2,), (1, 3)), 2, 2)
WORKLOAD = Workload(LengthModel(5.0, 0.5), ACCEPTANCE, prompts=4, samples=4, prompt_tokens=50, cap=600)


PUSH = Training().push


def parts(step):
    """Seconds for rewards and log-probabilities, and for the policy's update, of a step with `train=1000`."""
    tokens = step.trace.tokens + 4 * 4 * 50
    return tokens * 6e-6, tokens * 1e-3


def run(policies, count=4, **options):
    return steps(CLUSTER, WORKLOAD, Policies.of(policies), replace(Training(train=1000.0), **options), count, 0)


def test_a_step_is_the_sum_of_its_parts_and_a_stale_one_the_longer_of_two():
    fresh, stale, shared = run("k3+kd"), run("k3+kd", staleness=1), run("k3+kd", colocated=True)
    for a, b, c in zip(fresh.steps, stale.steps, shared.steps, strict=True):
        score, train = parts(a)
        assert a.seconds == pytest.approx(a.generate + score + 1.2 * train + PUSH)
        assert b.seconds == pytest.approx(max(a.generate, score + 1.2 * train) + PUSH)
        assert c.seconds == pytest.approx(a.seconds + 5.0)


def test_an_overlapped_update_costs_what_the_next_rollout_does_not_hide():
    found = run("k3+kd+overlap").steps
    for before, step in zip([None, *found], found, strict=False):
        work = 0.53 * parts(before)[1] if before else 0.0
        assert step.seconds == pytest.approx(max(step.generate, work) + sum(parts(step)) + PUSH)
    with pytest.raises(ValueError, match="needs GPUs that wait"):
        run("k3+kd+overlap", colocated=True)


def test_a_drafter_that_is_not_trained_falls_behind():
    drifting = {"count": 6, "drift": 0.3}
    frozen, trained = run("k3", **drifting).steps, run("k3+kd", **drifting).steps
    assert frozen[0].trace.rounds == trained[0].trace.rounds
    assert frozen[-1].trace.rounds > trained[-1].trace.rounds * 1.05
    assert not any(step.updated for step in frozen) and all(step.updated for step in trained)


def test_the_learning_hands_acceptance_to_the_next_rollouts_rules():
    assert run("adaptive").steps[-1].trace.configs.keys() <= {*CLUSTER.cost.configs()}
    assert run("adaptive") == run("adaptive")

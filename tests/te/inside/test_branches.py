"""The same steps in Transformer Engine's branch and in the other one: losses, norms, weights, and what is pushed."""

import contextlib
from unittest import mock

import megatron.core.optimizer as optimizers
import pytest
import torch
from test_experts import GROUPED, data_of
from test_experts import build as build_experts
from test_model_parity import YARN
from test_parallel_equality import PLAIN, build, own_batches
from train_ranks import HF_CONFIG, on_ranks

from megatron_rlspec.train import runtime

CELLS = {
    "data": {},
    "zero": {"distributed": True, "dtype": "float32"},
    "sequence": {"tensor": 2, "sequence": True},
    "yarn": {"hf": {"rope_scaling": YARN}},
}
SLOW_CELLS = {
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2, "tied": True},
    "recompute": {"recompute": True, "unrolling": 2},
}
EXPERTS = {
    "experts": {},
    "experts split": {"parallel": {"expert": 2}},
    "experts, tensor": {"parallel": {"tensor": 2, "sequence": True}},
}
SLOW_EXPERTS = {"experts, context": {"parallel": {"context": 2}}, "groups": {"hf": GROUPED}}


@contextlib.contextmanager
def branch(name):
    """Inside the block, `runtime` builds Transformer Engine's layers, or the local ones, with torch's AdamW."""
    with contextlib.ExitStack() as stack:
        if name == "local":
            stack.enter_context(mock.patch.object(runtime, "has_transformer_engine", lambda: False))
            stack.enter_context(mock.patch.object(optimizers, "Adam", torch.optim.AdamW))
            stack.enter_context(mock.patch.object(optimizers, "USING_PYTORCH_OPTIMIZER", True))
        yield


def two_steps(trainer, data):
    """Metrics of two steps, and the weights after them."""
    metrics = [trainer.train_step(data(trainer, seed), objective="grpo") for seed in (0, 1)]
    return metrics, dict(trainer.export())


def in_both(cells):
    """Per cell what each branch makes of the same weights and samples."""
    out = {}
    for name, cell in cells.items():
        weights = None
        for which in ("local", "te"):
            with branch(which):
                if "experts" in cell:
                    trainer = build_experts(**cell["experts"])
                    data = data_of
                else:
                    with mock.patch.dict(HF_CONFIG, cell.get("hf", {})):
                        trainer = build(PLAIN | {"dtype": "float64"} | cell, clip=0.5)
                    data = own_batches
                weights = weights or everywhere(dict(trainer.export()))
                trainer.load_hf(weights)
                out[name, which] = two_steps(trainer, data)
    return out


def everywhere(weights):
    """Rank 0's export, on all ranks."""
    carried = [weights]
    torch.distributed.broadcast_object_list(carried, src=0)
    return carried[0]


def assert_equal(cells):
    """Every cell's metrics and weights; the optimizer multiplies what rounding leaves of a small gradient."""
    ranks = on_ranks(2, in_both, cells)
    for name, cell in cells.items():
        loose = 2e-3 if cell.get("distributed") else 1e-6
        for rank in ranks:
            (ours, _), (theirs, _) = rank[name, "te"], rank[name, "local"]
            for mine, other in zip(ours, theirs, strict=True):
                assert mine == {key: pytest.approx(other[key], rel=loose, abs=loose) for key in other}, name
        (_, ours), (_, theirs) = ranks[0][name, "te"], ranks[0][name, "local"]
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            worst = float((ours[key] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30))
            assert worst < 10 * loose, f"{name}: {key} differs by {worst:.1e}"


def with_experts(cells):
    return {name: {"experts": {"model": {"dtype": "float64"}} | cell} for name, cell in cells.items()}


def test_two_steps_equal_those_of_the_local_branch():
    assert_equal(CELLS | with_experts(EXPERTS))


@pytest.mark.slow
def test_two_steps_in_other_layouts_equal_those_of_the_local_branch():
    assert_equal(SLOW_CELLS | with_experts(SLOW_EXPERTS))

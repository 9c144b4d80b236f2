"""The same steps in Transformer Engine's branch and in the other one: losses, norms, weights, and what is pushed."""

import contextlib
from unittest import mock

import megatron.core.optimizer as optimizers
import numpy as np
import pytest
import torch
from test_experts import GROUPED, data_of, unpadded
from test_experts import build as build_experts
from test_model_parity import YARN, drafter_logits
from test_parallel_equality import PLAIN, build, own_batches
from train_ranks import HF_CONFIG, batches, on_ranks, samples

from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.train import runtime
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig

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


def pushed(cell):
    """Log-probs of the trainer and of an engine that was given its weights; texts with and without a drafter."""
    trainer = build(PLAIN | {"dtype": "float64"} | cell)
    for seed in (0, 1):
        trainer.train_step(own_batches(trainer, seed), objective="grpo")
    tensors = everywhere(dict(trainer.export()))
    chosen = [s for s in unpadded(samples(6)) if s.loss_mask.any()]
    config = HF_CONFIG | {"max_position_embeddings": 256, "eos_token_id": 0}
    start = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    engine = EmbeddedEngine(config, start.items(), dtype=torch.float64, max_total_tokens=4096, max_length=256)
    engine.update_weights(1, tensors.items())
    fingerprints = engine.fingerprints()
    texts = []
    for steps in (OFF, SpecConfig(3)):
        engine.set_config(steps)
        prompts = [Prompt(i, np.asarray(s.prompt.tokens)) for i, s in enumerate(chosen)]
        requests = [Request(f"{p.id}", p, p.id) for p in prompts]
        texts.append(engine.generate(requests, Sampling(max_new_tokens=20, ignore_eos=True)))
    share = batches(texts[0], trainer.config)
    gaps = []
    for batch, ours in zip(share, trainer.logprobs(share), strict=True):
        gaps.append(float(((ours - batch.behaviour_logprobs) * (batch.loss_mask != 0)).abs().max()))
    return max(gaps), [[s.response.tolist() for s in text] for text in texts], len(fingerprints)


def test_what_is_pushed_is_what_is_trained():
    for gap, (plain, drafted), tensors in on_ranks(2, pushed, {"tensor": 2, "sequence": True}):
        assert gap < 1e-6 and tensors > 40
        assert plain == drafted


def fused_rope(cell, fused):
    """Log-probs of one batch with Megatron's own rotary embedding or Transformer Engine's kernel."""
    options = runtime.device_options
    with mock.patch.object(runtime, "device_options", lambda: options() | {"apply_rope_fusion": fused}):
        trainer = build(PLAIN | {"dtype": "float32"} | cell)
    assert trainer.policy.config.apply_rope_fusion == fused
    data = own_batches(trainer)
    trainer.train_step(data, objective="sft")
    return torch.cat(trainer.logprobs(data)), drafter_logits(trainer, data[0])[1][0]


def ropes(cell):
    return [fused_rope(cell, fused) for fused in (False, True)]


@pytest.mark.slow
def test_the_fused_rotary_embedding_is_the_same():
    for plain, fused in on_ranks(2, ropes, {"context": 2}):
        for ours, theirs in zip(fused, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

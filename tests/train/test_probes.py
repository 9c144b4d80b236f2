"""Each probe tells the defective function from a fixed one: the megatron-core installed, then repaired in place.

If the installed version has repaired the defect itself, the probe must find it absent.
"""

import copy
import importlib.metadata
import os

import forked
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, checkpoint
from megatron.core.transformer import multi_token_prediction as mtp
from packaging.version import Version

from megatron_rlspec.packing.shift import shift_packed
from megatron_rlspec.train import probes, runtime

VERSION = importlib.metadata.version("megatron-core")
# The release from which on a defect is gone. Those that are not listed are in every release up to 0.19.2.
REPAIRED = {
    "mcore-mtp-no-clamp": "0.17.1",
    "mcore-mtp-moves-policy": "0.19.2",
    "mcore-mtp-labels-none": "0.17.1",
    "mcore-mtp-recompute-packed": "0.19.2",
}
LOSS = gpt_model if hasattr(gpt_model, "roll_tensor") else mtp  # the module that computes the MTP loss


def repaired(name):
    """Whether the installed version has repaired this defect, and its probe says so."""
    if Version(VERSION) < Version(REPAIRED.get(name, "1")):
        return False
    assert probes.PROBES[name]() is None
    return True


@pytest.fixture(autouse=True, scope="module")
def groups():
    ours = not parallel_state.model_parallel_is_initialized()
    probes.prepare()
    yield
    if ours:
        runtime.shut_down()


def test_roll_by_real_boundaries(monkeypatch):
    assert "1 of 6" in probes.roll_unpadded()

    def fixed(tensor, shifts, dims, packed_seq_params, cp_group=None):
        rolled = shift_packed(tensor, packed_seq_params.cu_seqlens_q_padded)
        return rolled, rolled.sum()

    monkeypatch.setattr(mtp, "_roll_tensor_packed_seq", fixed)
    assert probes.roll_unpadded() is None


def test_no_clamp(monkeypatch):
    if repaired("mcore-mtp-no-clamp"):
        return
    assert "not finite" in probes.no_clamp()
    roll = LOSS.roll_tensor

    def clamped(*args, **kwargs):
        rolled, total = roll(*args, **kwargs)
        return rolled, total.clamp(min=1)

    monkeypatch.setattr(LOSS, "roll_tensor", clamped)
    assert probes.no_clamp() is None


def test_moves_policy(monkeypatch):
    if repaired("mcore-mtp-moves-policy"):
        return
    assert "output_layer" in probes.moves_policy()
    block = mtp.MultiTokenPredictionBlock.forward
    linear = ColumnParallelLinear.forward
    postprocess = gpt_model.GPTModel._postprocess

    def detached_block(self, hidden_states, embedding, **kwargs):
        out = block(self, hidden_states=hidden_states.detach(), embedding=lambda **k: embedding(**k).detach(), **kwargs)
        return torch.cat([hidden_states, out[len(hidden_states) :]])

    def detached_head(self, input_, weight=None, **kwargs):
        if self is head and not calls:
            calls.append(1)
            weight = self.weight.detach()
        return linear(self, input_, weight, **kwargs)

    def remember(self, *args, **kwargs):
        nonlocal head
        head = self.output_layer
        calls.clear()
        return postprocess(self, *args, **kwargs)

    head = None
    calls = []
    monkeypatch.setattr(mtp.MultiTokenPredictionBlock, "forward", detached_block)
    monkeypatch.setattr(ColumnParallelLinear, "forward", detached_head)
    monkeypatch.setattr(gpt_model.GPTModel, "_postprocess", remember)
    assert probes.moves_policy() is None
    assert calls


def test_moves_policy_needs_a_gradient(monkeypatch):
    monkeypatch.setattr(LOSS.MTPLossAutoScaler, "apply", lambda hidden, loss: hidden)
    with pytest.raises(RuntimeError, match="no gradient to the MTP layer"):
        probes.moves_policy()


def test_labels_none(monkeypatch):
    if repaired("mcore-mtp-labels-none"):
        return
    assert "clone" in probes.labels_none()
    postprocess = gpt_model.GPTModel._postprocess

    def tolerant(self, hidden_states, *args, labels, mtp_in_postprocess=None, **kwargs):
        config = self.config
        if labels is None:
            self.config = copy.copy(config)
            self.config.mtp_num_layers = None
        try:
            on = mtp_in_postprocess and labels is not None
            return postprocess(self, hidden_states, *args, labels=labels, mtp_in_postprocess=on, **kwargs)
        finally:
            self.config = config

    monkeypatch.setattr(gpt_model.GPTModel, "_postprocess", tolerant)
    assert probes.labels_none() is None


def test_recompute_packed(monkeypatch):
    if repaired("mcore-mtp-recompute-packed"):
        return
    assert "backward of a packed batch" in probes.recompute_packed()

    def fixed(self, forward_func=None, *args, **kwargs):  # 0.18.2 passes no function, and an argument too many
        forward_func = forward_func or self._proj_and_transformer_layer
        tensors = {k: v for k, v in kwargs.items() if torch.is_tensor(v)}
        others = {k: v for k, v in kwargs.items() if not torch.is_tensor(v)}

        def run(*values):
            return forward_func(*args, **dict(zip(tensors, values, strict=True)), **others)

        return checkpoint(run, False, *tensors.values())

    monkeypatch.setattr(mtp.MultiTokenPredictionLayer, "_checkpointed_forward", fixed)
    assert probes.recompute_packed() is None


def test_shared_step(monkeypatch):
    assert "share 1 step" in probes.shared_step()
    load = DistributedOptimizer.load_state_dict

    def fixed(self, state_dict):
        load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", fixed)
    assert probes.shared_step() is None


def error_by_global_count(environment, answer):
    """Run the probe's rank with a roll that counts over all ranks."""
    os.environ.update(environment)
    roll = LOSS.roll_tensor

    def globally(*args, cp_group=None, **kwargs):
        rolled, total = roll(*args, cp_group=cp_group, **kwargs)
        total = total.clone()
        dist.all_reduce(total, group=cp_group)
        return rolled, total / cp_group.size()

    LOSS.roll_tensor = globally
    answer.send(f"error {probes._cp_error()}")


class ForkedRank:
    """A replacement for the probe's Popen that runs `error_by_global_count`."""

    def __init__(self, command, *, env, **_):
        context = forked.context()
        self.answer, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=error_by_global_count, args=(env, theirs))
        self.process.start()

    def communicate(self, timeout):
        assert self.answer.poll(timeout)
        text = self.answer.recv()
        self.process.join(timeout)
        self.returncode = self.process.exitcode
        return text, ""


@pytest.mark.slow
def test_cp_local_count(monkeypatch):
    assert "changes the MTP gradient" in probes.cp_local_count()
    monkeypatch.setattr(probes.subprocess, "Popen", ForkedRank)
    assert probes.cp_local_count() is None

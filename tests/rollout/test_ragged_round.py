"""Ragged rounds without an engine: which drafts the device chooses, and what a request may accept of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rlspec.rollout.sglang.cpu.operators import verify_tree_greedy_cpu
from megatron_rlspec.rollout.sglang.scheduler import ragged, verifier
from megatron_rlspec.speculation.ragged import EXPLORE, Selection

BATCH, STEPS = 70, 4


@pytest.fixture
def selection() -> Selection:
    """Return one that has learnt that a draft is right less often than the drafter says."""
    rng = np.random.default_rng(0)
    selection = Selection(STEPS)
    for _ in range(20):
        logq = -rng.exponential(1.0, (32, STEPS))
        right = np.cumprod(rng.random(logq.shape) < np.exp(2 * logq), 1).sum(1)
        selection.observe(logq, np.full(32, STEPS), right)
    selection.plan(STEPS, lambda drafts: 1 + drafts)
    return selection


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(ragged.versions, "installed", lambda: SimpleNamespace(tensor_group=lambda: group))


@pytest.mark.parametrize("drafts", [10, 60, BATCH * STEPS])
def test_the_device_chooses_the_likeliest_drafts(selection: Selection, drafts: int) -> None:
    logq = -np.random.default_rng(1).exponential(1.0, (BATCH, STEPS))
    round_ = ragged.RaggedRound()
    round_.begin(drafts, selection, torch.device("cpu"))
    round_.choose(torch.tensor(logq, dtype=torch.float32))
    chosen = round_.chosen
    assert chosen is not None
    lengths = chosen.lengths.numpy()
    assert lengths.sum() == drafts
    first = selection.exploring()
    assert lengths[first] == STEPS
    nodes = [row * (STEPS + 1) + depth for row in range(BATCH) for depth in range(lengths[row] + 1)]
    assert chosen.nodes.tolist() == nodes
    products = np.cumprod(selection.chances(logq), 1)
    verified = np.arange(STEPS) < lengths[:, None]
    usual = np.ones(BATCH, bool)
    usual[first::EXPLORE] = False
    least = products[usual][verified[usual]].min(initial=2)
    assert products[usual][~verified[usual]].max(initial=0) <= least + 1e-5


def test_a_request_accepts_no_draft_that_was_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are right, so only what a request verified limits it: nothing, one draft, and all of them."""
    targets = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])
    candidates = torch.cat([torch.zeros(3, 1, dtype=torch.int64), targets[:, :-1]], 1)
    lengths = torch.tensor([0, 1, 2])
    nodes = torch.tensor([0, 3, 4, 6, 7, 8])
    chosen = ragged.Chosen(torch.zeros(3, 2), lengths, nodes // 3, nodes)
    tokens = targets.flatten()[nodes]
    monkeypatch.setattr(verifier, "sample_targets", lambda verified: (tokens, -tokens.float()))
    output = SimpleNamespace(next_token_logits=torch.zeros(6, 40), hidden_states=torch.arange(6.0)[:, None])
    hooks = verifier._SampledVerification()
    hooks._pass = verifier.VerifyPass(None, output.next_token_logits, nodes, 3, output, chosen)
    predicts = torch.zeros(9, dtype=torch.int64)
    index, accepted = torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

    def walked(candidates: torch.Tensor, target_predict: torch.Tensor) -> None:
        verify_tree_greedy_cpu(predicts, index, accepted, candidates, None, None, None, target_predict)

    hooks.walk(walked, candidates=candidates, target_predict=None)
    assert accepted.tolist() == [0, 1, 2]
    assert [predicts[row[row >= 0]].tolist() for row in index] == [[11], [21, 22], [31, 32, 33]]
    assert output.rlspec_logprobs[index[2]].tolist() == [-31, -32, -33]
    assert chosen.even(output.hidden_states)[:, 0].tolist() == [0, 0, 0, 1, 2, 0, 3, 4, 5]

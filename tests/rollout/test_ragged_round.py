"""Ragged rounds without an engine: which drafts the device chooses, and what a request may accept of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rlspec.rollout.sglang.cpu.operators import verify_tree_greedy_cpu
from megatron_rlspec.rollout.sglang.scheduler import ragged, verifier
from megatron_rlspec.speculation.ragged import EXPLORE, Selection, cells_of

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


def begun(selection: Selection, drafts: int, graphs: tuple[int, ...] = ()) -> ragged.RaggedRound:
    round_ = ragged.RaggedRound()
    runner = SimpleNamespace(ragged_verify_mode=bool(graphs), capture_num_tokens=graphs)
    round_.runner = SimpleNamespace(decode_cuda_graph_runner=runner)
    batch = SimpleNamespace(reqs=[None] * BATCH, seq_lens=torch.zeros(BATCH))
    round_.begin(drafts, BATCH * STEPS, selection, batch)
    return round_


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(ragged, "parallel", lambda: SimpleNamespace(tp_group=group))


@pytest.mark.parametrize("drafts", [10, 60, BATCH * STEPS])
def test_the_device_chooses_the_likeliest_drafts(selection: Selection, drafts: int) -> None:
    logq = -np.random.default_rng(1).exponential(1.0, (BATCH, STEPS))
    logq[5, 1:] = np.nan  # as a drafter with broken weights says it
    round_ = begun(selection, drafts)
    round_.choose(torch.tensor(logq, dtype=torch.float32))
    chosen = round_.chosen
    assert chosen is not None
    lengths = chosen.lengths.numpy()
    assert lengths.sum() == drafts
    first = selection.exploring()
    assert lengths[first] == STEPS
    nodes = [row * (STEPS + 1) + depth for row in range(BATCH) for depth in range(lengths[row] + 1)]
    assert chosen.nodes.tolist() == nodes
    products = np.cumprod(selection.table[cells_of(logq)], 1)
    verified = np.arange(STEPS) < lengths[:, None]
    usual = np.ones(BATCH, bool)
    usual[first::EXPLORE] = False
    least = products[usual][verified[usual]].min(initial=2)
    assert products[usual][~verified[usual]].max(initial=0) <= least + 1e-5


def test_a_round_verifies_as_many_drafts_as_its_graph_has_room_for(selection: Selection) -> None:
    graphs = (64, 128, 256, 384)
    assert begun(selection, 10, graphs).drafts == 128 - BATCH
    assert begun(selection, BATCH * STEPS, graphs).drafts == BATCH * STEPS  # and 34 tokens of padding
    assert begun(selection, 10).drafts == 10


LENGTHS = torch.tensor([0, 1, 2])
NODES = torch.tensor([0, 3, 4, 6, 7, 8])
TARGETS = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])


def accepted_of(chosen: ragged.Chosen, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[list[int]], Any]:
    """Walk drafts that are all right. Returns accepted drafts and tokens of each request, and the target's output."""
    candidates = torch.cat([torch.zeros(3, 1, dtype=torch.int64), TARGETS[:, :-1]], 1)
    tokens = TARGETS.flatten()[NODES]
    monkeypatch.setattr(verifier, "sample_targets", lambda verified: (tokens, -tokens.float()))
    output = SimpleNamespace(next_token_logits=torch.zeros(6, 40), hidden_states=torch.arange(6.0)[:, None])
    hooks = verifier._SampledVerification()
    hooks._pass = verifier.VerifyPass(None, output.next_token_logits, NODES, 3, output, chosen)
    predicts = torch.zeros(9, dtype=torch.int64)
    index, accepted = torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

    def walked(candidates: torch.Tensor, target_predict: torch.Tensor) -> None:
        verify_tree_greedy_cpu(predicts, index, accepted, candidates, None, None, None, target_predict)

    hooks.walk(walked, candidates=candidates, target_predict=None)
    assert output.rlspec_logprobs[index[2]].tolist() == [-31, -32, -33]
    return accepted.tolist(), [predicts[row[row >= 0]].tolist() for row in index], output


def test_a_request_accepts_no_draft_that_was_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are right, so only what a request verified limits it: nothing, one draft, and all of them."""
    chosen = ragged.Chosen(torch.zeros(3, 2), LENGTHS, NODES // 3, NODES)
    accepted, tokens, output = accepted_of(chosen, monkeypatch)
    assert accepted == [0, 1, 2] and tokens == [[11], [21, 22], [31, 32, 33]]
    assert chosen.to_even_rows(output.hidden_states)[:, 0].tolist() == [0, 0, 0, 1, 2, 0, 3, 4, 5]


@pytest.mark.parametrize(("row", "tokens"), [(0, [11, 0]), (1, [21, 22, 0])])
def test_a_count_that_is_off_by_one_takes_a_token_that_nobody_sampled(
    monkeypatch: pytest.MonkeyPatch, row: int, tokens: list[int]
) -> None:
    """Known-bad, of a request that verified nothing, and of one that verified a part."""
    wrong = LENGTHS + torch.eye(3, dtype=torch.int64)[row]
    chosen = ragged.Chosen(torch.zeros(3, 2), wrong, NODES // 3, NODES)
    assert accepted_of(chosen, monkeypatch)[1][row] == tokens


def runner(attention: str, *, lora: Any = None, **options: bool) -> Any:
    given = {"enable_two_batch_overlap": False, "disable_cuda_graph_padding": False} | options
    backend = type(attention, (), {"fa_impl_ver": 3, "use_mla": False, "has_swa": options.pop("windows", False)})
    return SimpleNamespace(attn_backend=backend(), server_args=SimpleNamespace(**given), lora_manager=lora)


REFUSED = {
    "FlashInferAttnBackend takes even rounds only": runner("FlashInferAttnBackend"),
    "TritonAttnBackend takes even rounds only": runner("TritonAttnBackend"),
    "of FlashAttention, only version 3": runner("FlashAttentionBackend", windows=True),
    "need padding": runner("FlashAttentionBackend", disable_cuda_graph_padding=True),
    "do not support LoRA": runner("FlashAttentionBackend", lora=object()),
}


def test_engines_that_take_even_rounds_only_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SimpleNamespace(SGLANG_RETURN_ORIGINAL_LOGPROB=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.sampler", sampler)
    for attention in ("FlashAttentionBackend", "IntelAMXAttnBackend"):
        assert ragged.why_unsupported(runner(attention)) == ""
    for why, engine in REFUSED.items():
        assert why in ragged.why_unsupported(engine)
    sampler.SGLANG_RETURN_ORIGINAL_LOGPROB = True
    assert "original log-probs" in ragged.why_unsupported(runner("FlashAttentionBackend"))

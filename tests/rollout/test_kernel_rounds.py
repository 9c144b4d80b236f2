"""With the sampling kernel, in Triton's interpreter, engines draw the tokens and log-probs that they draw without."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from interpreted import Interpreter, interpreter

from megatron_rlspec.kernels import chosen
from megatron_rlspec.rollout.sglang.scheduler import coupled, ragged, verifier

pytest.importorskip("triton", reason="Triton is not installed; the kernels were not run")
ALL = 1 << 30  # SGLang's top_k of a request without one
REQUESTS, NODES, VOCABULARY = 3, 2, 150


@pytest.fixture(scope="module")
def kernel() -> Iterator[Interpreter]:
    with interpreter() as found:
        yield found


@pytest.fixture
def sampler(sglang_models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from sglang.srt.layers import sampler

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(verifier, "parallel", lambda: SimpleNamespace(tp_group=group))
    monkeypatch.setattr(
        sampler, "get_exec", lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    )
    original = sampler.top_k_top_p_min_p_sampling_from_probs_torch
    hooked = lambda *given, **named: verifier._sample_filtered(original, *given, **named)  # noqa: E731
    monkeypatch.setattr(sampler, "top_k_top_p_min_p_sampling_from_probs_torch", hooked)
    return sampler


def batch(limited: bool) -> Any:
    """Make what the rounds read of a `SamplingBatchInfo`; the last request is greedy, if there are limits."""
    return SimpleNamespace(
        temperatures=torch.tensor([[1.0], [0.7], [1.0]]),
        top_ks=torch.tensor([ALL, 20, 1] if limited else [ALL] * 3, dtype=torch.int32),
        top_ps=torch.tensor([0.9, 1.0, 1.0] if limited else [1.0] * 3),
        min_ps=torch.tensor([0.0, 0.02, 0.0] if limited else [0.0] * 3),
        need_top_p_sampling=limited, need_top_k_sampling=limited, need_min_p_sampling=limited,
        sampling_seed=torch.tensor([5, -(2**62), 2**40]), is_all_greedy=False, max_top_k=ALL,
        has_custom_logit_processor=False, sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None, grammars=None,
    )  # fmt: skip


def logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("limited", [False, True])
def test_a_plain_round(sampler: ModuleType, kernel: Interpreter, limited: bool) -> None:
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor

    layer = object.__new__(sampler.Sampler)
    torch.nn.Module.__init__(layer)
    layer.rl_on_policy_target, layer.enable_deterministic, layer.use_log_softmax_logprob = None, False, False
    layer.use_ascend_backend, layer.output_logprob_processor = False, OutputLogprobProcessor()
    found = []
    for used in (None, kernel.sampling):
        output = SimpleNamespace(next_token_logits=logits(REQUESTS))
        given = (layer, output, batch(limited), True, [0] * REQUESTS, [None] * REQUESTS, torch.arange(REQUESTS))
        with mock.patch.object(chosen, "sampling", lambda logits, used=used: used):
            tokens = verifier.sample_plain(sampler.Sampler.forward, *given)
        found.append((tokens, output.next_token_logprobs))
    (tokens, logprobs), (ours, known) = found
    assert torch.equal(ours, tokens) and ours.dtype == tokens.dtype
    assert torch.allclose(known, logprobs, atol=2e-6) and len(set(tokens.tolist())) == REQUESTS


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("lengths", [None, [0, 1, 0]], ids=["even", "ragged"])
def test_a_verify_round(sampler: ModuleType, kernel: Interpreter, limited: bool, lengths: list[int] | None) -> None:
    info = batch(limited)
    requests = torch.arange(REQUESTS).repeat_interleave(torch.tensor(lengths or [NODES - 1] * REQUESTS) + 1)
    rows = len(requests)
    picked = None
    if lengths:
        picked = ragged.Chosen(torch.zeros(REQUESTS, NODES - 1), torch.tensor(lengths), requests, torch.arange(rows))
    verified = verifier.VerifyPass(info, logits(rows), torch.arange(rows), NODES, chosen=picked)
    found = []
    for used in (None, kernel.sampling):
        with mock.patch.object(chosen, "sampling", lambda logits, used=used: used):
            found.append(verifier.sample_targets(verified))
    (tokens, logprobs), (ours, known) = found
    assert torch.equal(ours, tokens) and ours.dtype == tokens.dtype
    expected = torch.log_softmax(verified.logits / info.temperatures[requests], -1).gather(1, tokens[:, None])[:, 0]
    for given in (known, logprobs):
        assert torch.allclose(given, expected, atol=2e-6)


def test_what_draws_a_row_does_not_depend_on_its_batch(sampler: ModuleType) -> None:
    """Plain torch draws rows of requests with limits, and the kernel all others, whatever rows are beside them."""
    info = batch(True)
    info.top_ps[0] = 1.0  # request 0 has no limit
    kernel = SimpleNamespace(sample=lambda logits, *given: (torch.full((len(logits),), 7), torch.zeros(len(logits))))
    values = logits(6)
    requests = torch.tensor([0, 1, 0, 2, 1, 0])
    for rows in ([0, 1, 2, 3, 4, 5], [0, 2, 5], [4, 3, 1], [5, 4]):
        given = info, values[rows], torch.tensor(rows), requests[rows]
        tokens, logprobs = verifier.sample(kernel, *given)
        expected, known = verifier.sample(None, *given)
        free = requests[rows] == 0
        assert (tokens[free] == 7).all() and (logprobs[free] == 0).all()
        assert torch.equal(tokens[~free], expected[~free]) and torch.equal(logprobs[~free], known[~free])


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_coupled_drafts(sampler: ModuleType, kernel: Interpreter, mapped: bool, in_graph: bool) -> None:
    """Of all words and of a draft vocabulary, for a request with top-p, one with top-k and min-p, and a greedy one.

    A CUDA graph drafts from all tokens, and the likeliest one for the greedy request.
    """
    info = batch(True)
    sharpness = torch.tensor([[2.0], [1.0], [1.5]])
    rows = coupled._Rows(info.sampling_seed, info.temperatures, info.top_ks, sharpness, None if in_graph else info)
    words = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:VOCABULARY] if mapped else None
    drafter = SimpleNamespace(drafter=SimpleNamespace(hot_token_id=words))
    found = []
    for used in (None, kernel.sampling):
        with mock.patch.object(chosen, "sampling", lambda logits, used=used: used):
            found.append(coupled.CoupledDrafts._choose(drafter, logits(REQUESTS), torch.tensor([7, 8, 9]), rows))
    (drafts, logq), (ours, known) = found
    assert torch.equal(ours, drafts) and len({*drafts.view(-1).tolist()}) == REQUESTS
    assert torch.allclose(known, logq, atol=2e-6)

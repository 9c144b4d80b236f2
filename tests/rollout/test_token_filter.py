"""Top-k, top-p and min-p keep the tokens that SGLang's own filter keeps, whatever the cut, without large buffers."""

from __future__ import annotations

from types import ModuleType
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from megatron_rlspec import token_filter

ALL = 1 << 30  # SGLang's top_k of a request without one
VOCABULARY = 151_680  # MiMo-7B


@pytest.fixture(scope="module")
def sampler(sglang_models: ModuleType) -> ModuleType:
    from sglang.srt.layers import sampler

    return sampler


def kept_by_sglang(
    sampler: ModuleType, probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor | None
) -> list[list[float]]:
    """Return the probabilities that SGLang keeps of each row, largest first.

    Where rounding makes SGLang drop a token and keep the next one, the row ends at the first of them.
    """
    limits = (top_ks, top_ps, torch.zeros(len(probs)) if min_ps is None else min_ps, min_ps is not None)
    _, ordered, _, _ = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), *limits, None, torch.zeros(len(probs)), return_filtered_probs=True
    )
    return [row[: ((row == 0).cumsum(0) == 0).sum()].tolist() for row in ordered]


def agrees(kept: torch.Tensor, probs: torch.Tensor, expected: list[list[float]]) -> bool:
    """Return whether `kept` holds the expected values, and of equal ones those of the lowest tokens."""
    for row, full, values in zip(kept, probs, expected, strict=True):
        tokens = row.nonzero().view(-1)
        if sorted(row[tokens].tolist(), reverse=True) != values or not torch.equal(row[tokens], full[tokens]):
            return False
        if values and (full == values[-1]).nonzero().view(-1)[: values.count(values[-1])].tolist() != [
            token for token in tokens.tolist() if row[token] == values[-1]
        ]:
            return False
    return True


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw probs [N, V] with ties, plateaus, one-hot and flat rows, and limits."""
    vocabulary = draw(st.sampled_from((5, 33, 200)))
    kinds = draw(st.lists(st.sampled_from(("flat", "one-hot", "steps", "bf16", "normal")), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    sharpness = draw(st.sampled_from((0.01, 1.0, 6.0)))
    logits = sharpness * torch.randn(len(kinds), vocabulary, generator=generator)
    for row, kind in zip(logits, kinds, strict=True):
        if kind == "flat":
            row.zero_()
        elif kind == "one-hot":
            row.fill_(-50.0)[draw(st.integers(0, vocabulary - 1))] = 50.0
        elif kind == "steps":
            row.round_()
        elif kind == "bf16":
            row.copy_(row.bfloat16())
    n = len(kinds)
    ks = draw(st.lists(st.sampled_from((1, 2, 7, 8, 9, 40, ALL)), min_size=n, max_size=n))
    ps = draw(st.lists(st.sampled_from((0.0, 0.1, 0.5, 0.9, 0.95, 0.999999)), min_size=n, max_size=n))
    ms = draw(st.none() | st.lists(st.sampled_from((0.0, 0.05, 0.5, 1.0)), min_size=n, max_size=n))
    return logits.softmax(-1), torch.tensor(ks), torch.tensor(ps), None if ms is None else torch.tensor(ms)


@settings(max_examples=150)
@given(rows=rows(), cut=st.sampled_from((1, 8, 64)), known=st.booleans())
def test_the_same_tokens_stay_as_in_sglang(sampler, rows, cut, known):
    probs, top_ks, top_ps, min_ps = rows
    expected = kept_by_sglang(sampler, probs, top_ks, top_ps, min_ps)
    most = int(top_ks.max()) if known else None
    with mock.patch.object(token_filter, "CUT", cut), mock.patch.object(token_filter, "WHOLE_ROWS", 2):
        kept = token_filter.filtered(probs, top_ks, top_ps, min_ps, most)
    assert agrees(kept, probs, expected)


def test_a_nucleus_wider_than_the_cut_of_a_real_vocabulary(sampler):
    """Rows: flat; ties across the cut; narrow; and one without limits, which keeps what SGLang's rounding drops."""
    torch.manual_seed(0)
    logits = torch.randn(4, VOCABULARY)
    logits[0] = 0.0
    logits[1] = (3 * logits[1]).round()
    logits[2] *= 9
    probs = logits.softmax(-1)
    top_ks = torch.tensor([ALL, 1500, ALL, ALL])
    top_ps = torch.tensor([0.5, 1.0, 0.95, 1.0])
    kept = token_filter.filtered(probs, top_ks, top_ps, None)
    assert agrees(kept[:3], probs[:3], kept_by_sglang(sampler, probs, top_ks, top_ps, None)[:3])
    assert (kept[0] > 0).sum() > token_filter.CUT and torch.equal(kept[3], probs[3])

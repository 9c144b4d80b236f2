"""Packed attention equals the textbook formula, computed one sequence and one row at a time in float64."""

import math

import pytest
import torch

from megatron_rlspec.packing.context_parallel import cp_index
from megatron_rlspec.train import attention
from megatron_rlspec.train.attention_plan import plan_attention


def textbook(q, k, v, scale):
    """Compute causal attention of one sequence, q [L, n, d], k and v [L, g, d]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("inc,jnc->nij", q, k) * scale
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -math.inf)
    return torch.einsum("nij,jnc->inc", scores.softmax(-1), v)


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("plain", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_packed_attention_equals_the_textbook_formula(cp_size, plain, monkeypatch):
    if plain:  # what runs on devices without the CPU kernel
        monkeypatch.setattr(attention, "_has_cpu_kernel", lambda q: False)
    lengths = [8, 24, 16, 0, 24, 8, 16]
    scale = 0.37
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q = random(96, 6, 8, seed=1)
    k = random(96, 2, 8, seed=2)
    v = random(96, 2, 8, seed=3)
    expected = torch.cat([textbook(*x, scale) for x in zip(*(y.split(lengths) for y in (q, k, v)), strict=True)])
    weight = random(96, 6, 8, seed=4).detach()
    grads = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    got = [torch.zeros_like(x) for x in (q, k, v)]
    for rank in range(cp_size):
        mine = cp_index(cu, rank, cp_size)
        plan = plan_attention(cu, 2, cp_size, rank, q.device)
        out = attention._Attend.apply(q[mine], k, v, plan, scale)
        torch.testing.assert_close(out, expected[mine], rtol=1e-12, atol=1e-12)
        for total, share in zip(got, torch.autograd.grad((out * weight[mine]).sum(), (q, k, v)), strict=True):
            total += share
    for ours, reference in zip(got, grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-12)


def test_links_are_further_keys_of_one_row():
    t = 12
    n = 4
    g = 2
    d = 6
    scale = 0.5
    q = random(t, n, d, seed=1)
    k = random(t, g, d, seed=2)
    v = random(t, g, d, seed=3)
    links = [random(t, g, d, seed=4 + i) for i in range(4)]
    rows = []
    for i in range(t):
        key = torch.cat([k[: i + 1], links[0][i : i + 1], links[2][i : i + 1]]).repeat_interleave(n // g, 1)
        value = torch.cat([v[: i + 1], links[1][i : i + 1], links[3][i : i + 1]]).repeat_interleave(n // g, 1)
        rows.append(torch.einsum("nj,jnc->nc", (torch.einsum("nc,jnc->nj", q[i], key) * scale).softmax(-1), value))
    expected = torch.stack(rows)
    plan = plan_attention(torch.tensor([0, t]), g, 1, 0, q.device)
    out = attention._Attend.apply(q, k, v, plan, scale, *links)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = random(t, n, d, seed=9).detach()
    inputs = (q, k, v, *links)
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    for mine, reference in zip(ours, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-12)


def test_rotation_follows_transformers_convention():
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    x = random(5, 3, 8, seed=1)
    positions = torch.tensor([0, 1, 7, 3, 1000])
    cos, sin = attention.rotary_factors(positions, 8, 10000.0, torch.float64)
    full_cos, full_sin = (torch.cat([y, y], -1)[None, :, 0] for y in (cos, sin))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], full_cos, full_sin)
    ours = attention._Rotate.apply(x, cos, sin)
    torch.testing.assert_close(ours, expected[0].transpose(0, 1), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(attention._Rotate.apply, (x, cos, sin))

"""Losses at logits that float32 can hardly hold: offsets of 1,000, minus infinity, probabilities that underflow."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from train_ranks import on_two
from whole_loss import drafter_loss

from megatron_rlspec.losses.drafter import Kind
from megatron_rlspec.losses.logprobs import policy_logprobs

KINDS = get_args(Kind)

N, H, V = 12, 6, 20
FORBIDDEN = 3  # the token whose logit is minus infinity: twice LOWEST
LOWEST = torch.finfo(torch.float32).min


def inputs(first_column, dtype=torch.float32):
    """hidden `[N, H]`, 2 in column 0, and weight `[V, H]`, whose column 0 is added to all logits, twice."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, H, generator=generator).to(dtype)
    weight = torch.randn(V, H, generator=generator).to(dtype)
    labels = torch.randint(FORBIDDEN + 1, V, (N,), generator=generator)
    hidden[:, 0] = 2
    weight[:, 0] = first_column / 2
    return hidden, weight, labels


@pytest.mark.parametrize("offset", [0.0, 100.0, 1000.0, 2000.0])
def test_entropy_and_its_gradient_do_not_suffer_from_large_logits(offset):
    hidden, weight, labels = inputs(offset)
    leaf = hidden.clone().requires_grad_()
    _, entropy = policy_logprobs(leaf, weight, labels, with_entropy=True)
    entropy.sum().backward()
    logp = (hidden @ weight.t()).double().log_softmax(-1)  # float32 logits as they are, everything after them exact
    exact = -(logp.exp() * logp).sum(-1)
    gradient = -(logp.exp() * (logp + exact[:, None])) @ weight.double()
    assert float((entropy.double() - exact).abs().max()) < 2e-6
    assert float((leaf.grad.double() - gradient)[:, 1:].abs().max()) < 1e-5  # column 0 adds `offset` times rounding


def without_token(weight, labels):
    """The same model over a vocabulary without the forbidden token."""
    return torch.cat([weight[:FORBIDDEN], weight[FORBIDDEN + 1 :]]), labels - 1


def drafter_case(kind, hidden, weight, labels, group=None, shard=slice(None)):
    leaf = hidden.clone().requires_grad_()
    teacher = None if kind == "ce" else hidden.roll(1, 0).contiguous()
    token_weight = torch.linspace(0.5, 1.5, N, dtype=hidden.dtype)
    total, metrics = drafter_loss(
        leaf, weight[shard], labels, token_weight, kind, teacher_hidden=teacher, tp_group=group
    )
    total.backward()
    return total.detach(), leaf.grad, metrics


@pytest.mark.parametrize("kind", KINDS)
def test_a_logit_of_minus_infinity_is_as_if_the_token_did_not_exist(kind):
    hidden, weight, labels = inputs(0.5)
    weight[FORBIDDEN, 0] = LOWEST
    assert bool((hidden @ weight.t())[:, FORBIDDEN].isneginf().all())
    total, gradient, metrics = drafter_case(kind, hidden, weight, labels)
    expected = drafter_case(kind, hidden, *without_token(weight, labels))
    torch.testing.assert_close((total, gradient, metrics), expected, rtol=1e-5, atol=1e-5)


def on_two_ranks(rank, kind):
    hidden, weight, labels = inputs(0.5)
    weight[FORBIDDEN, 0] = LOWEST
    half = slice(rank * V // 2, (rank + 1) * V // 2)
    return drafter_case(kind, hidden, weight, labels, dist.group.WORLD, half)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_over_a_vocabulary_cut_in_two(kind):
    hidden, weight, labels = inputs(0.5)
    expected = drafter_case(kind, hidden, *without_token(weight, labels))
    for found in on_two(on_two_ranks, kind):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_policy_and_entropy_with_a_logit_of_minus_infinity():
    hidden, weight, labels = inputs(0.5)
    weight[FORBIDDEN, 0] = LOWEST
    found = []
    for w, y in ((weight, labels), without_token(weight, labels)):
        leaf, head = hidden.clone().requires_grad_(), w.clone().requires_grad_()
        logprobs, entropy = policy_logprobs(leaf, head, y, with_entropy=True)
        (logprobs - 0.1 * entropy).sum().backward()
        others = head.grad if len(head) < V else torch.cat([head.grad[:FORBIDDEN], head.grad[FORBIDDEN + 1 :]])
        found.append((logprobs.detach(), entropy.detach(), leaf.grad, others))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)

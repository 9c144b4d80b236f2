"""The drafter's losses over a part of the vocabulary, against whole distributions in float64 and autograd."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from test_loss import Case, H, V, assert_close
from train_ranks import on_two
from whole_loss import drafter_loss

from megatron_rlspec.losses.drafter import Kind

KINDS = get_args(Kind)

MIXED = [30, 2, 3, 7, 11, 12, 19, 25]
LOW = [0, 1, 2, 3, 4]  # all on the first of two ranks


def oracle(case, kind, words, temperature):
    """(Σ w · loss, its gradient in hidden, metrics), from q over the full vocabulary that is 0 outside `words`."""
    hidden = case.hidden.detach().requires_grad_()
    outside = torch.ones(len(case.weight), dtype=torch.bool)
    outside[words] = False
    rows = torch.arange(len(case.labels))
    logits = hidden @ case.weight.detach().t() / temperature
    q = logits.masked_fill(outside, -torch.inf).softmax(-1)
    p = (case.teacher.detach() @ case.weight.detach().t() / temperature).softmax(-1)[case.index]
    covered = ~outside[case.labels]
    ce = -q[rows, torch.where(covered, case.labels, words[0])].log() * covered
    if kind == "ce":
        loss = ce
    else:
        inside = p[:, ~outside].sum(-1, keepdim=True)
        renormalised = p[:, ~outside] / inside
        loss = inside[:, 0] * (renormalised * (renormalised / q[:, ~outside]).log()).sum(-1)
    total = (case.token_weight * loss).sum()
    (gradient,) = torch.autograd.grad(total, hidden)
    used, best = case.token_weight != 0, q.argmax(-1)
    each = {"loss": loss, "ce": ce, "covered": covered, "match": best == case.labels}
    if kind != "ce":
        each |= {"overlap": torch.minimum(p, q).sum(-1), "argmax_prob": p[rows, best]}
    return total.detach(), gradient, {name: x.detach().double()[used].sum() for name, x in each.items()}


@pytest.mark.parametrize("words", [MIXED, LOW, list(range(V))], ids=["mixed", "low", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradient_and_metrics_are_the_oracles(kind, words):
    case = Case()
    total, metrics = case.loss(kind, words=torch.tensor(words), temperature=0.7, chunk=5)
    expected, gradient, sums = oracle(case, kind, words, 0.7)
    assert_close(total, expected)
    total.backward()
    assert_close(case.hidden.grad, gradient)
    for name, value in sums.items():
        assert_close(metrics[name], value)
    if len(words) == V:
        _, plain = case.loss(kind, temperature=0.7, chunk=5)
        for name, value in plain.items():
            assert_close(metrics[name], value)


def test_masked_labels_are_the_forward_divergence_on_average():
    """Over labels drawn from p, the gradient of cross-entropy with labels outside left out is that of p(S) · KL."""
    case = Case(rows=3, teachers=3)
    p = (case.teacher.detach() @ case.weight.detach().t()).softmax(-1)
    words = torch.tensor(MIXED)
    gradient = torch.zeros(3, H, dtype=torch.float64)
    for label in range(V):
        hidden = case.hidden.detach().requires_grad_()
        total, _ = drafter_loss(hidden, case.weight, torch.full((3,), label), p[:, label], words=words)
        total.backward()
        gradient += hidden.grad
    hidden = case.hidden.detach().requires_grad_()
    ones = torch.ones(3, dtype=torch.float64)
    total, _ = drafter_loss(
        hidden, case.weight, case.labels, ones, "forward_kl", teacher_hidden=case.teacher, words=words
    )
    total.backward()
    assert_close(gradient, hidden.grad)


def in_worker(rank, kind, words):
    case = Case(vocabulary=V + 1)
    shard = case.weight.detach().chunk(2)[rank]
    options = {"temperature": 0.7, "chunk": 5, "tp_group": dist.group.WORLD}
    total, metrics = case.loss(kind, shard, words=torch.tensor(words), **options)
    total.backward()
    return total.detach(), case.hidden.grad, metrics


@pytest.mark.parametrize("words", [MIXED, LOW], ids=["mixed", "low"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one(kind, words):
    """One rank may hold none of the words."""
    expected, gradient, sums = oracle(Case(vocabulary=V + 1), kind, words, 0.7)
    for total, found, metrics in on_two(in_worker, kind, words):
        assert_close(total, expected, 1e-9)
        assert_close(found, gradient, 1e-9)
        for name, value in sums.items():
            assert_close(metrics[name], value)


def test_bad_input_is_named():
    case = Case()
    arguments = (case.hidden, case.weight, case.labels, case.token_weight)
    for words in ([], [-1, 2], [V]):
        with pytest.raises(ValueError, match="expected ids from 0 to 30"):
            drafter_loss(*arguments, words=torch.tensor(words, dtype=torch.int64))

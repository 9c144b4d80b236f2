"""Every loss against a float64 one that is written for clarity: whole logits, autograd, no chunks, no ranks."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from train_ranks import on_two
from whole_loss import drafter_loss

from megatron_rlspec.losses.drafter import Kind, Student
from megatron_rlspec.losses.head import VocabParallelHead
from megatron_rlspec.losses.logprobs import policy_logprobs

KINDS = get_args(Kind)

N, H, V = 23, 8, 31


class Case:
    """Random inputs: `hidden [N, H]`, `weight [V, H]`, labels, token weights with zeros, teacher `[M, H]` and index."""

    def __init__(self, seed=0, rows=N, vocabulary=V, dtype=torch.float64, teachers=N):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden, self.weight = normal(rows, H).requires_grad_(), normal(vocabulary, H).requires_grad_()
        self.labels = torch.randint(0, vocabulary, (rows,), generator=generator)
        used = torch.rand(rows, generator=generator) < 0.6
        self.token_weight = torch.rand(rows, generator=generator, dtype=torch.float64) * used
        self.teacher = normal(teachers, H).requires_grad_()
        self.index = torch.randint(0, teachers, (rows,), generator=generator)
        self.groups = torch.randint(0, 3, (rows,), generator=generator)

    def loss(self, kind, weight=None, **options):
        """Return the drafter's loss and metrics, with the teacher if the loss has one."""
        weight = self.weight if weight is None else weight
        taught = {} if kind == "ce" else {"teacher_hidden": self.teacher, "teacher_index": self.index}
        return drafter_loss(self.hidden, weight, self.labels, self.token_weight, kind, **taught | options)

    def grouped(self, kind, weight=None, **options):
        """Return the same, with metrics of three groups."""
        return self.loss(kind, weight, groups=self.groups, num_groups=3, **options)


def oracle(kind, logq, logp, labels):
    """Per-row loss from whole log-distributions `[N, V]`."""
    if kind == "ce":
        return -logq[torch.arange(len(labels)), labels]
    return (logp.exp() * (logp - logq)).sum(-1)


def log_distribution(hidden, weight, temperature):
    return (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)


def oracle_loss(case, kind, temperature):
    """(Σ w · loss, its gradient in hidden, metrics per group)."""
    hidden = case.hidden.detach().double().requires_grad_()
    logq = log_distribution(hidden, case.weight.detach(), temperature)
    logp = log_distribution(case.teacher.detach(), case.weight.detach(), temperature)[case.index]
    rows = oracle(kind, logq, logp, case.labels)
    total = (case.token_weight * rows).sum()
    (gradient,) = torch.autograd.grad(total, hidden)
    best, used = logq.argmax(-1), (case.token_weight != 0).double()
    each = {
        "tokens": torch.ones_like(rows),
        "loss": rows,
        "ce": oracle("ce", logq, logp, case.labels),
        "match": (best == case.labels).double(),
    }
    of_teacher = {
        "overlap": torch.minimum(logp.exp(), logq.exp()).sum(-1),
        "argmax_prob": logp.exp()[torch.arange(len(best)), best],
    }
    if kind != "ce":
        each |= of_teacher
    sums = {
        name: torch.stack([(x * used)[case.groups == g].sum() for g in range(3)]).detach() for name, x in each.items()
    }
    return total.detach(), gradient, sums


def assert_close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


# --- the drafter's losses ------------------------------------------------------------------------------------------


def own(kind):
    """A built-in loss, written as a user would write it."""

    def loss(rows):
        return oracle(kind, rows.draft_logprobs, rows.policy_logprobs, rows.tokens)

    return loss


def own_in_worker(rank, kind):
    case, size = Case(vocabulary=V + 1), 2
    shard = case.weight.detach().chunk(size)[rank]
    total, metrics = case.grouped(own(kind), shard, temperature=0.6, chunk=5, tp_group=dist.group.WORLD)
    total.backward()
    return total.detach(), case.hidden.grad, metrics


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_ones_own_is_differentiated(kind):
    case = Case(vocabulary=V + 1)
    expected, gradient, sums = oracle_loss(case, kind, 0.6)
    for total, grad, metrics in on_two(own_in_worker, kind):
        assert_close(total, expected)
        assert_close(grad, gradient)
        for name in sums:
            assert_close(metrics[name], sums[name])


@given(
    rows=st.integers(0, 12),
    vocabulary=st.integers(2, 9),
    kind=st.sampled_from(KINDS),
    chunk=st.integers(1, 13),
    temperature=st.floats(0.2, 3),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=100)
def test_loss_gradient_and_metrics_are_the_oracles(rows, vocabulary, kind, chunk, temperature, seed):
    case = Case(seed, rows, vocabulary, teachers=5)
    total, metrics = case.grouped(kind, temperature=temperature, chunk=chunk)
    expected, gradient, sums = oracle_loss(case, kind, temperature)
    assert_close(total, expected, 1e-10)
    (3 * total).backward()
    assert_close(case.hidden.grad, 3 * gradient, 1e-10)
    assert case.weight.grad is None and case.teacher.grad is None
    assert metrics.keys() == sums.keys()
    for name in sums:
        assert_close(metrics[name], sums[name], 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_train_is_exactly_zero(kind):
    case = Case()
    for hidden, rows in ((case.hidden, N), (case.hidden[:0], 0)):
        total, metrics = drafter_loss(
            hidden,
            case.weight,
            case.labels[:rows],
            torch.zeros(rows),
            kind,
            teacher_hidden=None if kind == "ce" else case.teacher[:rows],
            groups=case.groups[:rows],
            num_groups=3,
        )
        case.hidden.grad = None
        total.backward()
        assert total.item() == 0 and not case.hidden.grad.any()
        # Metrics are summed over ranks, so an empty one must name them all.
        assert all(x.tolist() == [0, 0, 0] for x in metrics.values())
        of_teacher = set() if kind == "ce" else {"overlap", "argmax_prob"}
        assert metrics.keys() == {"tokens", "loss", "ce", "match"} | of_teacher


def test_only_trained_rows_reach_the_head_and_each_teacher_once(monkeypatch):
    case, seen, original = Case(), [], VocabParallelHead.scores
    monkeypatch.setattr(
        VocabParallelHead, "scores", lambda self, hidden: seen.append(len(hidden)) or original(self, hidden)
    )
    case.loss("forward_kl", chunk=3)
    used = case.token_weight != 0
    teachers = len(case.index[used].unique())
    assert teachers < used.sum() < N and sum(seen) == used.sum() + teachers
    assert max(seen) == 3
    seen.clear()
    case.hidden.grad = None
    total, _ = drafter_loss(case.hidden, case.weight, case.labels, case.token_weight, chunk=3)
    total.backward()
    assert sum(seen) == used.sum()  # the backward computes no logits again


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.06)])
def test_lower_precision_stays_near(kind, dtype, tolerance):
    case = Case(dtype=dtype)
    total, _ = case.loss(kind)
    expected, gradient, _ = oracle_loss(case, kind, 1.0)
    total.backward()
    assert total.dtype == torch.float32 and case.hidden.grad.dtype == dtype
    assert (total - expected).abs() <= tolerance * expected.abs()
    assert (case.hidden.grad - gradient).norm() <= tolerance * gradient.norm()


# --- the policy's log-probabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 6, 1024])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_logprobs_and_entropy_are_the_oracles(chunk, with_entropy):
    case, temperature = Case(), 0.6
    mask = case.token_weight != 0
    logprobs, entropy = policy_logprobs(
        case.hidden, case.weight, case.labels, temperature, with_entropy=with_entropy, mask=mask, chunk=chunk
    )
    hidden, weight = case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()
    logp = log_distribution(hidden, weight, temperature)
    expected = [-oracle("ce", logp, logp, case.labels) * mask]
    got, upstream = [logprobs], [torch.randn(N, dtype=torch.float64)]
    if not with_entropy:
        assert not entropy.any()
    else:
        expected.append(-(logp.exp() * logp).sum(-1) * mask)
        got, upstream = [logprobs, entropy], [*upstream, torch.randn(N, dtype=torch.float64)]
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)
    torch.autograd.backward(got, upstream)
    torch.autograd.backward(expected, upstream)
    assert_close(case.hidden.grad, hidden.grad)
    assert_close(case.weight.grad, weight.grad)


def test_logprobs_of_no_row_still_give_a_gradient():
    case = Case()
    logprobs, _ = policy_logprobs(case.hidden, case.weight, case.labels, mask=torch.zeros(N))
    logprobs.sum().backward()
    assert not logprobs.any() and not case.hidden.grad.any() and not case.weight.grad.any()


def test_logprobs_notice_an_overwritten_weight():
    case = Case()
    logprobs, _ = policy_logprobs(case.hidden, case.weight, case.labels)
    with torch.no_grad():
        case.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_student_learns_within_the_policys_own_pass(monkeypatch):
    """Depths 1..2 of 20 positions; no row of weight has a teacher at the positions behind them (rows 20 and 21)."""
    positions, depth, chunk = 20, 2, 6
    case = Case(rows=positions * depth, teachers=positions + depth)
    policy = case.teacher.detach()[:positions].requires_grad_()
    policy_mask = torch.rand(positions) < 0.7
    index = torch.cat([torch.arange(positions) + d for d in (1, 2)])
    needed = torch.cat([policy_mask, torch.zeros(depth, dtype=torch.bool)])
    token_weight = case.token_weight * needed[index]
    arguments = (case.weight, case.labels, token_weight, "forward_kl")
    options = {"teacher_index": index, "chunk": chunk, "temperature": 0.8}
    labels = torch.randint(0, V, (positions,))
    plain, _ = policy_logprobs(policy, case.weight, labels, 0.8, mask=policy_mask, chunk=chunk)
    expected, metrics = drafter_loss(case.hidden, *arguments, teacher_hidden=case.teacher, **options)
    expected.backward()
    gradient, case.hidden.grad = case.hidden.grad, None

    seen, original = [], VocabParallelHead.scores
    monkeypatch.setattr(
        VocabParallelHead, "scores", lambda self, hidden: seen.append(len(hidden)) or original(self, hidden)
    )
    student = Student(case.hidden, *arguments, **options)
    with pytest.raises(ValueError, match="had no teacher"):
        student.finish()
    logprobs, _ = policy_logprobs(
        policy, case.weight, labels, 0.8, mask=policy_mask, chunk=chunk, observe=student.observe
    )
    total, fused_metrics = student.finish()
    total.backward()
    assert sum(seen) == policy_mask.sum() + (token_weight != 0).sum()
    assert torch.equal(logprobs, plain)  # bit for bit: the policy must not notice
    assert_close(total, expected)
    assert_close(case.hidden.grad, gradient)
    for name in metrics:
        assert_close(fused_metrics[name][0], metrics[name])


# --- the vocabulary over two ranks ---------------------------------------------------------------------------------


def sharded_in_worker(rank, kind, vocab_size, chunk):
    case = Case(vocabulary=vocab_size)
    shard = case.weight.detach().chunk(2)[rank].clone().requires_grad_()
    head = {"tp_group": dist.group.WORLD, "chunk": chunk}
    total, metrics = case.grouped(kind, shard, temperature=0.7, **head)
    total.backward()
    drafter_gradient, case.hidden.grad = case.hidden.grad, None
    assert shard.grad is None
    logprobs, entropy = policy_logprobs(case.hidden, shard, case.labels, 0.7, with_entropy=True, **head)
    (logprobs.square().sum() + entropy.square().sum()).backward()
    return total.detach(), drafter_gradient, metrics, logprobs.detach(), case.hidden.grad, shard.grad


@pytest.mark.parametrize("vocab_size", [32, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one(kind, vocab_size):
    case = Case(vocabulary=vocab_size)
    results = on_two(sharded_in_worker, kind, vocab_size, 7)
    expected, gradient, sums = oracle_loss(case, kind, 0.7)
    logprobs, entropy = policy_logprobs(case.hidden, case.weight, case.labels, 0.7, with_entropy=True)
    (logprobs.square().sum() + entropy.square().sum()).backward()
    for total, drafter_gradient, metrics, sharded_logprobs, hidden_gradient, _ in results:
        assert_close(total, expected, 1e-9)
        assert_close(drafter_gradient, gradient, 1e-9)
        for name in sums:
            assert_close(metrics[name], sums[name])
        assert_close(sharded_logprobs, logprobs)
        assert_close(hidden_gradient, case.hidden.grad)
    weight_gradient = torch.cat([result[-1] for result in results])
    assert_close(weight_gradient, case.weight.grad)


def ties_in_worker(rank):
    scores = torch.tensor([[1.0, 3.0, 3.0], [0.0, 1.0, 2.0]]) if rank == 0 else torch.tensor([[3.0, 0, 0], [2.0, 2, 0]])
    head = VocabParallelHead(torch.zeros(3, H), 1.0, 3 * rank, 6, dist.group.WORLD)
    return head.argmax(scores).tolist()


def test_ties_go_to_the_lowest_id_on_any_rank():
    assert on_two(ties_in_worker) == [[1, 2], [1, 2]]


# --- what is refused -----------------------------------------------------------------------------------------------


def test_bad_input_is_named():
    case = Case()
    arguments = (case.hidden, case.weight, case.labels, case.token_weight)
    with pytest.raises(ValueError, match="outside the vocabulary of 31: -100 to"):
        drafter_loss(case.hidden, case.weight, case.labels.index_fill(0, torch.arange(N), -100), torch.ones(N))
    student = Student(*arguments, "forward_kl", teacher_index=case.index)
    with pytest.raises(ValueError, match="not among the rows"):
        student.observe(torch.tensor([0, N]), torch.zeros(2, V), torch.zeros(2))

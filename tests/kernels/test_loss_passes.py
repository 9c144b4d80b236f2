"""Losses, gradients and acceptance by the kernels are those of float64, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from interpreted import Interpreter, interpreter
from train_ranks import on_two

from megatron_rlspec.kernels import chosen
from megatron_rlspec.losses import choice
from megatron_rlspec.losses.drafter import Kind, Student
from megatron_rlspec.losses.fused import FusedRows, Taught
from megatron_rlspec.losses.head import DraftHead, VocabParallelHead
from megatron_rlspec.losses.logprobs import policy_logprobs
from megatron_rlspec.noise import noisy
from megatron_rlspec.types import SHARPNESS

KINDS = get_args(Kind)

pytest.importorskip("triton", reason="Triton is not installed; the kernels were not run")
PHASES = (Phase.reuse, Phase.generate)  # the interpreter is slow: a smaller example would take minutes
H, V = 8, 40


@pytest.fixture(scope="module")
def kernel() -> Iterator[Interpreter]:
    with interpreter() as found, mock.patch.object(chosen, "losses", lambda *_: found.losses):
        found.losses.BLOCK = 32
        yield found


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw logits of students and of a teacher: flat to peaked, with ties, masked words and large offsets."""
    width, rows = draw(st.sampled_from((2, 33, 90))), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    logits = draw(st.sampled_from((0.0, 1.0, 4.0, 20.0))) * random.normal(size=(2, rows, width))
    kind = draw(st.sampled_from(("as drawn", "steps", "masked", "large", "same")))
    if kind == "steps":
        logits = logits.round()
    elif kind == "masked":
        logits[:, :, random.permutation(width)[: width // 2]] = -np.inf
    elif kind == "large":
        logits += 1000
    elif kind == "same":
        logits[1] = logits[0]
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    labels = torch.from_numpy(np.where(np.isfinite(logits[0]), random.random((rows, width)), -1).argmax(1))
    student, teacher = torch.from_numpy(logits).to(dtype)
    words = None
    if draw(st.booleans()):
        words = torch.from_numpy(np.union1d(labels[:1].numpy(), random.permutation(width)[: width // 2]))
    return {
        "student": student,
        "teacher": teacher[random.permutation(rows)],
        "rows": torch.from_numpy(random.integers(0, rows, rows)),
        "labels": labels,
        "words": words,
        "temperature": draw(st.sampled_from((1.0, 0.3, 1.7))),
        "scales": torch.from_numpy(random.random(rows)).float(),
        "seeds": torch.from_numpy(random.integers(-1, 2**62, rows)),
        "keys": torch.arange(rows),
    }


def in_float64(case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses of rows, with other results, and the gradients of scales · loss in the scores, by loss."""
    z = (case["student"].double() / case["temperature"]).clamp(min=-1e30)
    logp = (case["teacher"].double() / case["temperature"]).clamp(min=-1e30).log_softmax(1)[case["rows"]]
    labels, words = case["labels"], case["words"]
    inside = torch.ones(z.shape[1], dtype=torch.bool)
    if words is not None:
        inside = torch.zeros_like(inside).index_fill_(0, words, True)
    z = z[:, inside].requires_grad_()
    logq = z.new_full((len(labels), len(inside)), -1e30)
    logq[:, inside] = z.log_softmax(1)
    p, q = logp.exp(), logq.exp()
    covered = inside[labels].double()
    pick = torch.arange(len(labels)), labels
    mass = (p * inside).sum(1)
    mean = (p[:, inside] * (logp - logq)[:, inside]).sum(1)
    losses = {
        "ce": torch.where(covered != 0, -logq[pick], 0),
        "entropy": -(q * logq).sum(1),
        "forward_kl": mean - torch.xlogy(mass, mass),
    }
    gradients = {}
    for name, loss in losses.items():
        (gradients[name],) = torch.autograd.grad((case["scales"] * loss).sum(), z, retain_graph=True)
    best = inside.nonzero()[:, 0][z.argmax(1)]
    drafts = [
        noisy((factor * z).detach(), case["seeds"], case["keys"], inside.nonzero()[:, 0]).argmax(1)
        for factor in SHARPNESS
    ]
    coupled = (inside.nonzero()[:, 0][torch.stack(drafts, 1)] == labels[:, None]) & (case["seeds"] >= 0)[:, None]
    rest = {"overlap": torch.minimum(p, q).sum(1), "argmax_prob": p[torch.arange(len(best)), best], "best": best}
    return losses | rest | {"coupled": coupled, "covered": covered}, gradients


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected).abs().max() <= tolerance * (1 + expected.abs().max()))


def check(kernel: Interpreter, case: dict[str, Any]) -> None:
    width = case["student"].shape[1]
    weight = torch.empty(width, 1, dtype=case["student"].dtype)
    full = replace(VocabParallelHead.of(weight, case["temperature"], None), kernel=kernel.losses)
    head = full if case["words"] is None else DraftHead.of_words(full, case["words"])
    student = case["student"] if case["words"] is None else case["student"].index_select(1, case["words"])
    labels, scales = case["labels"], case["scales"]
    expected, gradients = in_float64(case)
    covered = expected["covered"].float()
    lse = FusedRows(full, case["teacher"], torch.zeros_like(labels)).lse
    taught = Taught(full, case["teacher"], lse, case["rows"])
    largest = max(float(x[x.isfinite()].abs().max()) for x in (case["student"], case["teacher"]))
    exact = 4e-6 + 2e-7 * largest / case["temperature"]  # float32 holds z, and a probability is its exponential
    tolerance = exact if student.dtype == torch.float32 else 2**-7  # the interpreter truncates to bfloat16
    for kind in ("ce", "entropy", "forward_kl"):
        logits = student.clone()
        kernel.forget()
        teacher = taught if kind == "forward_kl" else None
        rows = FusedRows(head, logits, labels, kind == "entropy", teacher, (case["seeds"], case["keys"]))
        best, _ = rows.best()
        assert torch.equal(best, expected["best"])
        assert torch.equal(rows.coupled() * covered[:, None] != 0, expected["coupled"] & (covered != 0)[:, None])
        assert near(taught.logprob(best).exp(), expected["argmax_prob"], exact)
        if kind == "ce":
            loss = -rows.logprob * covered
            rows.write_label(-scales * covered)
        elif kind == "entropy":
            loss = rows.value
            zeros = torch.zeros_like(scales)
            places = head.places(labels)
            chunk = logits, head.width, head.temperature
            kernel.losses.write_label(*chunk, rows.lse, places, zeros, (scales, rows.value))
        else:
            overlap, loss = rows.write_forward_kl(scales)
            assert near(overlap, expected["overlap"], exact)
        assert near(loss, expected[kind], exact), kind
        assert near(logits, gradients[kind], tolerance), kind
        reads, writes = kernel.traffic(logits)
        assert (reads == 2).all() and (writes == 1).all(), kind
        if kind == "forward_kl" and case["words"] is None:
            assert (kernel.traffic(case["teacher"])[0][case["rows"].unique()] % 2 == 0).all()


@settings(max_examples=6, derandomize=True, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_losses_and_gradients_are_those_of_float64(kernel: Interpreter, case: dict[str, Any]) -> None:
    check(kernel, case)


@pytest.mark.slow
@settings(max_examples=40, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(case=cases(), block=st.sampled_from((16, 128)))
def test_losses_do_not_depend_on_tiles(kernel: Interpreter, case: dict[str, Any], block: int) -> None:
    with mock.patch.object(kernel.losses, "BLOCK", block):
        check(kernel, case)


WORDS = {"all": None, "some": torch.tensor([1, 3, 4, 20, 21, 30, 38]), "few": torch.tensor([2, 5])}
WORDS["own"] = WORDS["some"]


class Step:
    """One step of policy and drafter from hidden states; with `rank`, where two ranks have half the words each."""

    def __init__(self, dtype: torch.dtype = torch.float32, rank: int | None = None, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

        self.hidden, self.policy, self.weight, self.own = normal(12, H), normal(6, H), normal(V, H), normal(7, H)
        self.labels = torch.randint(0, V, (12,), generator=generator).to(device)
        self.token_weight = torch.rand(12, generator=generator).mul_(torch.arange(12) % 3).to(device)
        self.rows = torch.arange(12, device=device)
        self.shared: dict[str, Any] = {"tp_group": None if rank is None else dist.group.WORLD, "chunk": 5}
        if rank is not None:
            self.weight = self.weight.detach()[rank * V // 2 :][: V // 2].clone().requires_grad_()

    def run(self, kind: Any, words: str = "all", drafter: bool = True) -> dict[str, torch.Tensor]:
        """Return everything that a step leaves. words: all; some, or few, of the policy's head; a head of its own."""
        own = self.own if words == "own" else None
        chosen_words = None if WORDS[words] is None else WORDS[words].to(self.rows.device)
        student = Student(
            self.hidden, self.weight, self.labels, self.token_weight, kind, teacher_index=self.rows // 2,
            groups=self.rows % 2, num_groups=2, temperature=0.7, keep_rows=True, words=chosen_words, own=own,
            noise=(self.rows - 1, self.rows), **self.shared,
        )  # fmt: skip
        logprobs, entropy = policy_logprobs(
            self.policy, self.weight, self.labels[:6], 0.7, with_entropy=True, **self.shared,
            observe=student.observe if drafter and kind != "ce" else None,
        )  # fmt: skip
        loss = (logprobs * torch.linspace(-1, 1, 6, device=logprobs.device) + 0.1 * entropy).sum()
        kept = {"logprobs": logprobs, "entropy": entropy}
        if drafter:
            if kind == "ce":
                student.learn_labels()
            total, metrics = student.finish()
            loss = loss + total
            kept |= {"total": total} | metrics | {f"row {name}": value for name, value in student.rows.items()}
        loss.backward()
        tensors = {"hidden": self.hidden, "policy": self.policy, "weight": self.weight, "own": self.own}
        return {k: v.detach() for k, v in kept.items()} | {k: v.grad for k, v in tensors.items() if v.grad is not None}


@pytest.mark.parametrize("words", ["all", "some", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_plain_torch(kernel: Interpreter, kind: str, words: str) -> None:
    """Losses, metrics, results of rows, predicted acceptance and all gradients, in float32."""
    found = Step().run(kind, words)
    with mock.patch.object(chosen, "losses", lambda *_: None):
        expected = Step().run(kind, words)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same(found[name], value, name)


def same(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, msg=lambda text: f"{name}: {text}")


def test_the_policy_is_the_same_bits_without_a_drafter(kernel: Interpreter) -> None:
    alone = Step(torch.bfloat16).run("forward_kl", drafter=False)
    beside = Step(torch.bfloat16).run("forward_kl")
    for name in ("logprobs", "entropy", "policy", "weight"):
        assert torch.equal(alone[name], beside[name]), name


def test_a_function_as_loss_sees_whole_distributions(kernel: Interpreter) -> None:
    def own(rows: Any) -> torch.Tensor:
        return (rows.policy_logprobs.exp() * (rows.policy_logprobs - rows.draft_logprobs)).sum(-1)

    found, expected = Step().run(own), Step().run("forward_kl")
    torch.testing.assert_close(found["hidden"], expected["hidden"], rtol=2e-5, atol=2e-6)


def test_what_is_not_a_number_stays_so(kernel: Interpreter) -> None:
    """The training step then skips the update."""
    step = Step()
    with torch.no_grad():
        step.policy[0] = torch.nan
    found = step.run("forward_kl")
    assert found["logprobs"][0].isnan() and found["entropy"][0].isnan() and found["policy"][0].isnan().all()
    assert found["logprobs"][1:].isfinite().all() and found["total"].isnan()


def test_a_kernel_is_chosen_if_its_losses_are_right(kernel: Interpreter) -> None:
    losses, cpu = kernel.losses, torch.device("cpu")
    with mock.patch.object(losses, "BLOCK", 1024):
        assert choice.agrees(losses, cpu)
        write = losses.write_forward_kl

        def wrong(logits: torch.Tensor, *rest: Any) -> Any:
            result = write(logits, *rest)
            logits[0, 7] += 0.1
            return result

        with mock.patch.object(losses, "write_forward_kl", wrong):
            assert not choice.agrees(losses, cpu)


def steps_in_worker(rank: int) -> list[dict[str, torch.Tensor]]:
    assert not chosen.all_have_kernels(rank == 0, dist.group.WORLD, torch.device("cpu"))
    with interpreter() as found, mock.patch.object(chosen, "losses", lambda *_: found.losses):
        return [Step(rank=rank).run(kind, words) for kind, words in SHARDED]


SHARDED = [("ce", "few"), ("forward_kl", "own"), ("forward_kl", "few"), ("forward_kl", "all")]


@pytest.mark.slow
def test_two_ranks_are_one() -> None:
    """Over gloo, with half the vocabulary on each rank; the few words lie on one of them."""
    first, second = on_two(steps_in_worker)
    for case, one, other in zip(SHARDED, first, second, strict=True):
        with mock.patch.object(chosen, "losses", lambda *_: None):
            expected = Step().run(*case)
        for name, value in expected.items():
            if name == "weight":
                same(torch.cat([one[name], other[name]]), value, f"{case} {name}")
            else:
                same(one[name], value, f"{case} {name}")
                assert torch.equal(one[name], other[name])

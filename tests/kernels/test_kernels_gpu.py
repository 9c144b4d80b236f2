"""The kernels on a real GPU: what plain torch computes there, at the size of a real vocabulary."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_loss_passes import KINDS, Step

from megatron_rlspec.kernels import chosen
from megatron_rlspec.losses import choice
from megatron_rlspec.noise import noisy
from megatron_rlspec.push import fingerprint as fingerprints

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS, WORDS = 256, 151_680
TIE = 1e-4  # of two scores in float32, which sums in another order may exchange


def rows_of(kind: str) -> torch.Tensor:
    """Make logits [ROWS, WORDS]: flat, peaked as a language model's, or rounded, so that many are equal."""
    generator = torch.Generator("cuda").manual_seed(0)
    normal = torch.randn(ROWS, WORDS, device="cuda", generator=generator)
    if kind == "flat":
        return 4 * normal
    if kind == "rounded":
        return (4 * normal).round()
    return -2 * (1 + normal.argsort(1)).log()


@pytest.mark.parametrize("kind", ["flat", "peaked", "rounded"])
def test_tokens_are_those_of_plain_torch(kind: str) -> None:
    logits = rows_of(kind)
    kernel = chosen.sampling(logits)
    assert kernel is not None, "the kernel was refused; the log says why"
    row = torch.arange(ROWS, device="cuda")
    seeds, positions = row * 0x9E3779B97F4A7C1, row * 7
    temperatures = 0.7 + 0.01 * (row % 60).float()
    tokens, logprobs = kernel.sample(logits, seeds, positions, temperatures)
    expected = torch.log_softmax(logits.double() / temperatures[:, None], 1)
    scores = noisy(expected, seeds, positions)
    picked = scores.gather(1, tokens[:, None])[:, 0]
    assert (scores.amax(1) - picked < TIE).all()
    assert (tokens == scores.argmax(1)).sum() >= ROWS - 4
    torch.testing.assert_close(logprobs.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)


def test_drafts_of_a_reduced_vocabulary_take_the_noise_of_the_targets_words() -> None:
    logits = rows_of("peaked")[:, :32_000].contiguous()
    kernel = chosen.sampling(logits)
    assert kernel is not None
    row = torch.arange(ROWS, device="cuda")
    words = torch.randperm(WORDS, device="cuda")[:32_000]
    ones = torch.ones(ROWS, device="cuda")
    tokens, _ = kernel.sample(logits, row, row * 3, ones, 1.5 * ones, words)
    scores = noisy(1.5 * logits.double().log_softmax(1), row, row * 3, words)
    assert (tokens == scores.argmax(1)).sum() >= ROWS - 2


@pytest.mark.parametrize("words", ["all", "some", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_plain_torch(kind: str, words: str) -> None:
    found = Step(device="cuda").run(kind, words)
    assert chosen.losses(torch.empty(1, device="cuda"), choice.agrees) is not None, (
        "the kernel was refused; the log says why"
    )
    with mock.patch.object(chosen, "losses", lambda *_: None):
        expected = Step(device="cuda").run(kind, words)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023


def test_the_policy_is_the_same_bits_without_a_drafter() -> None:
    alone, beside = (
        Step(torch.bfloat16, device="cuda").run("forward_kl", drafter=drafter) for drafter in (False, True)
    )
    for name in ("logprobs", "entropy", "policy", "weight"):
        assert torch.equal(alone[name], beside[name]), name


def test_fingerprints_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes: list[tuple[Any, ...]] = [(3, torch.bool), (7, torch.bfloat16), (300 << 16, torch.bfloat16)]
    sizes += [(1, torch.float64), (0, torch.float32), (5 << 16, torch.float32), (131_075, torch.int8)]
    tensors = [torch.randint(0, 100, (size,), generator=generator).to(dtype) for size, dtype in sizes]
    found = fingerprints.fingerprints(tensor.cuda() for tensor in tensors)
    assert found == fingerprints.fingerprints(tensors)

"""The verifiers as functions: the noise equals SGLang's own source, the filters and walks a plain re-statement."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rlspec import noise
from megatron_rlspec.rollout.embedded import verify

SEEDS = torch.tensor([0, 1, 42, 2**31 + 7, 2**62 + 12345, -5, -(2**63)])
POSITIONS = torch.tensor([0, 7, 100_000, 3, 1, 2**20, 5])


def murmur(seed: int, position: int, column: int) -> int:
    """MurmurHash3 (32 bit, seed 0) of the four little-endian words, on Python's integers."""
    m, h = 0xFFFFFFFF, 0
    for k in (seed & m, seed >> 32 & m, position & m, column & m):
        k = k * 0xCC9E2D51 & m
        k = (k << 15 | k >> 17) & m
        h ^= k * 0x1B873593 & m
        h = (h << 13 | h >> 19) & m
        h = (h * 5 + 0xE6546B64) & m
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B & m
    h = (h ^ h >> 13) * 0xC2B2AE35 & m
    return h ^ h >> 16


def test_the_hash_is_murmur3():
    ours = noise.murmur3(SEEDS, POSITIONS, 300).to(torch.int64) & 0xFFFFFFFF
    for i, (seed, position) in enumerate(zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)):
        assert ours[i].tolist() == [murmur(seed, position, c) for c in range(300)]


@pytest.fixture(scope="module")
def sglang_sampler():
    """`multinomial_with_seed`, executed from the installed source; Triton interprets its hash."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or importlib.util.find_spec("triton") is None:
        pytest.skip("needs sglang and triton")
    root = Path(spec.submodule_search_locations[0])
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    source = importlib.util.spec_from_file_location("kernel", root / "kernels/ops/sampling/murmur_hash.py")
    kernel = importlib.util.module_from_spec(source)
    source.loader.exec_module(kernel)

    def murmur_hash32(seed, positions, columns):
        out = torch.empty((len(seed), len(columns)), dtype=torch.uint32)
        kernel.murmur_hash32_kernel[(len(seed), 1)](seed, positions, columns, out, *out.shape, BLOCK_SIZE=1024)
        return out

    tree = ast.parse((root / "srt/layers/sampler.py").read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "multinomial_with_seed"]
    names = {"torch": torch, "is_npu": lambda: True, "murmur_hash32": murmur_hash32}
    exec(compile(tree, "sampler.py", "exec"), names)
    yield names["multinomial_with_seed"]
    patch.undo()


def test_draws_are_sglangs(sglang_sampler):
    g = torch.Generator().manual_seed(0)
    n, v = 64, 700
    probs = torch.softmax(3 * torch.randn(n, v, generator=g), -1)
    seeds = torch.randint(-(2**62), 2**62, (n,), generator=g)
    positions = torch.randint(0, 100_000, (n,), generator=g)
    theirs = sglang_sampler(torch.log(probs), seeds, positions)[:, 0]
    assert verify.draw(torch.log(probs), seeds, positions).tolist() == theirs.tolist()
    assert len(set(theirs.tolist())) > 20


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"), [(0.9, -1, 0.0), (1.0, 5, 0.0), (0.7, 20, 0.0), (1.0, -1, 0.2), (0.95, 20, 0.1)]
)
def test_filtered_draws_are_sglangs_noise_over_what_is_left(sglang_sampler, top_p, top_k, min_p):
    g = torch.Generator().manual_seed(1)
    n, v = 40, 300
    logits = 3 * torch.randn(n, v, generator=g)
    seeds = torch.randint(-(2**62), 2**62, (n,), generator=g)
    positions = torch.randint(0, 100_000, (n,), generator=g)
    temperature = torch.full((n,), 0.8)
    settings = verify.Settings(temperature, *(torch.full((n,), x) for x in (top_p, top_k, min_p)))
    logp = verify.logprobs(logits, temperature)
    left = verify.filtered(logp, settings).softmax(-1)
    theirs = sglang_sampler(torch.log(left), seeds, positions)[:, 0]
    assert 1 < (left > 0).sum(1).float().mean() < 40
    assert verify.sample(logp, settings, seeds, positions).tolist() == theirs.tolist()


@pytest.mark.parametrize("width", [2, 700, 49152])
@pytest.mark.parametrize("sharpness", [0.1, 3, 1000])
def test_draws_maximise_the_noise_of_all_columns(width, sharpness):
    """`draw` computes the noise of few columns on a CPU, and of all on another device, where it must not wait."""
    g = torch.Generator().manual_seed(4)
    n = 24
    logp = torch.log_softmax(sharpness * torch.randn(n, width, generator=g), -1)
    logp[n // 2 :, ::2] = -torch.inf
    seeds = torch.randint(-(2**62), 2**62, (n,), generator=g)
    keys = torch.arange(n)
    gumbel = -torch.log(-torch.log(noise.uniform(seeds, keys, width).clamp(1e-300, 1 - 2.0**-32)))
    expected = (logp.double() + gumbel).argmax(1).tolist()
    assert verify.draw(logp, seeds, keys).tolist() == expected
    assert noise._likeliest_without_waiting(logp, noise.murmur3(seeds, keys, width)).tolist() == expected
    words = torch.randperm(2 * width, generator=g)[:width]
    wide = -torch.log(-torch.log(noise.uniform(seeds, keys, 2 * width).clamp(1e-300, 1 - 2.0**-32)))
    assert verify.draw(logp, seeds, keys, words).tolist() == (logp.double() + wide[:, words]).argmax(1).tolist()


def test_extreme_hashes_never_win_by_themselves(monkeypatch):
    """x = 1 must not give infinite noise, x = 0 must not lift a token of probability 0."""
    hashes = torch.tensor([[-1, -2, 0]], dtype=torch.int32)  # x = 1, the x below it, 0
    monkeypatch.setattr(noise, "murmur3", lambda seeds, keys, width: hashes[:, :width])
    one = torch.zeros(1, dtype=torch.int64)
    log = torch.log(torch.tensor([[0.1, 0.9, 0.0]], dtype=torch.float64))
    assert verify.draw(log, one, one).tolist() == [1]
    assert verify.draw(torch.tensor([[-torch.inf, -torch.inf, 0.0]]), one, one).tolist() == [2]


def test_filters_are_the_plain_definition():
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 9, generator=g, dtype=torch.float64)
    top_p = torch.rand(50, generator=g, dtype=torch.float64)
    top_k = torch.randint(1, 10, (50,), generator=g)
    min_p = torch.rand(50, generator=g, dtype=torch.float64) / 3 * (torch.arange(50) % 2)
    temperature = torch.ones(50)
    settings = verify.Settings(temperature, top_p, top_k, min_p)
    ours = verify.filtered(verify.logprobs(logits, temperature), settings).softmax(-1)
    for i in range(50):
        p = torch.softmax(logits[i], 0).tolist()
        kept, mass = {}, 0.0
        for rank, token in enumerate(sorted(range(9), key=lambda t: -p[t])):
            if rank < top_k[i] and mass <= top_p[i] and p[token] >= min_p[i] * max(p):
                kept[token] = p[token]
            mass += p[token]
        expected = [kept.get(t, 0.0) / sum(kept.values()) for t in range(9)]
        np.testing.assert_allclose(ours[i].tolist(), expected, atol=1e-14)

    halves = (
        torch.tensor([[0.5, 0.25, 0.25]]).double().log()
    )  # what lies above the second weighs exactly top_p: it stays
    settings = verify.Settings(torch.ones(1), torch.tensor([0.5]), torch.tensor([2]), torch.zeros(1))
    kept = verify.filtered(halves, settings).softmax(-1)
    np.testing.assert_allclose(kept.tolist(), [[2 / 3, 1 / 3, 0]])

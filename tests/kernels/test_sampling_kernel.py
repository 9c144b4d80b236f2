"""The sampling kernel draws what a float64 oracle draws, in one read of the logits, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from interpreted import Interpreter, interpreter
from test_embedded_verify import murmur

from megatron_rlspec.noise import draw

pytest.importorskip("triton", reason="Triton is not installed; the kernels were not run")
SIZES = {"BLOCK": 32, "MANY_PARTS": 2}
MASK = 0xFFFFFFFF
PHASES = (Phase.reuse, Phase.generate)  # the interpreter is slow: a smaller example would take minutes


@pytest.fixture(scope="module")
def kernel() -> Iterator[Interpreter]:
    with interpreter() as found:
        yield found


def test_a_batch_that_shrinks_compiles_nothing_anew() -> None:
    """Triton compiles anew for an integer that is 1, and for one that 16 does not divide."""
    from megatron_rlspec.kernels import sampling

    cuts = {sampling.parts_of(rows, 151_680) for rows in range(1, 2049)}
    assert {parts for parts, _ in cuts} == {sampling.MANY_PARTS, sampling.FEW_PARTS}
    assert all(columns % 16 == 0 for _, columns in cuts)


def word_with(seed: int, position: int, wanted: int) -> int:
    """Return the word whose hash is `wanted`: MurmurHash3 backwards."""
    h = wanted ^ wanted >> 16
    h = h * pow(0xC2B2AE35, -1, 1 << 32) & MASK
    h = (h ^ h >> 13 ^ h >> 26) * pow(0x85EBCA6B, -1, 1 << 32) & MASK
    h = (h ^ h >> 16) ^ 16
    h = (h - 0xE6546B64) * pow(5, -1, 1 << 32) & MASK
    h = (h >> 13 | h << 19) & MASK
    state = 0
    for k in (seed & MASK, seed >> 32 & MASK, position & MASK):
        k = k * 0xCC9E2D51 & MASK
        state ^= (k << 15 | k >> 17) * 0x1B873593 & MASK
        state = ((state << 13 | state >> 19) & MASK) * 5 + 0xE6546B64 & MASK
    k = (h ^ state) * pow(0x1B873593, -1, 1 << 32) & MASK
    k = (k >> 15 | k << 17) & MASK
    word = k * pow(0xCC9E2D51, -1, 1 << 32) & MASK
    assert murmur(seed, position, word) == wanted
    return word


def noise(seed: int, position: int, words: np.ndarray) -> np.ndarray:
    u = np.array([murmur(seed, position, word) for word in words.tolist()], np.float64) / MASK
    with np.errstate(divide="ignore"):
        return -np.log(-np.clip(np.log(u), -np.finfo(np.float64).max, -(2.0**-32)))


def scaled(row: np.ndarray, temperature: float) -> np.ndarray:
    return (row.astype(np.float32) / np.float32(temperature)).astype(np.float32)


def check(kernel: Interpreter, sizes: dict[str, int], given: dict[str, np.ndarray]) -> None:
    """Draw, and compare tokens, log-probs and the number of reads."""
    found = kernel.sample(sizes=sizes, **given)
    rows, width = given["logits"].shape
    full = {"sharpness": np.ones(rows, np.float32), "words": np.arange(width)} | given
    for row in range(rows):
        z = scaled(full["logits"][row], full["temperatures"][row])
        y = z * full["sharpness"][row]
        score = y.astype(np.float64) + noise(int(full["seeds"][row]), int(full["positions"][row]), full["words"])
        token = int(found.tokens[row])
        assert token == score.argmax()
        exact = z[token] - z.max() - np.log(np.exp(z.astype(np.float64) - z.max()).sum())
        assert abs(found.logprobs[row] - exact) < 2e-6 * max(1, abs(exact))
    assert (found.reads == 1).all()


@st.composite
def rows(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Draw one to six rows, with ties, plateaus, masked words, sharpness and words."""
    width = draw(st.sampled_from((2, 33, 100)))
    count = draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    logits = draw(st.sampled_from((0.0, 1.0, 4.0, 20.0))) * random.normal(size=(count, width))
    kind = draw(st.sampled_from(("as drawn", "steps", "masked", "large")))
    if kind == "steps":
        logits = logits.round()
    elif kind == "masked":
        logits[:, random.permutation(width)[: width // 2]] = -np.inf
    elif kind == "large":
        logits += 1e4
    some = lambda *values: np.array(draw(st.lists(st.sampled_from(values), min_size=count, max_size=count)))  # noqa: E731
    given = {
        "logits": logits.astype(np.float32),
        "seeds": random.integers(-(2**63), 2**63, count),
        "positions": random.integers(0, 2**31, count),
        "temperatures": some(1.0, 0.3, 1.7).astype(np.float32),
    }
    if draw(st.booleans()):
        given["sharpness"] = some(0.5, 1.0, 2.0).astype(np.float32)
        given["words"] = random.permutation(3 * width)[:width]
    return given


@settings(max_examples=6, derandomize=True, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(given=rows())
def test_tokens_are_those_of_the_oracle(kernel: Interpreter, given: dict[str, np.ndarray]) -> None:
    check(kernel, SIZES, given)


@pytest.mark.slow
@settings(max_examples=60, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(given=rows(), block=st.sampled_from((16, 64)), parts=st.sampled_from((1, 3, 4)))
def test_tokens_do_not_depend_on_tiles_and_parts(
    kernel: Interpreter, given: dict[str, np.ndarray], block: int, parts: int
) -> None:
    check(kernel, {"BLOCK": block, "MANY_PARTS": parts}, given)


@pytest.mark.parametrize("sharpness", [0.3, 20.0])
def test_tokens_are_those_of_plain_torch(kernel: Interpreter, sharpness: float) -> None:
    """Flat to peaked logits: the same tokens as softmax, log and draw, which engines use without a GPU."""
    random = np.random.default_rng(0)
    logits = (sharpness * random.normal(size=(6, 200))).astype(np.float32)
    logits[3:] = logits[3:].round()
    given = {
        "seeds": random.integers(-(2**63), 2**63, 6),
        "positions": np.arange(6),
        "temperatures": np.full(6, 0.9, np.float32),
    }
    found = kernel.sample(sizes=SIZES | {"BLOCK": 256}, logits=logits, **given)
    seeds, positions, temperatures = (torch.from_numpy(value) for value in given.values())
    logprobs = torch.log_softmax(torch.from_numpy(logits) / temperatures[:, None], -1)
    tokens = draw(logprobs, seeds, positions)
    assert found.tokens.tolist() == tokens.tolist()
    assert np.allclose(found.logprobs, logprobs.gather(1, tokens[:, None])[:, 0], atol=2e-6)


def test_extreme_noise(kernel: Interpreter) -> None:
    """u = 1 gives the noise of the value below it, and u = 0 lifts no token of probability 0."""
    words = np.array([word_with(3, 4, hashed) for hashed in (MASK, MASK - 1, 0, 1 << 31)])
    low = -np.inf
    logits = np.log(np.array([[0.1, 0.9, low, low], [low, low, 1.0, low], [1.0, 1.0, 1.0, 1.0]], np.float32).clip(0))
    rows = len(logits)
    found = kernel.sample(
        sizes=SIZES,
        logits=logits,
        seeds=np.full(rows, 3),
        positions=np.full(rows, 4),
        temperatures=np.ones(rows, np.float32),
        words=words,
    )
    assert found.tokens.tolist() == [1, 2, 0]


def test_noise_so_low_that_a_token_far_behind_wins(kernel: Interpreter) -> None:
    """u = 0 puts the likeliest token 709 below its logit. The next is 63 behind, in the same tile or a later one."""
    words = np.arange(64) + 1000
    words[0] = word_with(3, 4, 0)
    logits = np.full((2, 64), -200, np.float32)
    logits[:, 0] = 0
    logits[0, 1] = logits[1, 50] = -63
    found = kernel.sample(
        sizes=SIZES | {"MANY_PARTS": 1},
        logits=logits,
        seeds=np.full(2, 3),
        positions=np.full(2, 4),
        temperatures=np.ones(2, np.float32),
        words=words,
    )
    assert found.tokens.tolist() == [1, 50]


@pytest.mark.parametrize("sharpness", [0.001, 4.0])
def test_a_row_of_tiles(kernel: Interpreter, sharpness: float) -> None:
    """Tiles that hold nothing or have a peak far above or below the one before, and a row that holds nothing."""
    random = np.random.default_rng(2)
    steps = np.array([-np.inf, 0, 150, -300, -np.inf, 151, 150.5, 400], np.float32)
    logits = np.repeat(steps, 16) + random.normal(size=(5, 128))
    logits[1] = logits[1, ::-1]
    logits[4] = -np.inf
    given = {
        "seeds": random.integers(-(2**63), 2**63, 5),
        "positions": np.arange(5),
        "temperatures": np.ones(5, np.float32),
        "sharpness": np.full(5, sharpness, np.float32),
    }
    given["logits"] = logits.astype(np.float32)
    sizes = {"BLOCK": 16, "MANY_PARTS": 2}
    check(kernel, sizes, {name: value[:4] for name, value in given.items()})
    assert kernel.sample(sizes=sizes, **given).tokens[4] == 0


def test_what_is_not_a_number_is_not_drawn(kernel: Interpreter) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[0, ::2] = np.nan
    logits[1, ::2] = -np.inf
    logits[2, ::2] = -1e38
    given = {"seeds": np.full(3, 5), "positions": np.full(3, 6), "temperatures": np.ones(3, np.float32)}
    found = kernel.sample(sizes={"BLOCK": 16, "MANY_PARTS": 2}, logits=logits, **given)
    assert (found.tokens % 2 == 1).all() and len(set(found.tokens.tolist())) == 1
    assert np.allclose(found.logprobs, -np.log(20), atol=1e-6)


def test_equal_scores(kernel: Interpreter) -> None:
    """Beside logits of 1e20 the noise is lost, and all scores are equal: the lowest column wins, as in torch."""
    given = {
        "logits": np.full((2, 12), 1e20, np.float32),
        "seeds": np.array([1, 2]),
        "positions": np.array([3, 4]),
        "temperatures": np.ones(2, np.float32),
    }
    assert kernel.sample(sizes=SIZES, **given).tokens.tolist() == [0, 0]

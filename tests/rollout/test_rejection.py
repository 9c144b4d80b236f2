"""Rejection sampling on GPUs is a Triton kernel of SGLang: exact in Triton's interpreter, and it compiles for an H100.

Its random numbers are arguments. So no draw is random here: for every path of drafts and every outcome the kernel gets
coins from the middle of their intervals, and each result counts with the intervals' widths. One process runs all cases.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
WORDS = 4
DRAFTS = 2
EDGE = 1e-5  # of a coin's threshold, in float32
Text = tuple[int, ...]
Model = dict[Text, np.ndarray]  # from every text of up to DRAFTS tokens to the next token's probabilities [WORDS]


def model(seed: int, zeros: int) -> Model:
    """Return random probabilities, `zeros` of them 0 after each text, as top-k leaves them."""
    random = np.random.default_rng(seed)
    found = {}
    for length in range(DRAFTS + 1):
        for text in itertools.product(range(WORDS), repeat=length):
            row = random.dirichlet(np.ones(WORDS))
            row[random.permutation(WORDS)[:zeros]] = 0
            found[text] = (row / row.sum()).astype(np.float32)
    return found


@dataclass
class Cases:
    """What the kernel gets, a row a case, and what it must give: `expected` tokens, `weights` of the outcome."""

    drafts: list[Text] = field(default_factory=list)
    coins: list[list[float]] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    expected: list[Text] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def write(self, path: Path, p: Model, q: Model) -> None:
        texts = [[draft[:i] for i in range(DRAFTS + 1)] for draft in self.drafts]
        np.savez(
            path,
            candidates=np.array([(0, *draft) for draft in self.drafts], np.int64),
            coins=np.array([[*coins, 0.0] for coins in self.coins], np.float32),
            last_coins=np.array(self.last, np.float32),
            p=np.stack([[p[text] for text in row] for row in texts]),
            q=np.stack([[q[text] for text in row[:-1]] for row in texts]),
        )


def committed(path: Path) -> list[Text]:
    """Read the tokens that the kernel commits in each case."""
    result = np.load(path)
    slots = DRAFTS + 1
    for row, count in enumerate(result["accepted"]):
        walked = [row * slots + i for i in range(count + 1)] + [-1] * (DRAFTS - count)
        assert result["accepted_at"][row].tolist() == walked
    both = zip(result["tokens"], result["accepted"], strict=True)
    return [tuple(tokens[: count + 1].tolist()) for tokens, count in both]


def intervals(weights: np.ndarray) -> list[tuple[int, float, float]]:
    """Return (index, begin, end) of each index's part of the unit interval, empty ones left out."""
    ends = np.cumsum(weights / weights.sum())
    return [(i, end - w, end) for i, (end, w) in enumerate(zip(ends, weights / weights.sum(), strict=True)) if w > 0]


def every_outcome(p: Model, q: Model) -> Cases:
    """Return a case for every path of drafts, number of accepted ones and last token."""
    cases = Cases()
    for drafts in itertools.product(range(WORDS), repeat=DRAFTS):
        path = np.prod([q[drafts[:i]][drafts[i]] for i in range(DRAFTS)])
        if path == 0:
            continue
        shares = [min(1.0, float(p[drafts[:i]][drafts[i]] / q[drafts[:i]][drafts[i]])) for i in range(DRAFTS)]
        for accepted in range(DRAFTS + 1):
            coins = [share / 2 for share in shares]
            weight = path * np.prod(shares[:accepted])
            after = p[drafts[:accepted]]
            if accepted < DRAFTS:
                coins[accepted] = (1 + shares[accepted]) / 2
                weight *= 1 - shares[accepted]
                after = np.maximum(after - q[drafts[:accepted]], 0)
            if weight <= EDGE:
                continue
            for token, begin, end in intervals(after):
                cases.drafts.append(drafts)
                cases.coins.append(coins)
                cases.last.append((begin + end) / 2)
                cases.expected.append((*drafts[:accepted], token))
                cases.weights.append(weight * (end - begin))
    return cases


def distribution(cases: Cases, committed: list[Text], p: Model) -> np.ndarray:
    """Return the probabilities of the first DRAFTS + 1 tokens, where the target draws what was not committed."""
    found = np.zeros([WORDS] * (DRAFTS + 1))
    for text, weight in zip(committed, cases.weights, strict=True):
        for rest in itertools.product(range(WORDS), repeat=DRAFTS + 1 - len(text)):
            whole = text + rest
            found[whole] += weight * np.prod([p[whole[:i]][whole[i]] for i in range(len(text), len(whole))])
    return found


def at_thresholds(p: Model, q: Model) -> Cases:
    """Return cases with coins just beside p/q, and beside the places where the last token changes."""
    cases = Cases()
    for draft in range(WORDS):
        share = float(p[()][draft] / q[()][draft])
        if share >= 1:
            continue
        rejected = intervals(np.maximum(p[()] - q[()], 0))
        for coin, last, text in [
            *((share + EDGE, begin + EDGE, (token,)) for token, begin, _ in rejected),
            *((share + EDGE, end - EDGE, (token,)) for token, _, end in rejected),
            (share - EDGE, 0.5, (draft,)),
        ]:
            cases.drafts.append((draft, 0))
            cases.coins.append([coin, 1.0])
            cases.last.append(last)
            cases.expected.append(text)
    return cases


P = {zeros: model(1, zeros) for zeros in (0, 2)}
CASES = {f"exact-{zeros}": every_outcome(P[zeros], model(2, zeros)) for zeros in P}
# The control: drafts come from other probabilities than the kernel is given.
CASES |= {f"control-{zeros}": every_outcome(P[zeros], model(3, zeros)) for zeros in P}
CASES["thresholds"] = at_thresholds(P[0], model(2, 0))
LOGITS = np.random.default_rng(0).normal(size=8).astype(np.float32)
DRAWS = 2000


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rejection")
    for name, cases in CASES.items():
        zeros = int(name[-1]) if name[-1].isdigit() else 0
        cases.write(folder / f"cases-{name}.npz", P[zeros], model(2, zeros))
    np.savez(folder / "logits.npz", logits=np.tile(LOGITS, (DRAWS, 1)), temperature=0.7)
    program = Path(__file__).with_name("rejection_kernel.py")
    done = subprocess.run([sys.executable, str(program), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("zeros", P)
def test_committed_tokens_have_the_targets_distribution(zeros: int, results: Path) -> None:
    p = P[zeros]
    cases = CASES[f"exact-{zeros}"]
    found = committed(results / f"result-exact-{zeros}.npz")
    assert found == cases.expected
    wanted = np.zeros([WORDS] * (DRAFTS + 1))
    for text in itertools.product(range(WORDS), repeat=DRAFTS + 1):
        wanted[text] = np.prod([p[text[:i]][text[i]] for i in range(DRAFTS + 1)])
    assert np.abs(distribution(cases, found, p) - wanted).sum() / 2 < 1e-5
    control = committed(results / f"result-control-{zeros}.npz")
    assert np.abs(distribution(CASES[f"control-{zeros}"], control, p) - wanted).sum() / 2 > 0.02


def test_a_coin_decides_at_its_threshold(results: Path) -> None:
    """A draft is accepted below p/q and rejected above; the last token changes where the residual's sum says."""
    expected = CASES["thresholds"].expected
    found = committed(results / "result-thresholds.npz")
    accepted = [text for text in found if len(text) > 1]
    assert 0 < len(accepted) < len(found)
    assert [text[: len(want)] for text, want in zip(found, expected, strict=True)] == expected


def test_a_draft_has_the_probabilities_that_it_is_verified_with(results: Path) -> None:
    """Chi-square of the drafts over eight words at level 0.001. Greedy requests draft the likeliest word."""
    found = np.load(results / "drafts.npz")
    weights = np.exp(LOGITS.astype(np.float64) / 0.7)
    assert np.allclose(found["q"], weights / weights.sum(), atol=1e-6)
    assert np.array_equal(found["of_draft"], np.take_along_axis(found["q"], found["drafts"], 1))
    expected = DRAWS * weights / weights.sum()
    seen = np.bincount(found["drafts"].ravel(), minlength=8)
    assert ((seen - expected) ** 2 / expected).sum() < 24.3  # 7 degrees of freedom
    assert found["greedy"].ravel().tolist() == [LOGITS.argmax()]
    assert np.array_equal(found["largest"], found["values"].argmax(-1))


def test_the_kernel_compiles_for_an_h100() -> None:
    """For rounds of three drafts from 151,680 words, by the assembler that Triton brings."""
    triton = pytest.importorskip("triton")
    from sglang.kernels.ops.speculative.reject_sampling import speculative_sampling_classic_kernel as kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    integers = {"Predicts": "*i32", "AcceptIndex": "*i32", "AcceptTokenNum": "*i32"}
    pointers = integers | {"Candidates": "*i64", "RetriveIndex": "*i64", "UniformSamples": "*fp32"}
    pointers |= dict.fromkeys(("UniformSamplesFinal", "TargetProbs", "DraftProbs"), "*fp32")
    constants = {"NUM_SLOTS": 4, "VOCAB_SIZE": 151_680, "BLOCK_V": 4096, "BLOCK_VERIFICATION": False}
    constants["BLOCK_REDUCE"] = 32_768
    kinds = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=kinds, constexprs=values), GPUTarget("cuda", 90, 32), {"num_warps": 4}
    )
    assert ".target sm_90" in compiled.asm["ptx"] and compiled.asm["cubin"].startswith(b"\x7fELF")
    assert compiled.metadata.shared <= 227 << 10

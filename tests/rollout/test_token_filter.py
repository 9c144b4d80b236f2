"""Top-k, top-p and min-p keep the tokens that SGLang's own filter keeps, whatever the cut, without large buffers."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rlspec.rollout.sglang.scheduler import token_filter, verifier

ALL = 1 << 30  # SGLang's top_k of a request without one
VOCABULARY = 151_680  # MiMo-7B
NODES = 256 * 4  # of a round of 256 requests and three drafts


@pytest.fixture(scope="module")
def sampler(sglang_models: ModuleType) -> ModuleType:
    from sglang.srt.layers import sampler

    return sampler


def test_a_request_without_a_seed_gets_one_of_its_own():
    """Otherwise the samples of a group would all have one noise, and one text."""

    def request(name: str, seed: int | None) -> SimpleNamespace:
        return SimpleNamespace(rid=name, sampling_params=SimpleNamespace(sampling_seed=seed))

    batch = SimpleNamespace(reqs=[request("a", None), request("b", None), request("c", 0), request("d", 7)])
    batch.device = "cpu"
    first, again = (verifier._keep_seeds(SimpleNamespace(sampling_seed=None), None, batch, 8) for _ in range(2))
    seeds = first.sampling_seed.tolist()
    assert len({*seeds}) == 4 and seeds[2:] == [0, 7] and seeds == again.sampling_seed.tolist()


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


class Buffers(TorchDispatchMode):
    """Record every operator with the shape and dtype of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor):
                self.made.append((func.overloadpacket.__name__, tuple(result.shape), result.dtype))
        return results


@pytest.mark.parametrize("limits", ["none", "top-k", "top-p"])
def test_a_round_makes_no_large_buffers_on_a_gpu(sampler, limits):
    """Run the verifier's draw over 1,024 nodes of 151,680 words on tensors without data.

    SGLang's `multinomial_with_seed` is compiled on a GPU; compiled_draw.py has its buffers.
    """
    drawn = []

    def multinomial(logprobs, seeds, positions):
        drawn.append(logprobs.shape)
        return seeds.new_empty(len(seeds), 1)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(sampler, "multinomial_with_seed", multinomial))
        # Whether a nucleus is wider than the cut depends on values.
        patches.enter_context(mock.patch.object(torch.Tensor, "__bool__", lambda x: True))
        group = SimpleNamespace(world_size=1)
        patches.enter_context(mock.patch.object(verifier.versions.Sglang0523, "tensor_group", lambda self: group))
        softmax = lambda self, logits: logits.softmax(-1)  # noqa: E731
        patches.enter_context(mock.patch.object(verifier.versions.Sglang0523, "softmax", softmax))

        def filtering(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions, **known):
            limits = {"sampling_seed": seeds, "positions": positions, "need_min_p_sampling": need_min_p}
            return verifier._sample_filtered(None, probs, top_ks, top_ps, min_ps, **limits, **known)

        patches.enter_context(mock.patch.object(sampler, "top_k_top_p_min_p_sampling_from_probs_torch", filtering))
        empty = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
        batch = NODES // 4
        info = SimpleNamespace(
            temperatures=empty(batch, 1), top_ks=empty(batch, dtype=torch.int32), top_ps=empty(batch),
            min_ps=empty(batch), sampling_seed=empty(batch, dtype=torch.int64), need_min_p_sampling=False,
            need_top_k_sampling=limits == "top-k", need_top_p_sampling=limits == "top-p",
            max_top_k=50 if limits == "top-k" else None,
        )  # fmt: skip
        logits = empty(NODES, VOCABULARY)
        verified = verifier.VerifyPass(info, logits, empty(NODES, dtype=torch.int64), 4)
        with Buffers() as buffers:
            tokens = verifier.sample_targets(verified)
    assert tokens.shape == (NODES,) and sum(rows for rows, _ in drawn) == NODES
    wide = [made for made in buffers.made if made[1][-1:] == (VOCABULARY,) and len(made[1]) > 1]
    assert {dtype for _, _, dtype in wide} <= {torch.float32, torch.bool, torch.int32}
    assert not {"sort", "argsort"} & {name for name, _, _ in wide}
    assert max(rows * columns for _, (rows, columns), _ in wide) <= verifier.ELEMENTS


@pytest.mark.slow  # imports and compiles SGLang's draw in a process of its own; fifteen seconds
def test_the_compiled_draw_in_a_process_of_its_own(request):
    """Training on a CPU replaces functions of torch, and torch's compiler keeps a table of those it has seen first."""
    cases = Path(__file__).with_name("compiled_draw.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", str(cases)]
    done = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]

"""A draft that comes with a request changes nothing of the sample on SGLang's real engine: text, log-probs, versions.

Two servers on a tiny random MiMo: `drafting`, which prefills 32 tokens at a time and draws from 8 rows of logits at a
time, and `plain`, without speculation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pieces
import pytest
import tiny_mimo
import torch
from test_sglang_engine import CONFIG, ONE_THREAD, WEIGHTS, requests, texts

from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import Partial, Request, Sample, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.lossless]
SERVE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "32"]
LAUNCHES = {
    "drafting": ["--spec", "fixed", "--num-steps", "3", "--chunked-prefill-size", "32"],
    "plain": ["--spec", "off"],
}
SAMPLINGS = {
    "ends": Sampling(max_new_tokens=60),
    "long": Sampling(max_new_tokens=120, ignore_eos=True),
    "filtered": Sampling(max_new_tokens=60, temperature=0.7, top_p=0.9, top_k=20),
    "min_p": Sampling(max_new_tokens=60, min_p=0.05),
    "greedy": Sampling(max_new_tokens=60, temperature=0.0),
    "stop": Sampling(max_new_tokens=60, stop=("ab", "eca"), stop_token_ids=(7, 8, 9)),
}


@pytest.fixture(scope="module")
def newer() -> dict[str, torch.Tensor]:
    """Return weights near `WEIGHTS`, as a step of training leaves them."""
    noise = torch.Generator().manual_seed(0)
    return {name: t + 0.02 * t.std() * torch.randn(t.shape, generator=noise) for name, t in WEIGHTS.items()}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SGLangEngine]]:
    folder: Path = tmp_path_factory.mktemp("given")
    written = tiny_mimo.write(folder / "mimo", CONFIG, WEIGHTS)
    pieces.write(written, CONFIG["vocab_size"])
    environment = ONE_THREAD | {"SGLANG_LOGPROB_CHUNK_SIZE": "8"}
    processes = {
        name: launch(written, folder / f"{name}.log", arguments=[*SERVE, *arguments], environment=environment)
        for name, arguments in LAUNCHES.items()
    }
    try:
        yield {name: SGLangEngine.of(process.wait(), timeout=120) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.close()


def with_drafts(asked: list[Request], drafts: list) -> list[Request]:
    return [replace(request, draft=np.asarray(draft)) for request, draft in zip(asked, drafts, strict=True)]


def rounds(engine: SGLangEngine) -> int:
    """Return how many decode rounds of samples ran since the last call."""
    return sum(sum(found.accepted) for found in engine.stats())


def same(samples: list[Sample], expected: list[Sample]) -> None:
    for sample, reference in zip(samples, expected, strict=True):
        assert sample.response.tolist() == reference.response.tolist()
        np.testing.assert_allclose(sample.behaviour_logprobs, reference.behaviour_logprobs, atol=2e-4)
        for name in ("status", "policy_versions", "seed"):
            assert getattr(sample, name) == getattr(reference, name)


@pytest.fixture(scope="module")
def old(engines: dict[str, SGLangEngine]) -> dict[str, list[Sample]]:
    """Return what the older policy generates; the engines serve the newer one afterwards."""
    return {name: engines["drafting"].generate(requests(12), how) for name, how in SAMPLINGS.items()}


@pytest.fixture(scope="module")
def updated(
    engines: dict[str, SGLangEngine], old: dict[str, list[Sample]], newer: dict[str, torch.Tensor]
) -> dict[str, SGLangEngine]:
    engines["drafting"].update_weights(3, newer.items())
    engines["plain"].update_weights(3, ((n, t) for n, t in newer.items() if "mtp" not in n))
    return engines


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("engine", LAUNCHES)
def test_an_older_policys_text_saves_rounds_and_changes_nothing(updated, old, engine, name):
    served, asked, how = updated[engine], requests(12), SAMPLINGS[name]
    expected = served.generate(asked, how)
    assert {sample.policy_versions[-1][0] for sample in expected} == {3}
    drafts = texts(old[name])
    kept = [a.response.tolist() == b.response.tolist() for a, b in zip(old[name], expected, strict=True)]
    assert not all(kept), "the older policy says the same, so nothing would be cut"
    rounds(served)
    plain = served.generate(asked, how)
    without = rounds(served)
    checked = served.generate(with_drafts(asked, drafts), how)
    fewer = rounds(served)
    print(name, engine, "kept whole", sum(kept), "rounds", without, fewer)
    same(plain, expected)
    same(checked, expected)
    assert fewer < without
    with pytest.raises(AssertionError):  # what a check that accepts everything would give
        same(
            [replace(a, policy_versions=b.policy_versions) for a, b in zip(old[name], expected, strict=True)], expected
        )


@pytest.mark.parametrize("engine", LAUNCHES)
def test_no_wrong_draft_shows(updated: dict[str, SGLangEngine], engine: str) -> None:
    check_drafts(updated[engine])


def check_drafts(served: SGLangEngine) -> None:
    """Give drafts of another seed, of another prompt, with one token changed, too long, with tokens after their end."""
    how, asked = SAMPLINGS["ends"], requests(12)
    expected = served.generate(asked, how)
    right = texts(expected)
    changed = [list(text) for text in right]
    for i, text in enumerate(changed):
        text[(7 * i) % len(text)] ^= 1
    seeds = texts(served.generate([replace(request, seed=request.seed + 50) for request in asked], how))
    wrong = {
        "right": right,
        "one token changed": changed,
        "other seeds": seeds,
        "other prompts": [*right[6:], *right[:6]],
        "longer": [text * 3 for text in right],
        "cut": [text[: i % 5] for i, text in enumerate(right)],
    }
    took = {}
    for name, drafts in wrong.items():
        rounds(served)
        samples = served.generate(with_drafts(asked, drafts), how)
        took[name] = rounds(served)
        same(samples, expected)
    assert took["right"] == took["longer"] == 0, "every answer is taken over whole"
    assert all(took[name] > 0 for name in ("one token changed", "other seeds", "other prompts", "cut"))


def test_greedy_rows_and_others_are_checked_in_one_pass(updated: dict[str, SGLangEngine]) -> None:
    served = updated["drafting"]
    kinds = {name: SAMPLINGS[name] for name in ("greedy", "filtered", "min_p", "long")}
    asked = {name: [replace(r, id=f"{name}-{r.id}") for r in requests(8)] for name in kinds}
    expected = {name: served.generate(asked[name], how) for name, how in kinds.items()}
    found: dict[str, list[Sample]] = {}

    def draw(name: str) -> None:
        drafts = texts(expected[name])
        for i, text in enumerate(drafts):
            text[i % len(text)] ^= i % 2
        found[name] = served.generate(with_drafts(asked[name], drafts), kinds[name])

    threads = [Thread(target=draw, args=(name,)) for name in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in kinds:
        same(found[name], expected[name])


def test_a_sample_goes_on_from_its_partial_with_what_is_left_of_its_draft(updated: dict[str, SGLangEngine]) -> None:
    served, how, asked = updated["drafting"], SAMPLINGS["long"], requests(8)
    expected = served.generate(asked, how)
    wanted = []
    for request, sample in zip(with_drafts(asked, texts(expected)), expected, strict=True):
        begun = sample.behaviour_logprobs[sample.prompt_len :][:9]
        wanted.append(replace(request, partial=Partial(sample.response[:9], begun, ((3, 0, 9),))))
    rounds(served)
    same(served.generate(wanted, how), expected)
    assert rounds(served) == 0
    other = [replace(request, draft=np.full(40, 5)) for request in wanted]  # does not begin with the partial
    same(served.generate(other, how), expected)

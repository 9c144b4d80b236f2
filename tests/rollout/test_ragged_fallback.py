"""Uneven rounds in real engines: batches whose sampling needs even rows, and mistakes that the tests must find."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import emulation
import plain_server
import pytest
import test_plain_server as plain
import test_sglang_engine as same
import tiny_mimo
from test_sglang_engine import WORTH_IT

from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine

pytestmark = [pytest.mark.slow, pytest.mark.lossless]
STEPS = 2
GRAMMAR = {"regex": "[ab]{3}[0-9]{1,12}", "ignore_eos": False}
# By the costs no draft is worth it, so only a request in 64 verifies some.
CHOOSING = {"candidates": [STEPS], "roofline": WORTH_IT["none"].to_json()}
CHOOSING |= {"ragged": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[plain.Server]:
    folder = tmp_path_factory.mktemp("uneven")
    model = tiny_mimo.write(folder / "model", plain.CONFIG, plain.WEIGHTS)
    plain.write_tokenizer(model)
    with plain_server.started(model, folder, '{"ragged": true}', ["--grammar-backend=xgrammar"]) as engine:
        server = plain.Server(engine, folder)
        engine.set_spec_rule(CHOOSING)
        server.generate(400)  # from which the rule learns
        yield server


def answered(server: plain.Server, asked: list[dict[str, Any]]) -> tuple[list[list[int]], float]:
    """Return the texts of requests that run together, and the drafts of a request that a drafting round verified."""
    server.engine.stats()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda body: server.post("generate", body).json(), asked))
    rounds = [stats for stats in server.engine.stats() if stats.config.num_steps]
    requests = sum(sum(stats.accepted) for stats in rounds)
    return [answer["output_ids"] for answer in answers], sum(s.verified for s in rounds) / max(requests, 1)


def bodies(count: int, **more: Any) -> list[dict[str, Any]]:
    sampling = {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    of_request = {name: more.pop(name) for name in ("return_logprob", "top_logprobs_num") if name in more}
    asked = []
    for seed in range(count):
        body = {"input_ids": plain.PROMPT, "sampling_params": sampling | {"sampling_seed": seed} | more}
        asked.append(body | of_request)
    return asked


EVEN: dict[str, dict[str, Any]] = {
    "grammar": GRAMMAR,
    "logit bias": {"logit_bias": {"40": 4.0, "50": 4.0}},
    "top log-probs": {"return_logprob": True, "top_logprobs_num": 2},
}


def lossless(server: plain.Server, asked: list[dict[str, Any]]) -> float:
    """Return the verified drafts of a request and round, after a look at the texts."""
    texts, verified = answered(server, asked)
    assert texts == plain.without_drafts(server, partial(answered, server, asked))
    return verified


@pytest.mark.parametrize("name", ["plain", "filtered", "stop"])
def test_a_usual_batch_verifies_what_is_worth_it(server: plain.Server, name: str) -> None:
    assert 0 <= lossless(server, bodies(4, **plain.SAMPLINGS[name])) < 0.3


@pytest.mark.parametrize("name", EVEN)
def test_rounds_are_even_where_sampling_needs_even_rows(server: plain.Server, name: str) -> None:
    assert lossless(server, bodies(3, **EVEN[name])) == STEPS


def test_a_penalty_verifies_no_draft(server: plain.Server) -> None:
    assert lossless(server, bodies(3, frequency_penalty=1.0)) == 0


def test_one_grammar_makes_its_whole_batch_even(server: plain.Server) -> None:
    answered(server, bodies(1, **GRAMMAR))  # compiles the grammar, so that all four decode together
    # uneven again when the grammar's text has ended
    assert 0.3 < lossless(server, [*bodies(3), *bodies(1, **GRAMMAR)]) < STEPS


@pytest.mark.parametrize("mistake", ["accepts_one_more", "accepts_unverified"])
def test_a_miscounted_request_is_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSPEC_API_KEY", "right-key")
    model = tiny_mimo.write(tmp_path / "mimo", same.CONFIG, same.WEIGHTS)
    environment = {emulation.VARIABLE: mistake}
    arguments = [*same.SERVE, *same.LAUNCHES["adaptive"]]
    with emulation.launch(model, tmp_path / "log", arguments, environment, "right-key") as process:
        engine = SGLangEngine.of(process.wait(), timeout=120)
        with pytest.raises(AssertionError, match=r"^(none|some|all)\b"):
            same.test_text_does_not_depend_on_which_drafts_are_verified({"adaptive": engine}, "T=1")  # type: ignore[arg-type]

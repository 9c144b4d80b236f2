"""What our route for samples makes of SGLang's answers, without SGLang's server."""

from __future__ import annotations

import asyncio
import runpy
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import megatron_rlspec.rollout.sglang as ours
from megatron_rlspec.rollout.sglang.schemas import GenerateBody, RequestBody, SamplingBody


class Tokenizer(SimpleNamespace):
    """Stands for SGLang's TokenizerManager: it answers every request with these answers."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        super().__init__(
            model_config=SimpleNamespace(hf_eos_token_id={5}, vocab_size=64),
            tokenizer=SimpleNamespace(eos_token_id=7, additional_stop_token_ids={9}),
            server_args=SimpleNamespace(incremental_streaming_output=False),
            answers=answers,
            context_len=128,
            num_reserved_tokens=6,
        )

    async def generate_request(self, message: Any, request: None) -> Any:
        for answer in self.answers:
            yield answer


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Our module of routes, with stand-ins for what imports SGLang's server."""
    for name in ("bodies", "guard", "weight_routes"):
        monkeypatch.setitem(sys.modules, f"{ours.__name__}.http.{name}", MagicMock())
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", MagicMock())
    return runpy.run_path(f"{ours.__path__[0]}/http/routes.py")


def given(routes: dict[str, Any], tokenizer: Tokenizer) -> None:
    names = routes["generate"].__globals__
    names["manager"] = lambda: tokenizer
    names["_sglang"] = SimpleNamespace(weight_version=lambda manager: "0", spans=False)  # as 0.5.15


def asked(**fields: Any) -> RequestBody:
    sampling = SamplingBody(max_new_tokens=20)
    return RequestBody(id="a", input_ids=[1, 2], sampling=sampling, **fields)


def test_a_begun_sample_ends_where_a_scheduler_ends_it(routes: dict[str, Any]) -> None:
    tokenizer = Tokenizer([])
    given(routes, tokenizer)
    assert routes["_stop_tokens"](SamplingBody(stop_token_ids=[3])) == {3, 5, 7, 9}
    assert routes["_stop_tokens"](SamplingBody(stop_token_ids=[3], ignore_eos=True)) == set()
    tokenizer.tokenizer = SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)
    assert routes["_stop_tokens"](SamplingBody()) == {5}
    tokenizer.tokenizer = None  # --skip-tokenizer-init
    assert routes["_stop_tokens"](SamplingBody()) == {5}


def test_an_aborted_sample_keeps_the_tokens_of_its_log_probs(routes: dict[str, Any]) -> None:
    """SGLang 0.5.15 answers a stream with the last token if the sample was aborted while it waited."""
    entries = [[-1.0, token, None] for token in range(5)]
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": entries}
    given(routes, Tokenizer([{"output_ids": [4], "meta_info": meta}]))

    async def lines() -> list[dict[str, Any]]:
        return [line async for line in routes["_generated"](asked(), "a", True)]

    [line] = asyncio.run(lines())
    assert line["output_ids"] == [0, 1, 2, 3, 4] and line["logprobs"] == [-1.0] * 5
    assert line["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]


@pytest.mark.parametrize("incremental", [False, True])
def test_samples_are_streamed_only_if_the_last_answer_is_whole(routes: dict[str, Any], incremental: bool) -> None:
    tokenizer = Tokenizer([])
    tokenizer.server_args.incremental_streaming_output = incremental
    given(routes, tokenizer)
    streamed = []

    async def parsed(request: None, schema: type) -> GenerateBody:
        return GenerateBody(requests=[asked()], progress=True)

    async def may_generate() -> None:
        pass

    names = routes["generate"].__globals__
    names["parsed"], names["weight_routes"].may_generate = parsed, may_generate
    names["_position_keyed"] = lambda: True
    names["_lines"] = lambda requests, finished, progress: streamed.append(progress) or iter(())
    asyncio.run(routes["generate"](None))
    assert streamed == [not incremental]

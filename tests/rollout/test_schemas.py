"""Sentences for malformed bodies, and buckets byte by byte."""

from __future__ import annotations

import asyncio
import json
import runpy
import struct
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fastapi import Request
from safetensors.torch import save

import megatron_rlspec.rollout.sglang as ours
from megatron_rlspec.rollout.sglang import schemas
from megatron_rlspec.rollout.sglang.bucket_checks import ServedTensors, read_entries
from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.rollout.sglang.schemas import (
    Refusal,
    RequestBody,
    SamplingBody,
    check_batch,
    parse,
    parse_query,
)


def refused(act):
    with pytest.raises(Refusal) as refusal:
        act()
    told = str(refusal.value)
    assert told and "\n" not in told and "pydantic" not in told
    assert refusal.value.status == 400
    return told


def request(**changes):
    return {"id": "a", "input_ids": [1], "sampling": {"max_new_tokens": 4}} | changes


BODIES = [
    ({}, "requests is missing"),
    ({"requests": [request(input_ids=[True])]}, "requests[0].input_ids[0] is true; expected a valid integer"),
    ({"requests": [request(sampling={"top_k": 0})]}, "top_k is 0; expected -1, which keeps every token, or at least 1"),
]


@pytest.mark.parametrize(("body", "told"), BODIES, ids=lambda value: str(value)[:60])
def test_a_malformed_body_is_refused_in_one_sentence(body, told):
    assert told in refused(lambda: parse(schemas.GenerateBody, json.dumps(body).encode()))


def test_a_malformed_query_is_refused_in_one_sentence():
    told = refused(lambda: parse_query(schemas.BeginQuery, {"scope": "draft", "version": "1"}))
    assert told == "query: scope is \"draft\"; expected 'all', 'target' or 'drafter'"


def test_what_no_schema_can_know_is_refused():
    def batch(*requests):
        return schemas.GenerateBody(requests=[schemas.RequestBody(**r) for r in requests])

    check_batch(batch(request(), request(id="b")), 64, 128)
    assert "from 0 to 63" in refused(lambda: check_batch(batch(request(input_ids=[1, 64])), 64, 128))
    assert "input_ids[0] is -1" in refused(lambda: check_batch(batch(request(input_ids=[-1])), 64, 128))
    assert "given to two requests" in refused(lambda: check_batch(batch(request(), request()), 64, 128))
    assert "context of 128" in refused(lambda: check_batch(batch(request(input_ids=[1] * 128)), 64, 128))
    check_batch(batch(request(input_ids=[1] * 118)), 64, 128, 6)
    told = refused(lambda: check_batch(batch(request(input_ids=[1] * 119)), 64, 128, 6))
    assert "make 123; expected at most the model's context of 128 less 6 for drafts" in told


# ---- buckets --------------------------------------------------------------------------------------------------------

SERVED = ServedTensors({"w": [4, 3], "b": [4], "mtp": [2]}, frozenset({"mtp"}))


def file_of(header, data=b"", align=8):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % align)
    return struct.pack("<Q", len(text)) + text + data


def entry(first, end, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}


def read(data, scope="all"):
    return read_entries(memoryview(data), SERVED, scope)


def test_what_the_library_writes_is_read():
    tensors = {"w": torch.randn(4, 3), "b": torch.randn(4).bfloat16(), "mtp": torch.randn(2).half()}
    data = save(tensors, metadata={"a": "b"})
    entries = {entry.name: entry for entry in read(data)}
    assert set(entries) == set(tensors)
    for name, tensor in tensors.items():
        part = bytearray(data[entries[name].first : entries[name].end])
        assert torch.frombuffer(part, dtype=entries[name].dtype).reshape(tensor.shape).equal(tensor)


BUCKETS = [
    (b"", "not a safetensors file of 0 bytes: header too small"),
    (file_of({"b": entry(0, 16, dtype="I32")}, b"\0" * 16), "b is of I32; expected dtype F64, F32, F16, BF16"),
    (file_of({"b": entry(0, 16), "mtp": entry(8, 16, (2,))}, b"\0" * 16), "invalid offset for tensor `mtp`"),
    (file_of({"bb": entry(0, 16)}, b"\0" * 16), "the engine has no tensor bb; did you mean b?"),
    (file_of({"b": entry(0, 16, (2, 2))}, b"\0" * 16), "b is [2, 2], but the engine's is [4]"),
]


@pytest.mark.parametrize(("data", "told"), BUCKETS, ids=[told for _, told in BUCKETS])
def test_a_malformed_bucket_is_refused(data, told):
    assert told in refused(lambda: read(data))


def test_a_tensor_that_begins_within_a_number_is_refused():
    header = {"b": entry(0, 16), "__metadata__": {"a": ""}}
    while len(json.dumps(header)) % 4 != 1:
        header["__metadata__"]["a"] += "x"
    assert "expected a multiple of 4" in refused(lambda: read(file_of(header, b"\0" * 16, align=1)))


def test_a_scope_names_its_own_tensors_only():
    drafter = save({"mtp": torch.zeros(2)})
    target = save({"b": torch.zeros(4)})
    assert [e.name for e in read(drafter, "drafter")] == ["mtp"] and [e.name for e in read(target, "target")] == ["b"]
    assert "mtp is the drafter's; scope is target" in refused(lambda: read(drafter, "target"))
    assert "b is the target's; scope is drafter" in refused(lambda: read(target, "drafter"))


@pytest.fixture
def routes(monkeypatch):
    """Our module of routes, with stand-ins for what imports SGLang's server."""
    for name in ("bodies", "guard", "weight_routes"):
        monkeypatch.setitem(sys.modules, f"{ours.__name__}.http.{name}", MagicMock())
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", MagicMock())
    return runpy.run_path(f"{ours.__path__[0]}/http/routes.py")


def test_a_begun_sample_ends_where_a_scheduler_ends_it(routes):
    stop_tokens = routes["_stop_tokens"]
    tokenizer = SimpleNamespace(eos_token_id=7, additional_stop_token_ids={9})
    manager = SimpleNamespace(model_config=SimpleNamespace(hf_eos_token_id={5}), tokenizer=tokenizer)
    stop_tokens.__globals__["manager"] = lambda: manager
    assert stop_tokens(SamplingBody(stop_token_ids=[3])) == {3, 5, 7, 9}
    assert stop_tokens(SamplingBody(stop_token_ids=[3], ignore_eos=True)) == set()
    manager.tokenizer = None  # --skip-tokenizer-init
    assert stop_tokens(SamplingBody()) == {5}


def test_an_aborted_sample_keeps_the_tokens_of_its_log_probs(routes):
    """SGLang 0.5.15 answers a stream with the last token if the sample was aborted while it waited."""
    entries = [[-1.0, token, None] for token in range(5)]
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": entries}

    async def answers(message, request):
        yield {"output_ids": [4], "meta_info": meta}

    async def lines():
        body = RequestBody(id="a", input_ids=[1, 2], sampling=SamplingBody(max_new_tokens=20))
        return [line async for line in routes["_generated_lines"](body, "a", True)]

    arguments = SimpleNamespace(incremental_streaming_output=False)
    manager = SimpleNamespace(generate_request=answers, server_args=arguments)
    names = routes["_generated_lines"].__globals__
    names["manager"] = lambda: manager
    names["_sglang"] = SimpleNamespace(weight_version=lambda manager: "0", spans=False)
    [line] = asyncio.run(lines())
    assert line["output_ids"] == [0, 1, 2, 3, 4] and line["logprobs"] == [-1.0] * 5
    assert line["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]


@pytest.fixture
def weight_routes(monkeypatch):
    """Our module of an update's routes, with stand-ins for SGLang."""
    for name in ("managers.io_struct", "utils", "weight_sync.tensor_bucket"):
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", MagicMock())
    monkeypatch.setitem(sys.modules, f"{ours.__name__}.http.bodies", MagicMock())
    monkeypatch.setattr(versions, "installed", MagicMock())
    return runpy.run_path(f"{ours.__path__[0]}/http/weight_routes.py")


@pytest.mark.parametrize(("query", "status"), [("", 400), ("session=" + "0" * 32, 409)])
def test_a_bucket_takes_no_memory_before_its_session_is_known(weight_routes, query, status):
    headers = [(b"content-length", b"%d" % (1 << 60))]
    asked = Request({"type": "http", "query_string": query.encode(), "headers": headers})
    with pytest.raises(Refusal) as refusal:
        asyncio.run(weight_routes["bucket"](asked))
    assert refusal.value.status == status


def test_a_large_piece_of_shared_memory_is_not_kept(weight_routes, monkeypatch):
    monkeypatch.setitem(weight_routes["bucket"].__globals__, "_MAX_KEPT_BYTES", 64)
    memory = weight_routes["_Memory"]()
    for size, kept in ((64, 64), (65, 0)):
        with memory.piece(size):
            pass
        assert memory._free.numel() == kept

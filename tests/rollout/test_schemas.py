"""Sentences for malformed bodies, and buckets of weights byte by byte, without an engine."""

import json
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from megatron_rlspec.rollout.sglang import schemas
from megatron_rlspec.rollout.sglang.bucket_checks import ServedTensors, read_entries
from megatron_rlspec.rollout.sglang.scheduler import control
from megatron_rlspec.rollout.sglang.schemas import Refusal, check_batch, parse, parse_query

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PYTHON = ("Traceback", "pydantic", "Input should", "<class", "Error(", "object at 0x", "validation error")


def refused(act):
    with pytest.raises(Refusal) as refusal:
        act()
    told = str(refusal.value)
    assert told and "\n" not in told and not any(word in told for word in PYTHON), told
    assert 400 <= refusal.value.status < 500
    return told


def request(**changes):
    return {"id": "a", "input_ids": [1], "sampling": {"max_new_tokens": 4}} | changes


BODIES = [
    ([], "the body is []; expected an object"),
    ({}, "requests is missing"),
    ({"requests": []}, "requests is []; List should have at least 1 item"),
    ({"requests": [request(id=5)]}, "requests[0].id is 5; expected a valid string"),
    ({"requests": [request(input_ids=[True])]}, "requests[0].input_ids[0] is true; expected a valid integer"),
    ({"requests": [request(sampling={"top_q": 1})]}, "requests[0].sampling.top_q is not known"),
    ({"requests": [request(sampling={"max_new_tokens": 0})]}, "max_new_tokens is 0; expected greater than or equal to"),
    ({"requests": [request(sampling={"top_k": 0})]}, "top_k is 0; expected -1, which keeps every token, or at least 1"),
]


@pytest.mark.parametrize(("body", "told"), BODIES, ids=lambda value: str(value)[:60])
def test_a_malformed_body_is_refused_in_one_sentence(body, told):
    assert told in refused(lambda: parse(schemas.GenerateBody, json.dumps(body).encode()))


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}'])
def test_a_body_that_is_not_json_is_refused(body):
    refused(lambda: parse(schemas.GenerateBody, body))


def test_what_no_schema_can_know_is_refused():
    def batch(*requests):
        return schemas.GenerateBody(requests=[schemas.RequestBody(**r) for r in requests])

    check_batch(batch(request(), request(id="b")), 64, 128)
    assert "from 0 to 63" in refused(lambda: check_batch(batch(request(input_ids=[1, 64])), 64, 128))
    assert "input_ids[0] is -1" in refused(lambda: check_batch(batch(request(input_ids=[-1])), 64, 128))
    assert "given to two requests" in refused(lambda: check_batch(batch(request(), request()), 64, 128))
    assert "context of 128" in refused(lambda: check_batch(batch(request(input_ids=[1] * 128)), 64, 128))
    assert "make 129" in refused(lambda: check_batch(batch(request(input_ids=[1] * 125)), 64, 128))
    check_batch(batch(request(input_ids=[1] * 118)), 64, 128, 6)
    told = refused(lambda: check_batch(batch(request(input_ids=[1] * 119)), 64, 128, 6))
    assert "make 123; expected at most the model's context of 128 less 6 for drafts" in told


def test_every_command_has_a_schema():
    assert set(schemas.COMMANDS) == set(control._COMMANDS) - {"stamp"}  # which only `weights/end` gives


COMMANDS = schemas.COMMANDS
SESSION = ("session", "a" * 32)
QUERIES = [
    (schemas.BeginQuery, [], "query: scope is missing"),
    (schemas.BeginQuery, [("scope", "draft")], "query: scope is \"draft\"; expected 'all', 'target' or 'drafter'"),
    (schemas.BeginQuery, [("scope", "all"), ("scope", "all")], 'query: "scope" is given more than once'),
    (schemas.BeginQuery, [("scope", "all"), ("version", "1e3")], 'query: version is "1e3"; String should match'),
    (schemas.SessionQuery, [SESSION, ("mode", "w")], "query: mode is not known"),
]


@pytest.mark.parametrize(("model", "query", "told"), QUERIES, ids=str)
def test_a_malformed_query_is_refused_in_one_sentence(model, query, told):
    assert told in refused(lambda: parse_query(model, query))


@settings(max_examples=100)
@given(st.sampled_from([schemas.GenerateBody, schemas.AbortBody, *COMMANDS.values(), schemas.JoinBody]), JUNK)
def test_any_json_is_accepted_or_refused_in_one_sentence(model, value):
    try:
        parse(model, json.dumps(value).encode())
    except Refusal:
        refused(lambda: parse(model, json.dumps(value).encode()))


# ---- buckets --------------------------------------------------------------------------------------------------------

SERVED = ServedTensors({"w": [4, 3], "b": [4], "mtp": [2]}, frozenset({"mtp"}))


def file_of(header, data=b"", pad=True):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def entry(first, end, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}


def read(data, scope="all"):
    return read_entries(memoryview(data), SERVED, scope)


def test_what_the_library_writes_is_read():
    tensors = {"w": torch.randn(4, 3), "b": torch.randn(4).bfloat16(), "mtp": torch.randn(2).half()}
    data = save(tensors, metadata={"a": "b"})
    found = {e.name: e for e in read(data)}
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        part = data[found[name].first : found[name].end]
        assert torch.frombuffer(bytearray(part), dtype=found[name].dtype).reshape(tensor.shape).equal(tensor)


BUCKETS = [
    (b"", "not a safetensors file of 0 bytes: header too small"),
    (struct.pack("<Q", 1 << 60), "header too large"),
    (file_of(b"not json"), "invalid JSON in header"),
    (file_of([]), "invalid JSON in header: invalid type: sequence"),
    (file_of({}), "holds no tensor"),
    (file_of({"__metadata__": {"a": 1}, "b": entry(0, 16)}, b"\0" * 16), "integer `1`, expected a string"),
    (file_of({"b": [0, 16]}, b"\0" * 16), "invalid JSON in header"),
    (file_of({"b": entry(-8, 8)}, b"\0" * 16), "integer `-8`, expected usize"),
    (file_of({"b": entry(0, 16, dtype="I32")}, b"\0" * 16), "b is of I32; expected dtype F64, F32, F16, BF16"),
    (file_of({"b": entry(0, 12)}, b"\0" * 12), "invalid shape, data type, or offset for tensor"),
    (file_of({"b": entry(0, 16)}, b"\0" * 8), "file not fully covered"),
    (file_of({"b": entry(4, 20)}, b"\0" * 20), "invalid offset for tensor `b`"),
    (file_of({"b": entry(0, 16), "mtp": entry(8, 16, (2,))}, b"\0" * 16), "invalid offset for tensor `mtp`"),
    (file_of(b'{"b": {"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
             b'"b": {"dtype":"F32","shape":[4],"data_offsets":[16,32]}}', b"\0" * 32), "invalid offset for tensor `b`"),
    (file_of({"a\x1b\n": entry(0, 12)}, b"\0" * 12), "invalid shape, data type, or offset"),
    (file_of({"b": entry(0, 0, (0, 1 << 63))}), "b is [0, 9223372036854775808]; expected at least one number"),
    (file_of({"b": entry(0, 16)}, b"\0" * 16, pad=False)[:0] + file_of(
        json.dumps({"b": entry(0, 16)}).encode() + b" " * ((1 - len(json.dumps({"b": entry(0, 16)}))) % 4), b"\0" * 16,
        pad=False), "expected a multiple of 4"),
    (file_of({"bb": entry(0, 16)}, b"\0" * 16), "the engine has no tensor bb; did you mean b?"),
    (file_of({"b": entry(0, 16, (2, 2))}, b"\0" * 16), "b is [2, 2], but the engine's is [4]"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "told"), BUCKETS, ids=[told for _, told in BUCKETS])
def test_a_malformed_bucket_is_refused(data, told):
    assert told in refused(lambda: read(data))


def test_a_scope_names_its_own_tensors_only():
    drafter = save({"mtp": torch.zeros(2)})
    target = save({"b": torch.zeros(4)})
    assert [e.name for e in read(drafter, "drafter")] == ["mtp"] and [e.name for e in read(target, "target")] == ["b"]
    assert "mtp is the drafter's; scope is target" in refused(lambda: read(drafter, "target"))
    assert "b is the target's; scope is drafter" in refused(lambda: read(target, "drafter"))


GOOD = save({"w": torch.zeros(4, 3), "b": torch.zeros(4)})


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_bucket_is_read_exactly_or_refused(data):
    """Cut, extended or with bytes of the header replaced."""
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(damaged), 200) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    damaged = bytes(damaged[: data.draw(st.integers(0, len(damaged)))] + data.draw(st.binary(max_size=4)))
    _read_exactly_or_refuse(damaged)


@settings(max_examples=100)
@given(JUNK, st.binary(max_size=64))
@example({"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 16)
def test_any_header_is_read_exactly_or_refused(header, data):
    _read_exactly_or_refuse(file_of(header, data))


def _read_exactly_or_refuse(data):
    try:
        entries = read(data)
    except Refusal:
        refused(lambda: read(data))
        return
    at = 8 + int.from_bytes(data[:8], "little")
    for found in sorted(entries, key=lambda e: e.first):
        assert found.first == at and list(found.shape) == SERVED.shapes[found.name]
        at = found.end
    assert at == len(data)

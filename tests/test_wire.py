"""Groups are read back from bytes; other bytes are refused with msgspec's own error."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlspec.types import Group, Prompt, Sample
from megatron_rlspec.wire import decode, encode

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
ARRAY = {"dtype": "<i8", "shape": [2], "data": bytes(16)}


def groups():
    prompt = Prompt(3, np.array([1, 2]), "label", "text", {"a": 1})
    tokens = np.array([1, 2, 3])
    zeros = np.zeros(3, np.float32)
    return [Group(prompt, [Sample("r.", prompt, tokens, zeros, zeros)])]


def decoded(data):
    try:
        return decode(data, list[Group])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        assert "\n" not in str(error)
        return None


def test_groups_come_back():
    [group] = decode(encode(groups()), list[Group])
    assert group.prompt.tokens.tolist() == [1, 2] and group.samples[0].behaviour_logprobs.dtype == np.float32


@settings(max_examples=100)
@given(st.data())
def test_damaged_groups_are_refused_or_read(data):
    damaged = bytearray(encode(groups()))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    decoded(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


@settings(max_examples=100)
@given(JUNK)
def test_anything_else_is_refused(value):
    found = decoded(msgspec.msgpack.encode(value))
    assert found is None or found == []


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(sorted(ARRAY)), JUNK).map(lambda changes: ARRAY | changes) | JUNK)
def test_an_array_has_the_stated_shape_or_is_refused(array):
    data = msgspec.msgpack.encode([{"prompt": {"id": 0, "tokens": array}, "samples": []}])
    found = decoded(data)
    if found is not None:
        assert found[0].prompt.tokens.nbytes == len(array["data"])


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "|O"}, {"shape": [3]}, {"shape": [-2]}, {"shape": [1 << 62]}, {"data": "x"}, {"more": 1}],
    ids=str,
)
def test_a_malformed_array_is_refused(changes):
    with pytest.raises(msgspec.ValidationError, match="array"):
        decoded = msgspec.msgpack.encode([{"prompt": {"id": 0, "tokens": ARRAY | changes}, "samples": []}])
        decode(decoded, list[Group])

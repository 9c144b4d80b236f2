"""Groups are read back from bytes; other bytes are refused with msgspec's own error."""

import msgspec
import numpy as np
import pytest

from megatron_rlspec.types import Group, Prompt, Sample
from megatron_rlspec.wire import decode, encode


def groups():
    prompt = Prompt(3, np.array([1, 2]), "label", "text", {"a": 1})
    tokens = np.array([1, 2, 3])
    zeros = np.zeros(3, np.float32)
    return [Group(prompt, [Sample("r.", prompt, tokens, zeros, zeros)])]


def test_groups_come_back():
    [group] = decode(encode(groups()), list[Group])
    assert group.prompt.tokens.tolist() == [1, 2] and group.samples[0].behaviour_logprobs.dtype == np.float32


@pytest.mark.parametrize("data", [b"", encode(groups())[:-1], encode(3), encode([{"prompt": 3}])])
def test_other_bytes_are_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode(data, list[Group])

"""Which adapter a version of SGLang gets, and what the older one needs."""

import pytest
import torch

from megatron_rlspec.noise import murmur3
from megatron_rlspec.rollout.sglang.scheduler import versions


@pytest.mark.parametrize(
    ("version", "adapter"),
    [
        ("0.5.15.post1", "0.5.15.post1"),
        ("0.5.23", "0.5.23"),
        ("0.5.23.dev4+g1a", "0.5.23"),
        ("0.6.0", "0.5.23"),
    ],
)
def test_a_version_has_its_adapter(version, adapter):
    assert type(versions.adapter(version)) is versions.KNOWN[adapter]


@pytest.mark.parametrize("version", ["0.5.14", "0.5.16", "0.5.19", "0.5.20"])
def test_an_unknown_version_is_refused_in_one_line(version):
    with pytest.raises(ImportError, match=f"this SGLang is {version}; expected 0.5.15.post1, or 0.5.23 or later"):
        versions.adapter(version)


def test_a_version_that_no_test_has_seen_is_taken_with_a_warning(caplog):
    versions.adapter.cache_clear()
    versions.adapter("0.5.23")
    assert not caplog.records
    versions.adapter("0.6.1")
    versions.adapter("0.6.1")
    (record,) = caplog.records
    assert "SGLang 0.6.1 is later than 0.5.23" in record.getMessage()


def test_the_largest_hash_samples_no_improbable_token():
    """SGLang 0.5.15.post1 gives this token infinite noise, and samples it at a log-probability of -1,000."""
    seed, position, token = (torch.tensor([number]) for number in (21688, 7, 7394))
    assert murmur3(seed, position, token).item() == -1  # 2³² - 1 as an int32
    logprobs = torch.zeros(1, 8000).index_fill(1, token, -1000.0).log_softmax(-1)
    assert versions._draw_finite(logprobs, seed, position).item() != token.item()

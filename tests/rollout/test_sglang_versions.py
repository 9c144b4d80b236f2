"""Every call into SGLang binds against 0.5.15.post1 and 0.5.23, whose names also distinguish the two versions."""

import importlib.metadata
import json

import contracts
import pytest
import sglang_calls
import torch
from sglang_calls import binds, calls, parse, recorded_names, show
from sglang_names import CONTRACTS

from megatron_rlspec.noise import murmur3
from megatron_rlspec.rollout.sglang.scheduler import versions

RECORD = json.loads(sglang_calls.RECORD.read_text())
VERSIONS = sorted(versions.KNOWN)


def signatures(version):
    return {name: parse(text) if text else text for name, text in RECORD[version].items()}


def missing(contract, known):
    """Return names and parameters of a contract that recorded signatures lack."""
    gone = [name for name in contract if known[name] is None]
    for name in set(contract) - set(gone):
        gone += [f"{name}({p})" for p in contract[name] if not known[name] or p not in known[name].parameters]
    return gone


def test_the_record_covers_the_known_versions():
    """If it fails, run python tests/rollout/sglang_calls.py 0.5.15.post1=DIR 0.5.23=DIR"""
    assert sorted(RECORD) == VERSIONS == sorted(CONTRACTS)
    assert all(sorted(RECORD[version]) == recorded_names() for version in VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_binds(version):
    known = signatures(version)
    assert not {call.where: call.dotted for call in calls(version) if known[call.dotted] is None}
    wrong = [binds(call, known[call.dotted]) for call in calls(version) if known[call.dotted]]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_contract_is_kept_by_its_version_alone(version):
    known = signatures(version)
    kept = [other for other, contract in CONTRACTS.items() if not missing(contract, known)]
    assert kept == [version]


@pytest.mark.slow
def test_installed_signatures_equal_the_record():
    version = importlib.metadata.version("sglang")
    if version not in RECORD:
        pytest.skip(f"SGLang {version} is not one of {', '.join(VERSIONS)}")
    read = contracts.installed()
    found = {}
    for name in recorded_names():
        try:
            signature = contracts.signature(name, read)
            found[name] = show(signature) if signature else ""
        except LookupError:
            found[name] = None
    assert found == RECORD[version]
    assert type(versions.installed()) is versions.KNOWN[version]


@pytest.mark.parametrize(
    ("version", "adapter"),
    [("0.5.15.post1", "0.5.15.post1"), ("0.5.23", "0.5.23"), ("0.5.23.dev4+g1a", "0.5.23"), ("0.6.0", "0.5.23")],
)
def test_a_version_has_its_adapter(version, adapter):
    assert type(versions.adapter(version)) is versions.KNOWN[adapter]


def test_an_unknown_version_is_refused_in_one_line():
    with pytest.raises(ImportError, match="this SGLang is 0.5.20; expected 0.5.15.post1, or 0.5.23 or later"):
        versions.adapter("0.5.20")


def test_a_version_that_no_test_has_seen_is_taken_with_a_warning(caplog):
    versions.adapter.cache_clear()
    versions.adapter("0.5.23")
    assert not caplog.records
    versions.adapter("0.6.1")
    versions.adapter("0.6.1")
    assert [record.getMessage() for record in caplog.records] == [
        "rlspec: SGLang 0.6.1 is later than 0.5.23, the latest version with which this was tested"
    ]


def test_the_largest_hash_samples_no_improbable_token():
    """SGLang 0.5.15.post1 gives this token infinite noise, and samples it at a log-probability of -1,000."""
    seed, position, token = (torch.tensor([number]) for number in (21688, 7, 7394))
    assert murmur3(seed, position, token).item() == -1  # 2³² - 1 as an int32
    logprobs = torch.zeros(1, 8000).index_fill(1, token, -1000.0).log_softmax(-1)
    assert versions._draw_finite(logprobs, seed, position).item() != token.item()

"""The embedded engine against SGLang's real engine on the CPU: same seed, same text; the same power against both.

Two servers on one checkpoint, started once: position-keyed and target-only. float32, so that a text may differ from the
first near-tie of two noisy log-probabilities on; with these seeds there is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import embedded_oracle as oracle
import numpy as np
import pytest
import torch
from lossless_tools import Target, bins_of, chi_square
from safetensors.torch import save_file
from test_lossless_statistical import ALPHA, SAMPLES

from megatron_rlspec.types import Prompt, Request, Sampling, SpecConfig

torch.set_num_threads(1)
pytestmark = [pytest.mark.lossless, pytest.mark.slow]
SERVE = "--device cpu --dtype float32 --max-total-tokens 65536 --max-running-requests 512 --spec fixed --num-steps 3"


@pytest.fixture(scope="module")
def model():
    # SGLang's CPU attention wants heads of at least 16.
    return oracle.tiny(vocab=64, hidden=64, layers=2, heads=4, kv_heads=2, drafter="close", sharpness=1.5, seed=3)


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory) -> Iterator[dict]:
    pytest.importorskip("sglang")
    from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
    from megatron_rlspec.rollout.sglang.client.launcher import launch

    folder: Path = tmp_path_factory.mktemp("mimo")
    config, tensors = model
    extra = {"attention_bias": True, "torch_dtype": "float32", "use_sliding_window": False, "max_window_layers": 2}
    extra["rlspec_sharpness"] = 1.5  # of the drafts to begin with
    (folder / "config.json").write_text(json.dumps(config | extra))
    save_file({k: v.float() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    processes = {
        verifier: launch(folder, folder / f"{verifier}.log", arguments=[*SERVE.split(), "--verifier", verifier])
        for verifier in ("position_keyed", "target_only")
    }
    try:
        yield {name: SGLangEngine.of(process.wait(), timeout=200) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.close()


def wanted(count):
    rng = np.random.default_rng(0)
    return [Request(f"r{i:03d}.", Prompt(i, rng.integers(3, 64, rng.integers(2, 24))), 50 + i) for i in range(count)]


def test_sglang_drafts_with_the_sharpness_that_config_json_states_until_a_rule_names_one(servers):
    engine = servers["position_keyed"]
    for given, expected in ((None, 1.5), (2.0, 2.0), (None, 2.0)):
        engine.set_config(SpecConfig(3), given)
        assert engine.describe()["sharpness"] == expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=32, ignore_eos=True),
        Sampling(max_new_tokens=32, temperature=0.7, top_p=0.9, top_k=30, min_p=0.08, ignore_eos=True),
        Sampling(max_new_tokens=32, temperature=0.0, ignore_eos=True),
    ],
    ids=["plain", "filtered", "greedy"],
)
def test_the_same_seed_gives_the_same_text(servers, model, sampling):
    theirs = servers["position_keyed"].generate(wanted(48), sampling)
    ours = oracle.engine_of(*model, SpecConfig(3), dtype=torch.float32).generate(wanted(48), sampling)
    differing = [a.request_id for a, b in zip(ours, theirs, strict=True) if a.response.tolist() != b.response.tolist()]
    assert not differing
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=2e-4)
        assert a.policy_versions[0][1:] == b.policy_versions[0][1:]


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_the_same_seed_gives_the_same_drafts(servers, model, sharpness):
    """SGLang's prefill samples the first token without drafts; here the prompt has it. Then rounds start alike."""
    servers["position_keyed"].set_config(SpecConfig(3), sharpness)
    sampling = Sampling(max_new_tokens=32, ignore_eos=True)
    theirs = servers["position_keyed"].generate(wanted(48), sampling)
    begun = [
        replace(request, prompt=replace(request.prompt, tokens=sample.tokens[: sample.prompt_len + 1]))
        for request, sample in zip(wanted(48), theirs, strict=True)
    ]
    spans = {}
    for drafts in ("coupled", "argmax"):
        engine = oracle.engine_of(*model, SpecConfig(3), dtype=torch.float32, drafts=drafts)
        engine.set_config(SpecConfig(3), sharpness)
        ours = engine.generate(begun, replace(sampling, max_new_tokens=31))
        spans[drafts] = [tuple((a + 1, b + 1) for a, b in sample.accepted_spans) for sample in ours]
    equal = [a == b.accepted_spans for a, b in zip(spans["coupled"], theirs, strict=True)]
    assert sum(equal) >= 46, "more than near-ties of float32"
    assert sum(a == b.accepted_spans for a, b in zip(spans["argmax"], theirs, strict=True)) < 10


def test_sglangs_target_only_sampling_is_lossless(servers, model):
    sampling, prompt, seen = Sampling(max_new_tokens=2, ignore_eos=True), (5, 9, 3), np.zeros(16)
    expected = Target(*model, sampling).sequences(prompt, 2)
    where, mass = bins_of(expected), np.zeros(16)
    for outcome, p in expected.items():
        mass[where[outcome]] += p
    same = Prompt(0, np.array(prompt))
    requests = [Request(f"s{i:05d}.", same, i) for i in range(SAMPLES)]
    for first in range(0, SAMPLES, 4000):
        for sample in servers["target_only"].generate(requests[first : first + 4000], sampling):
            seen[where[tuple(sample.response.tolist())]] += 1
    p = chi_square(seen, mass)
    print(f"  SGLang target_only: p = {p:.3f}, observed TV {0.5 * np.abs(seen / SAMPLES - mass).sum():.4f}")
    assert p > ALPHA

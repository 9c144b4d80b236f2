"""The plugin in SGLang's own server: what it tells, which adapter a version of SGLang gets, and the rule in servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import plain_server
import pytest
import tiny_mimo
import torch

from megatron_rlspec.noise import murmur3
from megatron_rlspec.rollout.sglang.scheduler import versions
from megatron_rlspec.types import Prompt, Request, Sampling

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); print('SGLang goes on')"


@pytest.mark.slow
def test_a_plugin_that_cannot_register_ends_the_process() -> None:
    environment = os.environ | {"RLSPEC_SGLANG": '{"verifer": "target_only"}'}
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "SGLang goes on" not in done.stdout
    line = done.stderr.splitlines()[-1]
    assert line.startswith("rlspec: RLSPEC_SGLANG is set, but the plugin cannot register: ") and "verifer: " in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_server_with_options_that_the_rule_never_ran_under_ends(tmp_path: Path) -> None:
    options = ["--attn-dp-size", "2", "--tp", "2"]
    config = tiny_mimo.config(hidden=64, layers=1, heads=4, kv_heads=2, ffn=128, vocab=512)
    model = tiny_mimo.write(tmp_path / "model", config, tiny_mimo.weights(config))
    with pytest.raises(AssertionError) as ended, plain_server.started(model, tmp_path, "1", options):
        raise RuntimeError("it serves")
    last = str(ended.value).strip().splitlines()[-1]
    told = "RLSPEC_SGLANG is set with --speculative-adaptive, but engines whose ranks attend to requests of their own"
    assert last.startswith(f"rlspec: {told}") and last.endswith("(`rlspec serve --spec off`)")


@pytest.mark.parametrize(("version", "adapter"), [("0.5.16.post2.dev3+g1a", "0.5.16"), ("0.5.23.dev4", "0.5.23")])
def test_a_version_has_its_adapter(version, adapter):
    assert type(versions.adapter(version)) is versions.KNOWN[adapter]


@pytest.mark.parametrize("version", ["0.5.14", "0.5.20"])
def test_an_unknown_version_is_refused_in_one_line(version):
    with pytest.raises(ImportError, match=f"this SGLang is {version}; expected 0.5.15.post1 to 0.5.19, or"):
        versions.adapter(version)


def test_a_version_that_no_test_has_seen_is_taken_with_a_warning(caplog):
    versions.adapter.cache_clear()
    versions.adapter("0.5.23")
    assert not caplog.records
    for _ in range(2):
        assert type(versions.adapter("0.6.1")) is versions.Sglang0523
    (record,) = caplog.records
    assert "SGLang 0.6.1 is later than 0.5.23" in record.getMessage()


def test_the_largest_hash_samples_no_improbable_token():
    """SGLang 0.5.15.post1 gives this token infinite noise, and samples it at a log-probability of -1,000."""
    seed, position, token = (torch.tensor([number]) for number in (21688, 7, 7394))
    assert murmur3(seed, position, token).item() == -1  # 2³² - 1 as an int32
    logprobs = torch.zeros(1, 8000).index_fill(1, token, -1000.0).log_softmax(-1)
    assert versions._draw_finite(logprobs, seed, position).item() != token.item()


CONFIG = tiny_mimo.config(hidden=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=512)


@pytest.mark.slow
def test_refused_drafts_are_off_without_a_rule_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In SGLang's own `launch_server`, with two ranks."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores}|{cores}")
    model = tiny_mimo.write(tmp_path / "model", CONFIG, tiny_mimo.weights(CONFIG))
    asked = [Request(f"r-{i}.", Prompt(i, np.arange(1, 9)), i) for i in range(8)]
    with plain_server.started(model, tmp_path, json.dumps({"drafts": "argmax"}), ["--tp=2"]) as engine:
        engine.generate(asked, Sampling(max_new_tokens=120, ignore_eos=True))
        rounds = engine.stats()
        report = engine.spec_rule_report()
    assert report["acceptance"][0] < 0.1, "the case needs a drafter that is never right"
    off = sum(stats.rounds for stats in rounds if stats.config.off)
    assert off > 0.6 * sum(stats.rounds for stats in rounds), report
    assert sum(report["learnt"]["times"]["timings"]) > 10, "the rule learns from the engine's own rounds"

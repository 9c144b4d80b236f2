"""The plugin in SGLang's own server: one line if it cannot register, and one that says what is in force."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import plain_server
import pytest
import tiny_mimo

from megatron_rlspec.rollout.sglang.scheduler.metrics import RoundCounters
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.types import OFF, SpecConfig

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); print('SGLang goes on')"
OTHER = "from megatron_rlspec.rollout.sglang.scheduler import versions; versions.version = lambda name: '0.5.20'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "before", "told"),
    [
        ('{"verifer": "target_only"}', "", "verifer: "),
        ("1", OTHER, "this SGLang is 0.5.20; expected 0.5.15.post1, or 0.5.23 or later"),
    ],
)
def test_a_plugin_that_cannot_register_ends_the_process(value: str, before: str, told: str) -> None:
    environment = os.environ | {"RLSPEC_SGLANG": value}
    command = [sys.executable, "-W", "ignore", "-c", f"{before}\n{LOAD}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "SGLang goes on" not in done.stdout
    line = done.stderr.splitlines()[-1]
    assert line.startswith("rlspec: RLSPEC_SGLANG is set, but the plugin cannot register: ") and told in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--disaggregation-mode", "prefill"], "engines that prefill and decode apart"),
        (["--dp-size", "2"], "engines whose ranks attend to requests of their own"),
        (["--attn-dp-size", "2", "--tp", "2"], "engines whose ranks attend to requests of their own"),
    ],
)
def test_a_server_with_options_that_the_rule_never_ran_under_ends(
    options: list[str], told: str, tmp_path: Path
) -> None:
    config = tiny_mimo.config(hidden=64, layers=1, heads=4, kv_heads=2, ffn=128, vocab=512)
    model = tiny_mimo.write(tmp_path / "model", config, tiny_mimo.weights(config))
    with pytest.raises(AssertionError) as ended, plain_server.started(model, tmp_path, "1", options):
        raise RuntimeError("it serves")
    last = str(ended.value).strip().splitlines()[-1]
    assert last.startswith(f"rlspec: RLSPEC_SGLANG is set with --speculative-adaptive, but {told}")


@pytest.mark.parametrize(
    ("value", "told"),
    [('{"verifier": "keyed"}', "verifier: Input should be"), ("yes", "expected 1, or a JSON object of verifier, ")],
)
def test_settings_that_do_not_exist_are_refused(value: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSPEC_SGLANG", value)
    with pytest.raises(ValueError, match=told):
        Settings.from_environment()


def test_rounds_are_counted_by_their_drafts() -> None:
    client = pytest.importorskip("prometheus_client")  # SGLang needs it for /metrics only
    counters = RoundCounters()
    counters.add(SpecConfig(2), np.array([0, 2]), 3)
    counters.add(SpecConfig(2), np.array([1]), 2)
    counters.add(OFF, np.array([0, 0, 0]), 0)
    value = client.REGISTRY.get_sample_value
    assert value("sglang:rlspec_rounds_total", {"drafts": "2"}) == 2
    assert value("sglang:rlspec_rounds_total", {"drafts": "off"}) == 1
    assert value("sglang:rlspec_drafts_total") == 6 and value("sglang:rlspec_verified_drafts_total") == 5
    assert value("sglang:rlspec_accepted_drafts_total") == 3

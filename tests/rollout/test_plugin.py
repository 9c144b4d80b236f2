"""The plugin in SGLang's own server: one line if it cannot register, and one that says what is in force."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_mimo

from megatron_rlspec.host.ports import ENGINES, free_port
from megatron_rlspec.rollout.sglang.settings import Settings

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


@pytest.mark.parametrize(
    ("value", "told"),
    [('{"verifier": "keyed"}', "verifier: Input should be"), ("yes", "expected 1, or a JSON object of verifier, ")],
)
def test_settings_that_do_not_exist_are_refused(value: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSPEC_SGLANG", value)
    with pytest.raises(ValueError, match=told):
        Settings.from_environment()


def test_one_asks_for_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSPEC_SGLANG", "1")
    assert Settings.from_environment() == Settings()
    other = Settings("target_only", off=False, architectures=("LlamaForCausalLM",))
    monkeypatch.setenv("RLSPEC_SGLANG", json.dumps(dataclasses.asdict(other)))
    assert Settings.from_environment() == other


@pytest.mark.slow
def test_the_log_says_what_is_in_force(tmp_path: Path) -> None:
    shape = tiny_mimo.config(hidden=64, layers=1, heads=2, kv_heads=1, ffn=128, vocab=160)
    model = tiny_mimo.write(tmp_path / "model", shape, tiny_mimo.weights(shape))
    here = Path(__file__).parent
    environment = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "RLSPEC_SGLANG": "1"}
    environment["PYTHONPATH"] = str(here.parent.parent)
    command = [sys.executable, "-W", "ignore", str(here / "plain_server.py"), str(model), str(free_port(ENGINES)), "2"]
    log = tmp_path / "log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while "rlspec: in force: " not in log.read_text():
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    line = log.read_text().partition("in force: ")[2].splitlines()[0]
    assert line == (
        "verifier position_keyed, coupled drafts, 0,1,2 a round by the adaptive rule; sampling by torch, "
        "attention intel_amx, no overlap, no graphs, float32"
    )

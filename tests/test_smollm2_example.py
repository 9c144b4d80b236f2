"""examples/smollm2.sh: its task, its reward, its configuration, and, slowly, all of it with --quick."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/smollm2"


def test_held_out_prompts_are_about_other_things(tmp_path):
    with mock.patch.object(sys, "argv", ["make_task.py", "--out", str(tmp_path)]):
        runpy.run_path(str(EXAMPLE / "make_task.py"), run_name="__main__")
    rows = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("rl", "eval")}
    assert len(rows["rl"]) >= 128 and len(rows["eval"]) == 128 and not set(rows["rl"]) & set(rows["eval"])
    for row in map(json.loads, rows["rl"]):
        assert row["prompt"].startswith("Ask one question about a") and row["label"] in row["prompt"]


@pytest.mark.parametrize(
    "response, reward",
    [
        ("What grows in a garden?", 1.0),
        ("What grows there?", 0.0),
        ("What is a garden? Is it large?", 0.0),
        ("A garden is a place.", 0.0),
    ],
)
def test_the_reward_is_for_one_question_about_the_thing(response, reward):
    one_question = runpy.run_path(str(EXAMPLE / "reward.py"))["one_question"]
    assert one_question(prompt="", response=response, label="garden", metadata={}) == reward


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quick_form_runs_and_proves(tmp_path):
    """It takes ten minutes on two quiet cores, and downloads the package."""
    environment = {**os.environ, "NO_SETUP": "1", "PYTHON_BIN": sys.executable}
    command = ["bash", str(ROOT / "examples/smollm2.sh"), "--quick", str(tmp_path / "run")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3500)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {"first", "last"} <= set(summary["rewards"]) and summary["drafter"]["curve"]
    assert summary["equal_texts"][0] == summary["equal_texts"][1]
    assert summary["transformers"] and "accept length" in summary["server"]

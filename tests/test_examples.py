"""Examples: the quickstart's task, model and tables, a calculator, and where scripts write."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import short_run

from megatron_rlspec.config import load
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.rollout.sglang.client import launcher
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.start import embedded
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICKSTART = EXAMPLES / "quickstart"
CALCULATOR = EXAMPLES / "calculator"
SIZES = ("--task", "slips", "--train", 800, "--rl", 400, "--eval", 100, "--slip", 0.1)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quickstart") / "task"
    short_run.script(QUICKSTART / "make_task.py", "--out", out, *SIZES)
    return out


@pytest.fixture(scope="module")
def rows(task) -> dict[str, list[dict]]:
    return {split: [json.loads(line) for line in (task / f"{split}.jsonl").open()] for split in ("train", "rl", "eval")}


def items(prompt: str) -> list[tuple[str, int]]:
    assert re.fullmatch(r"([a-zA-V]\d)+=", prompt)
    return [(prompt[i], int(prompt[i + 1])) for i in range(0, len(prompt) - 1, 2)]


def test_labels_are_the_sums_of_the_digits(rows):
    for row in rows["rl"] + rows["eval"]:
        pairs = items(row["prompt"])
        assert row["label"] == str(sum(digit for _, digit in pairs) % 10)
        assert row["metadata"] == {"items": len(pairs)}
        assert len({key for key, _ in pairs}) == len(pairs), "a key that occurs twice cannot be looked up"


@pytest.fixture(scope="module")
def calculator():
    specification = importlib.util.spec_from_file_location("calculator", CALCULATOR / "calculator.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("so 3 + 4", "7"),
        ("1/0", ""),
        ("2 ** 9999999", ""),
        ("__import__('os')", ""),
    ],
)
def test_the_calculator(calculator, text, result):
    assert calculator.calculate(text) == result


def test_a_run_of_several_turns(start, tmp_path):
    """Trainer and engine agree on the log-probs of trained tokens, so masks and positions are right over turns."""
    options = {
        "rollout__engine": "embedded",
        "rollout__function": "calculator:solve",
        "spec__mode": "fixed",
        "train__steps": 2,
        "reward__kind": "exact",
    }
    ended = forked.run_module(
        "megatron_rlspec.cli", short_run.words(start, tmp_path, "train", options), folder=CALCULATOR
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        assert record["policy/train_rollout_logprob_abs_diff"] < 1e-3
        assert record["rollout/accept_length"] >= 1 and record["rollout/response_tokens"] > 16


STEP = {"seconds_generate": 1.0, "seconds_push": 1.0, "seconds_train": 1.0, "drift/kl": 0.1}


def test_the_closing_tables_are_printed(start, tmp_path, monkeypatch, capsys):
    for part in ("warm", "rl", "control", "upper"):
        shutil.copytree(start / "model", tmp_path / part / "hf")
    shutil.copytree(start / "task", tmp_path / "task")
    options = {"model.path": str(start / "model"), "model.dtype": "float32", "model.max_length": "256"}
    options |= {"rollout.max_new_tokens": "24", "rollout.engine": "embedded", "spec.candidate_steps": "0,3,5"}
    config = load(None, options)
    (tmp_path / "rl/config.json").write_text(config.model_dump_json())
    rule = {"candidates": ["off", 3], "roofline": Roofline.of_layers(4).to_json()}
    (tmp_path / "rl/spec_rule.json").write_text(json.dumps(rule))
    (tmp_path / "rl/metrics.jsonl").write_text(json.dumps({"step": 0, **STEP}) + "\n")
    events = [{"kind": "evaluation", "name": name, "reward": 0.5, "prompts": 8} for name in ("first", "last")]
    (tmp_path / "rl/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    @contextmanager
    def launch(*_, **__):
        engine = embedded(config)
        engine.set_config(OFF)
        yield SimpleNamespace(wait=lambda: engine, process=SimpleNamespace(pid=os.getpid()))

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(SGLangEngine, "of", lambda engine: engine)
    short_run.script(short_run.EXAMPLES / "proof.py", "--run", tmp_path, "--prompts", 4, "--repeats", 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["comparison"]["equal_texts"] == summary["comparison"]["prompts"] == 4
    assert len(summary["coupled"]) == 2 and "co-trained / plain" in capsys.readouterr().out


@pytest.fixture
def commands(tmp_path):
    """Return a function that runs a script in `tmp_path`/here, and returns the command lines of Python."""
    for name in ("here", "checkout/examples", "checkout/tools", "checkout/.venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "checkout/tools/setup_cpu.sh").touch()
    python = tmp_path / "checkout/.venv/bin/python"
    python.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/log\n')
    python.chmod(0o755)

    def run(script: str, *arguments: str, **variables: str) -> list[str]:
        shutil.copy(EXAMPLES / script, tmp_path / "checkout/examples")
        (tmp_path / "log").write_text("")
        given = ["bash", str(tmp_path / "checkout/examples" / script), *arguments]
        environment = {"PATH": "/usr/bin:/bin", **variables}
        subprocess.run(given, cwd=tmp_path / "here", env=environment, check=True, capture_output=True)
        return (tmp_path / "log").read_text().splitlines()

    return run


def test_a_relative_directory_is_one_of_the_callers_place(commands, tmp_path):
    mine = tmp_path / "here/mine"
    mine.mkdir()
    (mine / "smollm2.gguf").touch()
    for words in (["quickstart.sh", "mine"], ["smollm2.sh", "--quick", "mine"]):
        ran = commands(*words)
        assert ran and all(f" {mine}" in line for line in ran), ran


@pytest.mark.parametrize("script", ["quickstart.sh", "smollm2.sh"])
def test_an_interrupted_part_goes_on(commands, tmp_path, script):
    (tmp_path / "here/smollm2.gguf").touch()
    ran = [line.split() for line in commands(script, ".")]
    parts = [words for words in ran if words[1] == "megatron_rlspec.cli" and words[2] in ("sft", "train", "replay")]
    assert len(parts) >= 3 and all("--train.resume true" in " ".join(words) for words in parts), ran

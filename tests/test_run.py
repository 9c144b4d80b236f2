"""`rlspec train` as a user starts it: real engine, real trainer, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rlspec.metrics import read_records
from megatron_rlspec.weights.checkpoint import read_hf

EXAMPLES = Path(__file__).parent.parent / "examples/quickstart"
SMALL = {
    "model.dtype": "float32",
    "model.max_length": "256",
    "rollout.prompts_per_step": "4",
    "rollout.samples_per_prompt": "4",
    "rollout.max_new_tokens": "24",
    "rollout.max_running_requests": "16",
    "rollout.max_total_tokens": "8192",
    "spec.candidate_steps": "0,1,3",
    "optimizer.lr": "1e-3",
    "reward.kind": "run_reward:by_length",
    "reward.workers": "1",
    "train.eval_prompts": "4",
    "train.save_every": "1",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A directory with the quickstart's task and a small random model."""
    folder = tmp_path_factory.mktemp("start")
    python(EXAMPLES / "make_task.py", "--out", folder / "task", "--train", 32, "--rl", 64, "--eval", 8)
    shape = ("--layers", 3, "--hidden", 32, "--ffn", 64)
    python(EXAMPLES / "make_model.py", "--task", folder / "task", "--out", folder / "model", *shape)
    return folder


def python(script: Path, *arguments: object) -> None:
    subprocess.run([sys.executable, script, *map(str, arguments)], check=True, capture_output=True, text=True)


def train(start: Path, run_dir: Path, **options: object) -> subprocess.Popen:
    values = SMALL | {"model.path": start / "model", "data.path": start / "task/rl.jsonl"}
    values |= {"data.eval_path": start / "task/eval.jsonl", "train.run_dir": run_dir}
    values |= {name.replace("__", "."): value for name, value in options.items()}
    command = [sys.executable, "-m", "megatron_rlspec.cli", "train"]
    command += [text for name, value in values.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=Path(__file__).parent, **pipes)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]
    return output


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    finish(train(start, run_dir, train__steps=3))
    return run_dir


def test_a_run_leaves_what_the_readme_says(whole, start):
    records = read_records(whole / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        assert record["push/failed_engines"] == 0 and record["push/tensors"] == len(read_hf(start / "model")[1])
        assert record["policy/skipped"] == 0 and record["drafter/grad_norm"] > 0
        assert record["rollout/response_tokens"] > 0 and record["policy/train_rollout_logprob_abs_diff"] < 1e-3
        assert {"seconds_generate", "seconds_push", "seconds_train"} <= record.keys()
    evaluations = [event for event in read_records(whole / "events.jsonl") if event["kind"] == "evaluation"]
    assert [event["name"] for event in evaluations] == ["first", "last"]
    assert json.loads((whole / "config.json").read_text())["train"]["steps"] == 3
    before, after = read_hf(start / "model")[1], read_hf(whole / "hf")[1]
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any(".mtp_layers." in name for name in changed) and any(".mtp_layers." not in name for name in changed)


def test_the_embedded_engine_is_one_word(whole, start, tmp_path):
    """Same seeds, same verifier: the first rollout is the same text as SGLang's, so its reward is, too."""
    finish(train(start, tmp_path, train__steps=1, rollout__engine="embedded", spec__mode="fixed"))
    ours, theirs = (read_records(folder / "metrics.jsonl")[0] for folder in (tmp_path, whole))
    for name in ("rollout/reward", "rollout/response_tokens", "rollout/longest_response"):
        assert ours[name] == theirs[name]


@pytest.mark.slow
def test_killed_and_resumed_reaches_the_same_bytes(whole, start, tmp_path):
    """SIGKILL at three moments; `train.resume` goes on from the last checkpoint each time."""
    for steps in (0, 1, 2):
        process = train(start, tmp_path, train__steps=3, train__resume="true")
        deadline = time.time() + 120
        while len(read_records(tmp_path / "metrics.jsonl")) <= steps and process.poll() is None:
            assert time.time() < deadline, "no progress"
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finish(train(start, tmp_path, train__steps=3, train__resume="true"))
    expected, reached = read_hf(whole / "hf")[1], read_hf(tmp_path / "hf")[1]
    assert all(expected[name].equal(reached[name]) for name in expected)
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [0, 1, 2]

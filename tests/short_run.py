"""Runs of `rlspec train` that take seconds, as processes of their own: what the test_*.py here start, kill and read."""

import os
import subprocess
import sys
from pathlib import Path

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


def make_start(folder: Path) -> Path:
    """`folder`, with the quickstart's task and a small random model."""
    python(EXAMPLES / "make_task.py", "--out", folder / "task", "--train", 32, "--rl", 64, "--eval", 8)
    shape = ("--layers", 4, "--hidden", 32, "--ffn", 64)
    python(EXAMPLES / "make_model.py", "--task", folder / "task", "--out", folder / "model", *shape)
    return folder


def python(script: Path, *arguments: object) -> None:
    subprocess.run([sys.executable, script, *map(str, arguments)], check=True, capture_output=True, text=True)


def train(
    start: Path,
    run_dir: Path,
    script: Path | None = None,
    ranks: int = 1,
    command: str = "train",
    **options: object,
) -> subprocess.Popen:
    """`rlspec train` of a tiny model, or another command; `script` runs instead of `megatron_rlspec.cli`."""
    values = SMALL | {"model.path": start / "model", "data.path": start / "task/rl.jsonl"}
    values |= {"data.eval_path": start / "task/eval.jsonl", "train.run_dir": run_dir}
    values |= {name.replace("__", "."): value for name, value in options.items()}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    program = [str(script)] if script else ["-m", "megatron_rlspec.cli"]
    words = [sys.executable, *launcher, *program, command]
    words += [text for name, value in values.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, env=environment, cwd=Path(__file__).parent, **pipes)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]
    return output

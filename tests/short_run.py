"""Start runs of `rlspec train` that take seconds, as processes that the tests in this folder kill and read."""

import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import forked

from megatron_rlspec.models.hf_files import read_hf, write_hf

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples/quickstart"
CLI = "megatron_rlspec.cli"
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
    """Fill `folder` with the quickstart's task and a small random model."""
    sizes = ("--task", "slips", "--train", 32, "--rl", 64, "--eval", 8)
    script(EXAMPLES / "make_task.py", "--out", folder / "task", *sizes)
    shape = ("--layers", 4, "--hidden", 32, "--ffn", 64)
    script(EXAMPLES / "make_model.py", "--task", folder / "task", "--out", folder / "model", *shape)
    return folder


def without_drafter(model: Path, target: Path) -> None:
    """Write the model, which is a MiMo, without its drafter: as a Qwen2."""
    config, tensors = read_hf(model)
    config |= {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}
    kept = ((name, tensors[name]) for name in tensors if ".mtp_layers." not in name)
    write_hf(target, config, kept, tokenizer_from=model)


def script(path: Path, *arguments: object) -> None:
    """Run a script in this process."""
    with mock.patch.object(sys, "argv", [str(path), *map(str, arguments)]):
        runpy.run_path(str(path), run_name="__main__")


def words(start: Path, run_dir: Path, command: str, options: dict[str, object]) -> list[str]:
    """Return the arguments of `rlspec` for a run of a tiny model; the keyword `rollout__engine` is `rollout.engine`.

    The keyword `config` is a TOML file.
    """
    values = SMALL | {"model.path": start / "model", "data.path": start / "task/rl.jsonl"}
    values |= {"data.eval_path": start / "task/eval.jsonl", "train.run_dir": run_dir}
    chosen = {name.replace("__", "."): value for name, value in options.items()}
    file = chosen.pop("config", None)
    if chosen.get("spec.mode", "adaptive") != "adaptive":
        del values["spec.candidate_steps"]  # it would have no effect, which is refused
    if "rollout.urls" in chosen:
        del values["rollout.max_total_tokens"]
    if chosen.get("reward.kind") == "exact":
        del values["reward.workers"]
    if chosen.get("data.eval_path") == "":
        del values["train.eval_prompts"]
    values |= chosen
    given = [command, "--config", str(file)] if file else [command]
    return [*given, *(text for name, value in values.items() for text in (f"--{name}", str(value)))]


def run(
    start: Path,
    run_dir: Path,
    ranks: int = 1,
    command: str = "train",
    code: int = 0,
    module: str = CLI,
    **options: object,
) -> str:
    """Run `rlspec train`, or another command, to its end, which must be of this exit code. Returns what it printed.

    module  that is run in place of the command's own; it lies in this folder
    """
    arguments = words(start, run_dir, command, options)
    ended = forked.run_module(module, arguments, folder=TESTS, ranks=ranks)
    output = ended.stdout + ended.stderr
    assert ended.returncode == code, output[-3000:]
    return output


def train(
    start: Path, run_dir: Path, program: Path | None = None, ranks: int = 1, **options: object
) -> subprocess.Popen:
    """Start `rlspec train` as a user does; or `program` in its place, as `--ranks` would start it."""
    command = [sys.executable, "-m", "megatron_rlspec.cli", *words(start, run_dir, "train", options)]
    if program:
        launch = ["-m", "megatron_rlspec.host.launch", "--standalone", "--local-addr", "127.0.0.1"]
        launch += ["--nproc-per-node", str(ranks)]
        command[1:3] = [*(launch if ranks > 1 else []), str(program)]
    elif ranks > 1:
        command += ["--ranks", str(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=TESTS, **pipes)


def finish(process: subprocess.Popen) -> str:
    """Wait for a run that `train` started. Returns what it printed."""
    output, _ = process.communicate(timeout=840)
    assert process.returncode == 0, output[-3000:]
    return output

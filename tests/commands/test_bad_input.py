"""What ends a command: one line and a code. `tests/malformed/` holds the tables of a user's mistakes."""

import subprocess
import sys

import forked
import numpy as np
import pytest
import torch
from harness import write_model
from safetensors.torch import load_file, save_file

from megatron_rlspec import cli
from megatron_rlspec.config import Config
from megatron_rlspec.records import recorder


def test_a_command_line_ends_in_one_line_and_2(tmp_path):
    """In a process of its own: the tables of `tests/malformed` run in the tests' process."""
    ended = forked.run_module("megatron_rlspec.cli", ["serve", "--model", "no"], folder=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("rlspec: --model no: no config.json"), ended.stderr
    assert ended.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_mistakes_are_reported_before_torch_is_imported(tmp_path):
    code = (
        "import sys, megatron_rlspec.cli as c\ntry: c.main(['train'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "False\n" and "model.path is empty" in ended.stderr


def test_a_loss_that_is_not_finite_ends_the_run_with_a_checkpoint(tmp_path):
    """A norm of 1e30 makes the gradient overflow: two steps are skipped, then the run stops with one line."""
    weights = write_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1e30}, weights, {"format": "pt"})
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a1", "response": "b2"}\n' * 4)
    arguments = (
        "sft --model.path model --model.dtype float32 --sft.path rows.jsonl --sft.samples_per_step 2 --sft.steps 9 "
        "--sft.held_out 0 --sft.drafter_only false "
        "--optimizer.clip_grad 0 --train.max_bad_steps 2 --train.run_dir run"
    )
    ended = forked.run_module("megatron_rlspec.cli", arguments.split(), folder=tmp_path)
    line = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr[-2000:]
    assert (
        line.startswith("rlspec: step ") and "not finite; 2 steps in a row were skipped (train.max_bad_steps=2)" in line
    )
    stopped = int(line.split()[2].rstrip(":"))
    assert (tmp_path / line.split()[-1]).is_dir() and line.endswith(f"run/checkpoints/step-{stopped:06d}")
    records = recorder.read_records(tmp_path / "run/events.jsonl")
    events = [record["message"] for record in records if record["kind"] == "loss"]
    assert len(events) == 2 and all("step skipped" in message for message in events)
    records = recorder.read_records(tmp_path / "run/metrics.jsonl")
    assert [record["policy/skipped"] for record in records[-2:]] == [1, 1] and not (tmp_path / "run/hf").exists()


def test_a_defect_keeps_its_traceback():
    assert cli.exit_code(KeyError("x")) is None and cli.exit_code(FileNotFoundError("x")) is None
    assert cli.exit_code(OSError(28, "No space left on device")) == 1
    assert Config().train.max_bad_steps > 0


def unloadable() -> None:
    raise ImportError("libcudart.so.12: cannot open shared object file: No such file or directory")


@pytest.mark.parametrize(
    ("act", "expects"),
    [
        (lambda: np.empty(10**16), ("out of memory: ", "--dry-run` counts")),
        (lambda: torch.empty(10**16), ("out of memory: ", "DefaultCPUAllocator")),
        (unloadable, ("does not load: libcudart.so.12", "rlspec doctor")),
    ],
    ids=["numpy", "torch", "torch's libraries"],
)
def test_what_the_machine_cannot_do_is_one_line(act, expects, capsys):
    assert cli.run(act) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(part in err for part in expects), err

"""`rlspec` itself: help texts, the doctor, and what ends a command. A user's mistakes: `tests/malformed/`."""

import logging
import os
import subprocess
import sys

import forked
import numpy as np
import pytest
import torch
from harness import write_model
from safetensors.torch import load_file, save_file

from megatron_rlspec import cli
from megatron_rlspec.arguments import Parser
from megatron_rlspec.commands import doctor
from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.records import recorder

SCREENS = [["--help"], ["--help-all"], *([name, "--help"] for name in cli.COMMANDS)]


@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
def test_the_first_help_fits_on_a_screen_and_shows_an_example(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    lines = capsys.readouterr().out.splitlines()
    assert not ended.value.code
    assert len(lines) <= 40 and max(map(len, lines)) <= 80, "\n".join(lines)
    cut = [line for line in lines if line.endswith(" ...") and "rlspec" not in line]
    assert not cut, "\n".join(lines)
    if words[0] in cli.COMMANDS:
        assert any(line.startswith(f"  rlspec {words[0]} ") for line in lines), "\n".join(lines)
    else:
        assert all(name in "\n".join(lines) for name in cli.COMMANDS)


@pytest.mark.parametrize(("own", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_torch_wait_without_using_a_core(own, expected, monkeypatch):
    monkeypatch.setattr(cli, "GPU_DEVICE", "/nowhere")
    monkeypatch.setenv("OMP_WAIT_POLICY", own or "")
    if own is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    assert os.environ["OMP_WAIT_POLICY"] == expected


def test_help_imports_no_torch_and_no_pydantic():
    code = (
        "import sys; from megatron_rlspec import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: print(sorted({'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "words, hint",
    [
        (["--grid"], "unrecognized arguments: --grid; `rlspec x --help-all` lists the options"),
        (["--batch", "1"], "unrecognized arguments: --batch 1; did you mean --batches?"),
    ],
)
def test_an_unknown_option_gets_the_nearest_one_or_the_command_that_lists_them(words, hint, capsys):
    parser = Parser(prog="rlspec x")
    parser.add_argument("--batches")
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert capsys.readouterr().err == f"rlspec x: {hint}\n"


def test_lines_of_others_that_come_in_every_run_are_dropped(caplog):
    cli.drop_foreign_lines()
    for name, text in cli.FOREIGN.items():
        logging.getLogger(name).warning(f"{text} ...")
        logging.getLogger(name).warning("another line")
    assert [record.getMessage() for record in caplog.records] == ["another line"] * len(cli.FOREIGN)


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


def test_what_is_installed_fits_and_another_version_differs(monkeypatch):
    assert [f.state for f in doctor.examine(["megatron-core", "sglang"])] == ["fits", "fits"]
    monkeypatch.setattr(doctor, "version", lambda name: "0.5.20")
    (sglang,) = doctor.examine(["sglang"])
    assert sglang.state == "differs"
    assert sglang.text.startswith("0.5.20 is installed; install sglang 0.5.15.post1 to 0.5.19 or 0.5.23")


@pytest.mark.parametrize(("state", "says"), [("missing", "not installed"), ("differs", "does not fit the installed")])
def test_a_run_is_refused_because_of_what_it_needs_only(state, says, monkeypatch):
    monkeypatch.setattr(
        doctor,
        "examine",
        lambda names: [doctor.ProjectLine(n, state if n == "sglang" else "fits", "x is gone") for n in names],
    )
    with pytest.raises(ConfigError, match=says) as refused:
        doctor.refuse_if_affected(starts_sglang=True)
    assert 'rollout.engine="sglang"' in str(refused.value)
    doctor.refuse_if_affected(starts_sglang=False)

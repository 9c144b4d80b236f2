"""`rlspec` itself: help texts, the doctor, and what ends a command. A user's mistakes: `tests/malformed/`."""

import os
import subprocess
import sys

import forked
import numpy as np
import pytest
import torch

from megatron_rlspec import cli
from megatron_rlspec.commands import doctor
from megatron_rlspec.config import ConfigError

SCREENS = [["--help"], ["--help-all"], *([name, "--help"] for name in cli.COMMANDS)]


@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
def test_the_first_help_fits_on_a_screen(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    lines = capsys.readouterr().out.splitlines()
    assert not ended.value.code
    assert len(lines) <= 40 and max(map(len, lines)) <= 80, "\n".join(lines)


def test_a_command_line_ends_in_one_line_and_2(tmp_path):
    """In a process of its own: the tables of `tests/malformed` run in the tests' process."""
    ended = forked.run_module("megatron_rlspec.cli", ["serve", "--model", "no"], folder=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("rlspec: --model no: no config.json"), ended.stderr
    assert ended.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]], ids=" ".join)
def test_a_reader_that_ended_gets_no_traceback(words):
    reading, writing = os.pipe()
    os.close(reading)  # as `| head -1` after its line
    command = [sys.executable, "-m", "megatron_rlspec.cli", *words]
    with os.fdopen(writing) as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")


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
        doctor.check_versions(starts_sglang=True)
    assert 'rollout.engine="sglang"' in str(refused.value)
    doctor.check_versions(starts_sglang=False)


@pytest.mark.parametrize(("words", "heavy"), [(["--help"], "torch pydantic numpy"), (["train"], "torch")])
def test_help_and_mistakes_come_without_heavy_imports(words, heavy, tmp_path):
    code = (
        "import sys, megatron_rlspec.cli as c\n"
        f"try: c.main({words})\nexcept SystemExit: print(sorted(set({heavy.split()}) & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr
    assert ("model.path is empty" in ended.stderr) == (words == ["train"])

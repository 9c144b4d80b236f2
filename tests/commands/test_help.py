"""`rlspec --help`, and the help texts of every command."""

import logging
import os
import subprocess
import sys

import pytest

from megatron_rlspec import cli
from megatron_rlspec.arguments import Parser

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

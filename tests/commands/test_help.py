"""`rlspec --help`, the help texts of every command, and completion by the Tab key."""

import shutil
import subprocess
import sys

import pytest

from megatron_rlspec import cli
from megatron_rlspec.arguments import Parser
from megatron_rlspec.commands import completion


def screen(capsys, monkeypatch, *words):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--help"], ["--help-all"], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join
)
def test_the_first_help_fits_on_a_screen_and_shows_an_example(words, capsys, monkeypatch):
    lines = screen(capsys, monkeypatch, *words).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, "\n".join(lines)
    if words[0] in cli.COMMANDS:
        assert any(line.startswith(f"  rlspec {words[0]} ") for line in lines), "\n".join(lines)


def test_the_overview_names_every_command(capsys, monkeypatch):
    first = screen(capsys, monkeypatch, "--help")
    everything = screen(capsys, monkeypatch, "--help-all")
    assert all(name in first and f"\n  {name} " in everything for name in cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_all_shows_every_option_and_the_first_help_names_it(name, capsys, monkeypatch):
    parser = completion.parser_of(name)
    unknown = set(parser.first) - {option for action in parser._actions for option in action.option_strings}
    assert not unknown
    everything = screen(capsys, monkeypatch, name, "--help-all")
    options = [action for action in parser._actions if action.help != "==SUPPRESS=="]
    assert all(option in everything for action in options for option in action.option_strings)
    first = screen(capsys, monkeypatch, name, "--help")
    assert all(f"  {option}" in first for option in parser.first)
    assert (f"more options: rlspec {name} --help-all\n" in first) == bool(parser.first)


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


def test_a_missing_argument_gets_the_command_that_shows_an_example(capsys):
    parser = Parser(prog="rlspec x")
    parser.add_argument("table")
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert capsys.readouterr().err.endswith("are required: table; `rlspec x --help` shows an example\n")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    shtab = pytest.importorskip("shtab")
    folder = tmp_path_factory.mktemp("completion")
    whole = completion.whole()
    for shell in completion.SHELLS:
        (folder / shell).write_text(shtab.complete(whole, shell))
    return folder


def tab(script, *words):
    """Return what bash offers for the last word of a command line."""
    quoted = " ".join(f"'{word}'" for word in ("rlspec", *words))
    lines = (
        f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}",
        'handler=$(complete -p rlspec | sed "s/.*-F \\([^ ]*\\).*/\\1/"); $handler; printf "%s\\n" "${COMPREPLY[@]}"',
    )
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_options_and_values(scripts):
    script = scripts / "bash"
    assert sorted(tab(script, "re")) == ["replay", "report"]
    assert tab(script, "plan", "--acc") == ["--acceptance"]
    assert "--train.run_dir" in tab(script, "train", "--train.r")
    assert tab(script, "profile", "--engine", "e") == ["embedded"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command(shell, scripts):
    text = (scripts / shell).read_text()
    assert all(name in text for name in cli.COMMANDS)
    if found := shutil.which(shell):
        subprocess.run([found, "-n", scripts / shell], check=True)

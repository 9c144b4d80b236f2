"""`rlspec completion`: a script with which a shell completes commands and options of `rlspec` by the Tab key."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_rlspec import arguments
from megatron_rlspec.cli import COMMANDS, EXTRAS, named

SHELLS = ("bash", "zsh", "fish")
EXAMPLE = """\
rlspec completion bash > ~/.local/share/bash-completion/completions/rlspec
rlspec completion zsh > ~/.zfunc/_rlspec     # with ~/.zfunc in fpath
rlspec completion fish > ~/.config/fish/completions/rlspec.fish"""


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec completion", description=__doc__.partition(": ")[2], example=EXAMPLE
    )
    p.add_argument("shell", choices=SHELLS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of a shell."""
    import shtab

    print(shtab.complete(whole(), parser().parse_args(argv).shell))
    return 0


def whole() -> argparse.ArgumentParser:
    """Return one parser with a subparser for each command, without the options of commands that cannot be imported."""
    top = argparse.ArgumentParser(prog="rlspec")
    commands = top.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, command in COMMANDS.items():
        own = parser_of(name)
        commands.add_parser(
            name, help=command.text.replace("%", "%%"), parents=[own] if own else [], add_help=False
        )
    return top


def parser_of(name: str) -> arguments.Parser | None:
    """Return the parser of a command, or None if a package that a bare `pip install` leaves out is missing."""
    command = COMMANDS[name]
    try:
        found: arguments.Parser = named(
            command.parser or f"{command.run.partition(':')[0]}:parser"
        )()
        return found
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        return None

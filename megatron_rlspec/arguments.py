"""Command lines: a parser that prints one line for a mistake, and bounded values. Standard library only."""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

# Of the short help text, which `--help` prints:
WIDTH = 80  # columns
# most characters of an option's text; its first clause stays whole even if it is longer
FIRST_TEXT = 60
SHORT = {"INTEGER": "N", "NUMBER": "X"}  # metavars, and what stands for them
HELP = {"-h", "--help", "--help-all"}  # options that no help text lists


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with two help texts, one line for a mistake, and no abbreviations of options.

    Texts of options (`help`) have clauses with "; " between them: the short help text shows the first ones.

    example   command lines that `--help` shows
    first     options that `--help` shows beside positional arguments and required options; empty: all.
              `--help-all` shows every option, and the epilog
    settings  of ArgumentParser
    """

    def __init__(
        self,
        *,
        example: str = "",
        first: Sequence[str] = (),
        add_help: bool = True,
        **settings: Any,
    ) -> None:
        text = settings.get("description") or ""
        settings["description"] = text[:1].upper() + text[1:]
        super().__init__(**{"allow_abbrev": False, **settings, "add_help": False})
        self.example = example
        self.first = first
        # (False, option, others) by `needs`: the others are refused without the option. (True, option, others) by
        # `excludes`: they are refused with it. `others` are names with spaces between them.
        self._rules: list[tuple[bool, str, str]] = []
        # argparse's own --help is not added: it prints every option
        if add_help:
            self.add_argument(
                "-h", "--help", action=_FirstHelp, nargs=0, help="the options that most people need"
            )
            self.add_argument("--help-all", action="help", help="every option")

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an argument. Its help says the default, if there is one.

        Arguments of an argparse group do not come here: `commands/training.py` writes their defaults itself.
        """
        action = super().add_argument(*names, **settings)
        default = action.default
        if default in (None, "", False, [], argparse.SUPPRESS) or not action.option_strings:
            return action
        if action.help and "default" not in action.help:
            shown = ",".join(map(str, default)) if isinstance(default, list | tuple) else default
            action.help += f" (default {shown})"
        return action

    def needs(self, wanted: str, options: str) -> None:
        """Refuse `options`, names separated by spaces, where `wanted` is not given.

        Here and in `excludes` every name must be an option of this parser, with a default other than SUPPRESS.
        """
        self._rules.append((False, wanted, options))

    def excludes(self, given: str, options: str) -> None:
        """Refuse `options`, names separated by spaces, where `given` is given: it leaves them without effect."""
        self._rules.append((True, given, options))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse options without effect (`needs`, `excludes`). `parse_args` calls it, too.

        An option counts as given if its value differs from its default.
        """
        parsed, rest = super().parse_known_args(args, namespace)
        for refused_with, other, options in self._rules:
            if self._given(other, parsed) != refused_with:
                continue
            for name in options.split():
                if self._given(name, parsed):
                    self.error(
                        f"{name} has no effect {'with' if refused_with else 'without'} {other}"
                    )
        return parsed, rest

    def _given(self, name: str, parsed: argparse.Namespace) -> bool:
        """Return whether an option of this parser, such as "--to", has another value than its default."""
        action = next(a for a in self._actions if name in (*a.option_strings, a.dest))
        return bool(getattr(parsed, action.dest) != action.default)

    def first_help(self) -> str:
        """Return the short help text: the options of `first` and the example, `WIDTH` columns wide."""
        options = [
            a
            for a in self._actions
            if a.help != argparse.SUPPRESS and not {*a.option_strings} & HELP
        ]
        # copies, because their texts are shortened below and --help-all prints them whole
        shown = [
            copy.copy(action) for action in options if not self.first or self._is_first(action)
        ]
        for action in shown:
            action.help = _first_clauses(action.help or "")
            if isinstance(action.metavar, str):
                action.metavar = SHORT.get(action.metavar, action.metavar)
        formatter = argparse.HelpFormatter(self.prog, max_help_position=35, width=WIDTH)
        formatter.add_usage(self.usage or f"{self.prog} {' '.join(self._words())}".rstrip(), [], [])
        formatter.add_text(self.description)
        formatter.start_section("most used" if self.first else "options")
        formatter.add_arguments(shown)
        formatter.end_section()
        text = formatter.format_help()
        if self.example:
            text += "\n" + "".join(f"  {line}\n" for line in self.example.splitlines())
        rest = len(options) - len(shown)
        return text + (f"\n{rest} more options: {self.prog} --help-all\n" if rest else "")

    def _is_first(self, action: argparse.Action) -> bool:
        return (
            not action.option_strings
            or action.required
            or bool(set(action.option_strings) & set(self.first))
        )

    def _words(self) -> Iterator[str]:
        """Yield the words of a short usage line: positional arguments, required options, and [options]."""
        for action in self._actions:
            name = str(action.metavar or action.dest).upper()
            if not action.option_strings:
                yield {"*": f"[{name} ...]", "+": f"{name} ...", "?": f"[{name}]"}.get(
                    str(action.nargs), name
                )
            elif action.required:
                yield f"{action.option_strings[0]} {name}"
        yield "[options]"

    def refuse_typos(self, rest: Sequence[str]) -> None:
        """Refuse options in `rest` that resemble one of this parser, or are the beginning of one.

        rest  words that go on to another program, such as SGLang's options of `rlspec serve`. It would take a mistyped
              option of ours for a wrong one of its own, or as an abbreviation
        """
        ours = [
            option
            for action in self._actions
            for option in action.option_strings
            if option not in HELP
        ]
        for word in (text.partition("=")[0] for text in rest if text.startswith("--")):
            near = [name for name in ours if name.startswith(word)]
            near = near or difflib.get_close_matches(word, ours, n=1, cutoff=0.8)
            if near:
                self.error(f"unknown option {word}; did you mean {near[0]}?")

    def error(self, message: str) -> NoReturn:
        """Print `message` on one line, with a hint, and exit with status 2. argparse calls it for every mistake."""
        # argparse wraps some messages. The two that get a hint are known by their beginning, which argparse writes.
        message = " ".join(message.split())
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(word, known, n=1)
            message += (
                f"; did you mean {near[0]}?"
                if near
                else f"; `{self.prog} --help-all` lists the options"
            )
        elif message.startswith("the following arguments are required"):
            message += f"; `{self.prog} --help` shows an example"
        self.exit(2, f"{self.prog}: {message}\n")


def _first_clauses(text: str) -> str:
    """Return as many clauses of an option's help as fit into `FIRST_TEXT` characters, one at least, and its default.

    The default does not count for the length.
    """
    text, _, default = text.partition(" (default ")  # as `add_argument` writes it
    short = ""
    for clause in text.split("; "):
        if short and len(short) + 2 + len(clause) > FIRST_TEXT:
            break
        short = f"{short}; {clause}" if short else clause
    return f"{short} (default {default}" if default else short


class _FirstHelp(argparse.Action):
    """Print the short help text, and exit. It stores nothing in the namespace."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.first_help(), end="")
        parser.exit()


def integer(low: int, high: int) -> Callable[[str], int]:
    """Return a type for `add_argument`: an integer from `low` to `high`."""
    return _bounded(int, low, high, f"integers from {low} to {high}")


def number(low: float, high: float) -> Callable[[str], float]:
    """Return a type for `add_argument`: a finite number from `low` to `high`."""
    return _bounded(float, low, high, f"numbers from {low:g} to {high:g}")


def distinct_integers(low: int, high: int) -> Callable[[str], list[int]]:
    """Return a type for `add_argument`: integers with commas between them. The list is sorted and has none twice."""
    parse_one = integer(low, high)
    wanted = f"integers from {low} to {high}"

    def parse(text: str) -> list[int]:
        try:
            return sorted({parse_one(part) for part in text.split(",")})
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected {wanted}") from None

    return parse


Value = TypeVar("Value", int, float)


def _bounded(
    kind: Callable[[str], Value], low: float, high: float, wanted: str
) -> Callable[[str], Value]:
    """Return a type for `add_argument`: a `kind` from `low` to `high`. `wanted` stands in the message of an error."""

    def parse(text: str) -> Value:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:  # NaN is not in any range
            raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected {wanted}")
        return value

    return parse

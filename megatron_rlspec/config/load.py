"""Make the configuration: defaults, a TOML file over them, and command-line options over both.

`load` and `load_replay` are the entries, and `options` lists every option. A wrong option raises ConfigError with one
line. Types and bounds are checked by the sections themselves (`base.py`); here are conversion and messages.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_rlspec import files
from megatron_rlspec.config.base import AUTO, ConfigError, expectation, shown
from megatron_rlspec.config.effects import without_effect
from megatron_rlspec.config.other_names import answer_to
from megatron_rlspec.config.run import Config
from megatron_rlspec.texts import printable

LARGEST_FILE = 1 << 20  # bytes of a TOML file; one with every option has some 10 KB
TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")
# beginnings of options that a replay cannot change
RECORDED = ("model.", "algorithm.", "replay.run", "train.record")
# `arguments.SHORT` shortens these in the short help text
_METAVARS: dict[Any, str] = {bool: "{true,false}", int: "INTEGER", float: "NUMBER"}


@dataclass(frozen=True)
class Option:
    """One option, for help texts and docs/configuration.md.

    name     `section.key`
    help     the field's description
    metavar  what it accepts, in short, such as `{mtp,eagle3}` or `INTEGER`
    """

    name: str
    default: Any
    help: str
    metavar: str

    @property
    def shown(self) -> str:
        """Return the default as a command line states it; "auto" for None."""
        if self.default is None:
            return AUTO
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


def load(path: str | Path | None = None, overrides: Mapping[str, str] | None = None) -> Config:
    """Return the configuration: defaults, then the TOML file, then overrides like `{"optimizer.lr": "1e-5"}`.

    Raises ConfigError: one line with the file, the option, its value and what was expected.
    """
    tree = _read(path)
    given = _given(tree, overrides or {})
    return _validated(path, tree, overrides or {}, given)


def _given(tree: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, int]:
    """Return the options that a user gave -> rank of their source for `without_effect`: file 1, command line 2."""
    tables = {section: table for section, table in tree.items() if isinstance(table, dict)}
    in_file = {f"{section}.{key}": 1 for section, table in tables.items() for key in table}
    return in_file | dict.fromkeys(overrides, 2)


def _validated(
    path: str | Path | None,
    tree: dict[str, Any],
    overrides: Mapping[str, str],
    given: Mapping[str, int],
) -> Config:
    """Return the configuration of the tables with the overrides. Raises ConfigError.

    path       stands in messages of options that the command line did not give
    tree       tables by section; changed here
    overrides  `section.key` -> text of the command line
    given      options of which each must have an effect, as `_given` returns them
    """
    fields = dict(_fields())
    for dotted, text in overrides.items():
        section, _, key = dotted.partition(".")
        table = tree.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {section}: expected a table [{section}] (got {shown(table)})"
            )
        # an unknown name goes in, too: the section refuses it, and the message names the nearest options
        table[key] = _converted(text, fields[dotted]) if dotted in fields else text
    _expand_home(tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_located(_one_line(error), path, overrides)) from None
    for line in without_effect(config, given):  # the first one is told
        raise ConfigError(_located(line, path, overrides))
    return config


def _located(line: str, path: str | Path | None, overrides: Mapping[str, str]) -> str:
    """Return `line`, which begins with an option's name, behind the file's name unless the command line gave it."""
    on_command_line = re.split("[=:]", line, maxsplit=1)[0] in overrides
    return line if on_command_line or not path else f"{path}: {line}"


def _expand_home(tree: dict[str, Any]) -> None:
    """Replace a ~/ at the beginning of a text or behind a comma by the home directory, in place.

    Parts of a list stay as they are. A shell does that only for whole words, and a TOML file has no shell.
    """
    home = f"{Path.home()}/"
    for table in tree.values():
        if isinstance(table, dict):
            for key, value in table.items():
                if isinstance(value, str):
                    table[key] = re.sub("(?<![^,])~/", home, value)


def load_replay(run: str, path: str | Path | None, overrides: Mapping[str, str]) -> Config:
    """Return the configuration of a replay: that of the recorded `run`, then the TOML file, then the overrides.

    Raises ConfigError, also for options that change what was recorded. Only options that this command was given must
    have an effect: those of the recorded run served its training.
    """
    recorded = Path(run) / "config.json"
    try:
        tree = files.read_json(recorded)
    except files.FileError as error:
        raise ConfigError(f"{error}; expected the directory of a recorded run") from None
    own = _read(path)
    changed = _given(own, overrides)
    for name in changed:
        if name.startswith(RECORDED):
            raise ConfigError(
                f"{name}: expected no such option; a replay has that of the recorded run, and records none"
            )
    if "train.run_dir" not in changed:
        raise ConfigError("train.run_dir is not set; expected a directory for the replay")
    tree["replay"] = {"run": run}
    # what concerned the recorded run only, and no replay
    run_only = {"record_gib": 0.0, "resume": False, "save_best": False}
    for section, table in (("train", run_only), *own.items()):
        recorded_table = tree.get(section)
        # anything else than a table is a mistake, which the check of the sections tells
        tree[section] = (
            recorded_table | table
            if isinstance(recorded_table, dict) and isinstance(table, dict)
            else table
        )
    config = _validated(path or recorded, tree, overrides, changed)
    if not config.drafter.train:
        raise ConfigError("a replay trains a drafter; expected drafter.train=true")
    return config


def options() -> Iterator[Option]:
    """Return every option in order, for `--help` and docs/configuration.md."""
    for name, field in _fields():
        yield Option(name, field.default, field.description or "", _metavar(field))


def _read(path: str | Path | None) -> dict[str, Any]:
    """Read the tables of a TOML file. A byte order mark, which some editors write, is skipped. Raises ConfigError."""
    if path is None:
        return {}
    try:
        return tomllib.loads(files.read_text(path, LARGEST_FILE))
    except files.FileError as error:
        raise ConfigError(f"{error}; expected a TOML file") from None
    except ValueError as error:  # also a date that does not exist
        raise ConfigError(f"{path}: not valid TOML: {printable(str(error))[:80]}") from None


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of every option, in the order of the sections in `Config`.

    Every section must have an object of its class as default: the fields are read from that class.
    """
    for section, outer in Config.model_fields.items():
        for key, field in type(outer.default).model_fields.items():
            yield f"{section}.{key}", field


def _converted(text: str, field: FieldInfo) -> Any:
    """Convert a command-line text to this field's type. If that fails, return the text: the section then refuses it."""
    kind = _kind(field)
    if kind is bool:
        return {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}.get(text.lower(), text)
    if get_origin(kind) is tuple:
        if text.startswith("["):  # a list as in TOML, for texts with commas in them
            try:
                return tomllib.loads(f"list = {text}")["list"]
            except ValueError:
                return text
        parts = [part for part in text.split(",") if part]
        return [_number(part, int) for part in parts] if _of_integers(field) else parts
    return _number(text, kind) if kind in (int, float) else text


def _kind(field: FieldInfo) -> Any:
    """Return the type of an option; without None, which is `auto`.

    The annotation of an option with `auto` must be TYPE | None, in this order.
    """
    if field.default is None:
        return get_args(field.annotation)[0]
    return field.annotation


def _number(text: str, kind: Any) -> Any:
    """Return the text as an int or a float; the text itself if it is none."""
    try:
        return kind(text)
    except ValueError:
        return text


def _of_integers(field: FieldInfo) -> bool:
    """Return whether the parts of a tuple field are integers, whatever bounds their type carries."""
    kind = get_args(field.annotation)[0]
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind is int


def _metavar(field: FieldInfo) -> str:
    """Return what a field accepts, in short."""
    if field.default is None:
        return f"{AUTO} or {_METAVARS[_kind(field)]}"
    kind = field.annotation
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))).lower() + "}"
    if get_origin(kind) is tuple:
        return "INTEGER,..." if _of_integers(field) else "TEXT,..."
    return _METAVARS.get(kind, "TEXT")


def _one_line(error: ValidationError) -> str:
    """Return the first mistake as one line, which begins with the option's name."""
    first = error.errors(include_url=False)[0]
    dotted = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    if first["type"] == "extra_forbidden":
        return unknown_option(dotted)
    if first["type"] == "model_type":
        return f"{dotted}: expected a table [{dotted}] (got {shown(first['input'])})"
    message = expectation(first)
    if first["type"] != "value_error":
        return f"{dotted}: {message} (got {shown(first['input'])})"
    # A check of a whole section names the option itself, as in "num_steps=4 is not among candidate_steps".
    of_section = dotted in Config.model_fields and re.match(r"\w+=", message)
    return f"{dotted}{'.' if of_section else ': '}{message}" if dotted else message


def unknown_option(dotted: str) -> str:
    """Return the error for an unknown option, with the nearest names."""
    names = [name for name, _ in _fields()]
    if dotted in Config.model_fields:
        inside = [name for name in names if name.startswith(f"{dotted}.")]
        return f"unknown option {dotted}; that is a section, with options such as {' and '.join(inside[:2])}"
    key = dotted.replace("-", "_").rpartition(".")[2]
    hint = "--help-all lists all"
    near = difflib.get_close_matches(dotted, [*names, *Config.model_fields], n=1, cutoff=0.8)
    if not near:
        # The section may be missing, or be another one: `lr`, `data.seed`.
        keys = [name.rpartition(".")[2] for name in names]
        closest = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
        near = [name for name in names if name.rpartition(".")[2] in closest]
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    # an option of another project: what stands for it here says more than a name that resembles it
    if answer := answer_to(dotted):
        hint = f"here: {answer}"
    return f"unknown option {printable(dotted)[:80]}; {hint}"

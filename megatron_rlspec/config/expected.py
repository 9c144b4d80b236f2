"""What a pydantic field accepts, in words: for messages, `--help` and documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

NOUNS = {int: "an integer", float: "a number", str: "text", bool: "true or false", list: "a list", dict: "an object"}
BOUNDS = ((Gt, "greater than"), (Ge, "at least"), (Lt, "less than"), (Le, "at most"))


def of_integers(field: FieldInfo) -> bool:
    """Return whether a field that holds a tuple holds integers."""
    return any(isinstance(value, int) for value in field.default)


def metavar(field: FieldInfo) -> str:
    """Return what a field accepts, in short for a command line: `INTEGER`, `{ce,tv}`."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if get_origin(kind) is tuple:
        return "INTEGER,..." if of_integers(field) else "TEXT,..."
    names: dict[Any, str] = {bool: "{true,false}", int: "INTEGER", float: "NUMBER"}
    return names.get(kind, "TEXT")


def expected(field: FieldInfo) -> str:
    """Return what a field accepts, in words: `an integer from 1 to 64`, `'ce' or 'tv'`."""
    choices = [_of_type(kind, rules) for kind, rules in _alternatives(field.annotation, tuple(field.metadata))]
    return " or ".join(dict.fromkeys(choices))


def _alternatives(kind: Any, rules: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Return (type, its bounds) of every member of a union."""
    if get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _alternatives(member, rules)
    elif get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        for note in notes:
            rules = (*rules, *(note.metadata if isinstance(note, FieldInfo) else [note]))
        yield from _alternatives(inner, rules)
    else:
        yield kind, rules


def _of_type(kind: Any, rules: tuple[Any, ...]) -> str:
    if kind is NoneType:
        return "null"
    if get_origin(kind) is Literal:
        *first, last = (repr(choice) if isinstance(choice, str) else json.dumps(choice) for choice in get_args(kind))
        return f"{', '.join(first)} or {last}" if first else last
    if get_origin(kind) in (tuple, list):
        inner = get_args(kind)[0]
        inner = get_args(inner)[0] if get_origin(inner) is Annotated else inner
        return f"a list of {'integers' if inner is int else 'texts'}"
    return NOUNS.get(get_origin(kind) or kind, "text") + _bounds(kind, rules)


def _bounds(kind: Any, rules: tuple[Any, ...]) -> str:
    found: dict[type, float] = {}
    for rule in rules:
        if isinstance(rule, (Gt, Ge, Lt, Le)):
            found[type(rule)] = getattr(rule, type(rule).__name__.lower())
    low, high = found.get(Ge), found.get(Le)
    if kind is int and Gt in found:
        low = found[Gt] + 1
    if low is not None and high is not None:
        if low == high:
            return f" equal to {low:g}"
        return f" from {low} to {high}" if kind is int else f" from {low:g} to {high:g}"
    parts = [f"{word} {found[rule]:g}" for rule, word in BOUNDS if rule in found]
    return " " + " and ".join(parts) if parts else ""


def shown(value: Any) -> str:
    """Format a value for a message, on one line of at most 80 characters."""
    if isinstance(value, (dict, list, tuple)):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    try:
        return short(repr(value))
    except ValueError:  # an integer of more digits than Python converts
        return "a huge integer"


def short(text: str) -> str:
    """Return at most 80 printable characters of a text."""
    plain = text if text.isprintable() else re.sub(r"\s+", " ", text).encode("ascii", "backslashreplace").decode()
    return plain if len(plain) <= 80 else f"{plain[:77]}..."

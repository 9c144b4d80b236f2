"""Texts that others wrote, in one line that a terminal may print. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def printable(text: str) -> str:
    """Escape what could drive a terminal, such as escape codes and line ends: ESC becomes `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown(value: Any, by: Callable[[Any], str] = repr) -> str:
    """Return a value of the user's in one line of at most 200 characters. Its own methods may fail."""
    try:
        text = by(value)
        return printable(" ".join(text.split())[:200])
    except BaseException as error:
        return f"({type(value).__name__}, whose {by.__name__}() raised {type(error).__name__})"


def one_line(error: BaseException) -> str:
    """Format an error as "Type: message", in one line."""
    return f"{type(error).__name__}: {shown(error, str)}".removesuffix(": ")

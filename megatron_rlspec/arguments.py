"""Command lines: a parser that prints one line for a mistake, and bounded values. Standard library only."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints one line for a mistake, without the usage, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with status 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def integer(low: int, high: int) -> Callable[[str], int]:
    """Return a type for `add_argument`: an integer from `low` to `high`."""

    def parse(text: str) -> int:
        return _integer(text, text, low, high)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """Return a type for `add_argument`: a finite number from `low` to `high`."""

    def parse(text: str) -> float:
        return _number(text, text, low, high)

    return parse


def integers(low: int, high: int, *, count: int | None = None, most: int = 64) -> Callable[[str], list[int]]:
    """Return a type: integers from `low` to `high` with commas; exactly `count` of them, or 1 to `most`."""

    def parse(text: str) -> list[int]:
        parts = _parts(text, count, most, f"integers from {low} to {high}")
        return [_integer(part, text, low, high) for part in parts]

    return parse


def distinct_integers(low: int, high: int, *, most: int = 64) -> Callable[[str], list[int]]:
    """Return a type: as `integers`, in ascending order, repeated ones once."""
    parse = integers(low, high, most=most)
    return lambda text: sorted(set(parse(text)))


def numbers(low: float, high: float, *, most: int = 64) -> Callable[[str], list[float]]:
    """Return a type: 1 to `most` finite numbers from `low` to `high` with commas."""

    def parse(text: str) -> list[float]:
        parts = _parts(text, None, most, f"numbers from {low:g} to {high:g}")
        return [_number(part, text, low, high) for part in parts]

    return parse


def _parts(text: str, count: int | None, most: int, wanted: str) -> list[str]:
    parts = text.split(",")
    if len(parts) > most or not all(part.strip() for part in parts) or (count and len(parts) != count):
        raise argparse.ArgumentTypeError(f"{_cut(text)!r}: expected {count or f'1 to {most}'} {wanted}, with commas")
    return parts


def _integer(part: str, text: str, low: int, high: int) -> int:
    try:
        value = int(part)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{_cut(text)!r}: expected integers from {low} to {high}")
    return value


def _number(part: str, text: str, low: float, high: float) -> float:
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and low <= value <= high):
        raise argparse.ArgumentTypeError(f"{_cut(text)!r}: expected numbers from {low:g} to {high:g}")
    return value


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."

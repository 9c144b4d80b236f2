"""What every key in `metrics.jsonl` means: for the report's hints and the documentation's page of metrics.

The table is `metric_names.toml` beside this file. Its head describes the fields.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

# Placeholders in keys of the table, and the pattern that each stands for.
PLACEHOLDERS = {"<d>": r"\d+", "<config>": r"\w+", "<part>": r"\w+"}
# values of `normal` that a number can be compared with, without sign or exponent; other values are prose
BOUND = re.compile(r"(below|above|at least|) ?(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Metric:
    """An entry of the table: a key, or a family of keys with a placeholder. Fields as in the table.

    act  "" if the value is for information only
    """

    key: str
    unit: str
    meaning: str
    normal: str
    act: str = ""

    def is_normal(self, value: float) -> bool | None:
        """Return whether a value is normal; None unless `normal` is a number, `below N`, `above N` or `at least N`.

        NaN is not normal then.
        """
        bound = BOUND.fullmatch(self.normal)
        if bound is None:
            return None
        limit = float(bound[2])
        match bound[1]:
            case "below":
                return value < limit
            case "above":
                return value > limit
            case "at least":
                return value >= limit
        return value == limit


def _read() -> list[tuple[re.Pattern[str], Metric]]:
    """Return the entries of the table in its order, each with the pattern of its keys."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    entries = []
    for key, fields in table.items():
        pattern = re.escape(key)
        # the placeholder is escaped by now, so its escaped form is replaced
        for placeholder, placeholder_pattern in PLACEHOLDERS.items():
            pattern = pattern.replace(re.escape(placeholder), placeholder_pattern)
        entries.append((re.compile(pattern), Metric(key, **fields)))
    return entries


# Read at import. `find` takes the first match, so in the table an exact key stands before a family that would match it,
# too.
_ENTRIES = _read()
METRICS = tuple(metric for _, metric in _ENTRIES)


def find(key: str) -> Metric | None:
    """Return the entry of a key of a record; None for an unknown key.

    A key such as `drafter/loss_2` has the entry of its family, `drafter/loss_<d>`.
    """
    for pattern, metric in _ENTRIES:
        if pattern.fullmatch(key):
            return metric
    return None

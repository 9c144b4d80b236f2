"""Look up what a key in `metrics.jsonl` means: for the hints of `commands/report/` and for `tools/metrics_page.py`.

The table is `metric_names.toml` beside this file. Its head describes the fields. `tests/run/test_run.py` fails if the
table lacks a key that its runs write.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

# Placeholder in keys of the table -> the pattern that it stands for: a draft's depth, a configuration such as "k3" or
# "off", a part of a reward.
PLACEHOLDERS = {"<d>": r"\d+", "<config>": r"\w+", "<part>": r"\w+"}
# Texts of `Metric.normal` with which a number can be compared. The limit has no sign and no exponent. All other texts
# are prose.
BOUND = re.compile(r"(below|above|at least|) ?(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Metric:
    """An entry of the table: a key, or a family of keys with a placeholder.

    unit     "" for a plain number or a sum
    meaning  what the number is
    normal   which values a healthy run shows
    act      what to do about other values; "" if the value is for information only
    """

    key: str
    unit: str
    meaning: str
    normal: str
    act: str = ""

    def is_normal(self, value: float) -> bool | None:
        """Return whether a value is normal; None if `normal` is prose.

        `normal` can be compared if it is a number, `below N`, `above N` or `at least N`. A value of NaN is not normal.
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


# Read at import. `find` takes the first match. So in the table an exact key must stand before a family that would match
# it, too.
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

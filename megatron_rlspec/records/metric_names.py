"""What every key in `metrics.jsonl` means: for the report's hints and the documentation's page of metrics."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

_FAMILY = {"<d>": r"\d+", "<config>": r"\w+"}  # what such a part of a key stands for


@dataclass(frozen=True)
class Metric:
    """A key, or a family of keys, of `metric_names.toml`, whose head describes the fields."""

    key: str
    unit: str
    meaning: str
    normal: str
    act: str = ""

    def is_normal(self, value: float) -> bool | None:
        """Compare a value with `normal` where that is `0`, `below N`, `above N` or `at least N`; None elsewhere."""
        bound = re.fullmatch(r"(?:(below|above|at least) )?(\d+(?:\.\d+)?)", self.normal)
        if bound is None:
            return None
        limit = float(bound[2])
        return {"below": value < limit, "above": value > limit, "at least": value >= limit}.get(
            bound[1] or "", value == limit
        )


def _pattern(key: str) -> re.Pattern[str]:
    fixed, place, _ = re.split("(<.*>|$)", key, maxsplit=1)
    return re.compile(re.escape(fixed) + _FAMILY.get(place, ""))


METRICS = tuple(
    Metric(key, **fields)
    for key, fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
)
_PATTERNS = [(_pattern(metric.key), metric) for metric in METRICS]


def find(key: str) -> Metric | None:
    """Return the entry of a record's key, also of a family such as `drafter/loss_2`; None for an unknown key."""
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(key)), None)

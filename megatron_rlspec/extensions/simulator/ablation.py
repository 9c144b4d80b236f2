"""What each part of three papers is worth: in its own paper's order, and as the last one, once all others are on.

RLHFSpec, figure 13: speculation, selection, reallocation. ReSpec, figure 14: distillation, adaptive server, overlap.
PAT, figure 10: changes of the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000  # of the bootstrap
ALL = "adaptive+kd+overlap+auto+tp"


@dataclass(frozen=True)
class Ratio:
    """A mean over seeds, with the bounds of its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values))).mean(1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        return cls(float(np.mean(values)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Part:
    """One part: policies without and with it, in its paper, and all parts of all papers but it."""

    name: str
    before: str
    after: str
    without: str


PARTS = (
    Part("RLHFSpec: speculation", "off", "k3", "off+auto+tp"),
    Part("RLHFSpec: selection", "k3", "adaptive", "k3+kd+overlap+auto+tp"),
    Part("RLHFSpec: reallocation", "adaptive", "adaptive+auto", "adaptive+kd+overlap+tp"),
    Part("ReSpec: distillation", "k3", "k3+kd", "adaptive+auto+tp"),
    Part("ReSpec: adaptive server", "k3+kd", "adaptive+kd", "k3+kd+overlap+auto+tp"),
    Part("ReSpec: overlap", "adaptive+kd", "adaptive+kd+overlap", "adaptive+kd+auto+tp"),
    Part("PAT: tensor-parallel size", "off", "off+tp", "adaptive+kd+overlap+auto"),
)


def policies() -> list[str]:
    """Return the names of all policies that the table needs, the base first."""
    return list(dict.fromkeys(name for p in PARTS for name in (p.before, p.after, p.without))) + [ALL]


def table(seconds: Mapping[str, Sequence[float]]) -> str:
    """Format a Markdown table from each policy's seconds, by seed."""

    def ratio(before: str, after: str) -> Ratio:
        return Ratio.of([a / b for a, b in zip(seconds[before], seconds[after], strict=True)])

    lines = [
        "| part | in its paper's order | as the last one | step of its paper so far |",
        "|---|---|---|---|",
    ]
    for part in PARTS:
        alone, last, so_far = ratio(part.before, part.after), ratio(part.without, ALL), ratio("off", part.after)
        lines.append(f"| {part.name} | {alone} x | {last} x | {so_far} x |")
    lines.append(f"| all together | | | {ratio('off', ALL)} x |")
    return "\n".join(lines)

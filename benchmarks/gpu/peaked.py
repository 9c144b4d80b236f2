"""Write the random model of `uneven`: the profiled one, with one likely successor of most tokens."""

from __future__ import annotations

from pathlib import Path

from gpu.figures import Figures
from gpu.model import write
from gpu.plan import Plan

SURE = 0.65  # of the tokens; the quickstart's policy after RL is as certain at as many
NOISE = 0.6  # of the drafter, which is then seldom right after the other tokens


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    write(plan, folder / "peaked", plan.shape.layers, figures, SURE, NOISE)

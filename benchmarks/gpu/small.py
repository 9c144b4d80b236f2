"""Write the random model of `variants`: the profiled one with fewer layers, so that several engines fit on the card."""

from __future__ import annotations

from pathlib import Path

from gpu.figures import Figures
from gpu.model import write
from gpu.plan import Plan


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    write(plan, folder / "small", plan.small_layers, figures)

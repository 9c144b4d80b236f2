"""Take RL steps with `rollout.staleness = 1`: the engine generates the next step's samples while this step trains.

On one card the engine and the trainer share its time, so this shows less than two cards would.
"""

from __future__ import annotations

from pathlib import Path

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from gpu.rl import CO_TRAINED, PLAIN, alternate, config_of, say, say_ratio


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    kinds = [CO_TRAINED, *plan.stale_steps * [PLAIN, CO_TRAINED]]  # the first step does not count
    config = config_of(plan, folder, figures.out.parent / "stale-run", len(kinds), staleness=1)
    seconds = alternate(config, serving.attached(folder)["widened"], kinds)
    say(figures, config, kinds, seconds)
    say_ratio(figures, kinds, seconds, CO_TRAINED, plan.stale_steps)

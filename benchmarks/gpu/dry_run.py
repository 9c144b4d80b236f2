"""Write the memory of each configuration of the part `train` to static.json, in GiB: a helper, not a part."""

from __future__ import annotations

import json
from pathlib import Path

from gpu.figures import GIB, Figures
from gpu.plan import Plan
from gpu.train import config_of, contestants, shape_of
from megatron_rlspec.train import stages


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    shape = shape_of(plan)
    static = {}
    for name, share in contestants(plan).items():
        for recompute in (False, True):
            config = config_of(plan, share, recompute)
            (stage,) = stages.build(config, shape, 1)
            label = f"{name}, recomputing" if recompute else name
            static[label] = stage.memory.total / GIB
    (folder / "static.json").write_text(json.dumps(static))

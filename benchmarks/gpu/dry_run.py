"""Write the memory of each configuration of the part `train` to static.json, in GiB: a helper, not a part."""

from __future__ import annotations

import json
from pathlib import Path

from gpu.figures import GIB, Figures
from gpu.plan import Plan
from gpu.train import configs_of, shape_of
from megatron_rlspec.train import dry_run


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    shape = shape_of(plan, plan.train_layers)
    static = {}
    for name, config in configs_of(plan).items():
        built = dry_run.stages(config, shape, 1, activations=True)
        static[name] = dry_run.memory(config, shape, built, 0, 1).total / GIB
    (folder / "static.json").write_text(json.dumps(static))

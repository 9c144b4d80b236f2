"""Run one part of `gpu_session.py` in this process: python gpu_part.py PART FOLDER OUT

FOLDER has plan.json, and the model if the part `model` has run. Figures are added to OUT. `gpu/` has the parts.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch
from gpu.figures import Figures
from gpu.plan import from_json

from megatron_rlspec import files
from megatron_rlspec.host import environment


def main() -> None:
    name, folder, out = sys.argv[1:]
    environment.prepare(os.environ)  # before a part imports Megatron, and with it Transformer Engine
    plan = from_json(files.read_json(Path(folder) / "plan.json"))
    if not plan.on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a CPU would need a C++ compiler
        torch.set_num_threads(1)
    importlib.import_module(f"gpu.{name}").run(plan, Path(folder), Figures(Path(out), name))


if __name__ == "__main__":
    main()

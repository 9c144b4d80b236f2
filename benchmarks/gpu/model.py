"""Write the random model that is profiled: its drafter is nearly right by construction (bigram_model.py)."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from bigram_model import checkpoint, worse_drafter

from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.models.hf_files import write_hf

SHARPNESS = 10.0  # about 1 nat a token, as language models have at temperature 1
LONGEST = 32768


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    write(plan, folder / "wide", plan.shape.layers, figures)


def write(plan: Plan, target: Path, layers: int, figures: Figures, sure: float = 0.0, noise: float = 0.0) -> None:
    """Write a model of `plan.shape` with so many layers; `sure` as of `checkpoint`, `noise` as of `worse_drafter`."""
    shape = plan.shape
    began = time.perf_counter()
    config, tensors = checkpoint(
        SHARPNESS,
        layers,
        shape.hidden,
        vocab=shape.vocab,
        heads=shape.heads,
        kv=shape.groups,
        ffn=shape.ffn,
        dtype=getattr(torch, plan.dtype),
        device=plan.device,
        sure=sure,
    )
    if noise:
        tensors |= worse_drafter(tensors, noise)
    write_hf(target, config | {"max_position_embeddings": LONGEST}, tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    figures.say("size of the model", size / 1e9, "GB", f"{layers} layers of {shape.hidden}")
    figures.say("making and writing it", time.perf_counter() - began, "s")

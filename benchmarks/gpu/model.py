"""Write random models whose drafter is nearly right by construction (bigram_model.py): a whole one, and a small one."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from bigram_model import checkpoint

from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.models.hf_files import write_hf

SHARPNESS = 10.0  # about 1 nat a token, as language models have at temperature 1
LONGEST = 32768


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    shape = plan.shape
    began = time.perf_counter()
    config, tensors = checkpoint(
        SHARPNESS,
        shape.layers,
        shape.hidden,
        vocab=shape.vocab,
        heads=shape.heads,
        kv=shape.groups,
        ffn=shape.ffn,
        dtype=getattr(torch, plan.dtype),
        device=plan.device,
    )
    config["max_position_embeddings"] = LONGEST
    write_hf(folder / "wide", config, tensors)
    small = dict(tensors)
    for layer in range(plan.small_layers, shape.layers):
        for name in tensors:
            if name.startswith(f"model.layers.{layer}."):
                del small[name]
    write_hf(folder / "small", config | {"num_hidden_layers": plan.small_layers}, small)
    size = sum(tensor.nbytes for tensor in tensors.values())
    figures.say("size of the model", size / 1e9, "GB", f"{shape.layers} layers of {shape.hidden}")
    figures.say("making and writing them", time.perf_counter() - began, "s")

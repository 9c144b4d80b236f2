"""Start an engine of 36 layers as a run would start it, and see what memory its graphs and its rounds leave.

The weights are SGLang's random ones: the checkpoint is a file without data, of the right size.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bigram_model import config_of
from synthetic import shapes

from gpu import serving
from gpu.figures import GIB, Figures, free_gib
from gpu.plan import Plan
from megatron_rlspec.config import Config
from megatron_rlspec.memory_estimate import RankMemory
from megatron_rlspec.rollout import placement
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.start import engine_arguments


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    requests, drafts, prefill = plan.fit
    directory = folder / "whole"
    config, parameters = without_data(plan, directory)
    settings = settings_of(plan, directory)
    layout = placement.GpuLayout()
    if plan.on_gpu:
        gpu = torch.cuda.get_device_properties(0).total_memory
        layout = layout_of(settings, config, parameters, gpu)
        note = f"of {gpu / GIB:.1f} GiB; placement leaves {layout.need.engine.working / GIB:.1f} GiB for the rest"
        figures.say("share of the memory for weights and KV cache", layout.mem_fraction, "", note)
    arguments = [*engine_arguments(settings, layout), "--device", plan.device, "--load-format", "dummy"]
    arguments += [serving.UNCACHED, "--log-level", "info", *plan.engine]
    before = free_gib()
    with serving.launched(plan, folder, figures, "engine", arguments, directory) as process:
        steps = ",".join(map(str, plan.steps))
        serving.say_captures(
            figures, "engine", f"{plan.whole.layers} layers, candidates {steps}, up to batch {requests}"
        )
        started = free_gib()
        _say_free(figures, "after the start", started, f"{before:.1f} GiB were free before")
        engine = SGLangEngine.of(process, timeout=300)
        for name, count, prompt, tokens in (
            (f"a round of {requests} x {drafts + 1}", requests, serving.PROMPT, 32),
            (f"a prefill of {prefill:,} tokens", 1, prefill, 2),
        ):
            with figures.attempt(name):
                serving.rollout(plan, engine, serving.asked(plan, count, prompt), tokens)
                now = free_gib()
                _say_free(figures, f"after {name}", now, f"{started - now:.1f} GiB less than after the start")


def layout_of(settings: Config, config: dict[str, Any], parameters: int, gpu: int) -> placement.GpuLayout:
    """Return the placement of an engine that has a GPU of `gpu` bytes to itself."""
    need = placement.needs(settings, config, gpu, parameters, 0, 1)
    no_trainer = RankMemory(weights=0, gradients=0, optimizer=0)
    engine_alone = replace(need, trainer=no_trainer)
    return placement.with_memory(placement.GpuLayout("apart", ("0",), (("0",),)), engine_alone)


def _say_free(figures: Figures, when: str, gib: float, note: str) -> None:
    if math.isnan(gib):
        figures.without(f"free {when}", "not on a CPU", "")
    else:
        figures.say(f"free {when}", gib, "GiB", note)


def settings_of(plan: Plan, directory: Path) -> Config:
    """Return the configuration of a run that launches one engine."""
    requests, drafts, _ = plan.fit
    sections: dict[str, Any] = {
        "model": {
            "path": str(directory),
            "dtype": plan.dtype,
            "max_length": 16384,
        },
        "spec": {"mode": "adaptive", "candidate_steps": list(plan.steps), "num_steps": drafts},
        "rollout": {"engine": "sglang", "max_running_requests": requests},
    }
    return Config.model_validate(sections)


def without_data(plan: Plan, directory: Path) -> tuple[dict[str, Any], int]:
    """Write a checkpoint of `plan.whole` whose tensors are holes in a file; return its config and its parameters."""
    shape = plan.whole
    config = config_of(
        shape.layers, shape.hidden, shape.vocab, shape.heads, shape.groups, shape.ffn, getattr(torch, plan.dtype)
    )
    config |= {"max_position_embeddings": 32768}
    size = getattr(torch, plan.dtype).itemsize
    header: dict[str, Any] = {}
    last = 0
    for name, dimensions in shapes(config).items():
        first, last = last, last + size * math.prod(dimensions)
        kind = {2: "BF16", 4: "F32"}[size]
        header[name] = {"dtype": kind, "shape": list(dimensions), "data_offsets": [first, last]}
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + last)
    return config, last // size

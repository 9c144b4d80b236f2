"""Time training steps on one rank: the policy alone, and with a drafter that learns from a part or all of the samples.

With and without recomputing the layers in the backward pass.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gpu.figures import Figures, forget_peak, peak_gib, timed
from gpu.plan import Plan
from megatron_rlspec import files
from megatron_rlspec.config import Config
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.run.drafter_training import chosen_samples
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import PackedBatch, Prompt, Sample

ALONE = "policy alone"
STEPS = 4  # the first of which does not count


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    expected = _dry_run_gib(folder)
    for recompute in (False, True):
        milliseconds = {}
        for name, share in contestants(plan).items():
            label = f"{name}, recomputing" if recompute else name
            with figures.attempt(label):
                milliseconds[name] = _step(plan, figures, label, share, recompute, expected[label])
            gc.collect()
        for name, taken in milliseconds.items():
            if name != ALONE and ALONE in milliseconds:
                what = f"{name}, recomputing" if recompute else name
                figures.say(f"{what}: added to the step", taken / milliseconds[ALONE] - 1, "", "of the policy's time")


def contestants(plan: Plan) -> dict[str, float]:
    """Return by name from which part of the samples the drafter learns; 0: it does not."""
    return {ALONE: 0.0, f"drafter.share {plan.train_share:g}": plan.train_share, "drafter.share 1": 1.0}


def _step(plan: Plan, figures: Figures, label: str, share: float, recompute: bool, gib: float) -> float:
    """Write ms and memory of a step, and return the ms."""
    forget_peak()
    shape = shape_of(plan)
    batches = packed(plan, share, shape["vocab_size"])
    trainer = Trainer(config_of(plan, share, recompute), shape)
    taken = [timed(lambda: trainer.train_step(batches, objective="grpo")) for _ in range(STEPS)]
    middle = statistics.median(taken[1:])
    size = f"{plan.train_layers} layers, {plan.train_sequences} samples of {plan.train_length}"
    figures.say(f"{label}: a step", middle, "ms", f"{size}; the first took {taken[0]:.0f}")
    why = "--dry-run: weights, gradients, optimizer, activations"
    figures.peak(label, peak_gib(), "workspaces come on top", (gib, gib, why))
    return middle


def _dry_run_gib(folder: Path) -> dict[str, float]:
    """Return what `--dry-run` says of each configuration, computed in a process that sees no GPU, as it needs."""
    command = [sys.executable, str(Path(__file__).parent.parent / "gpu_part.py"), "dry_run", str(folder)]
    subprocess.run([*command, str(folder / "unused")], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
    return files.read_json(folder / "static.json")


def config_of(plan: Plan, share: float, recompute: bool) -> Config:
    """Return the configuration of a step."""
    settings: dict[str, Any] = {
        "model": {"dtype": plan.dtype, "max_length": plan.train_length},
        "drafter": {"depth": plan.train_depth, "train": bool(share)},
        "parallel": {"recompute": recompute},
        "train": {"tokens_per_micro_batch": plan.train_sequences * plan.train_length},
        "rollout": {"max_new_tokens": plan.train_length // 2},
    }
    return Config.model_validate(settings)


def shape_of(plan: Plan) -> dict[str, Any]:
    """Return config.json of the trained model."""
    shape = plan.shape
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": plan.train_layers,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.hidden // shape.heads,
        "attention_bias": True,
        "hidden_act": "silu",
        "vocab_size": shape.vocab,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "initializer_range": 0.02,
    }


def packed(plan: Plan, share: float, vocab: int) -> list[PackedBatch]:
    """Pack random samples into one micro-batch. The drafter learns from a part of them, as a run chooses it."""
    count, length = plan.train_sequences, plan.train_length
    rng = np.random.default_rng(0)
    mask = (np.arange(length) >= length // 4).astype(np.float32)
    behaviour = np.where(mask, -np.log(vocab), 0).astype(np.float32)
    samples = []
    for i in range(count):
        tokens = rng.integers(0, vocab, length)
        samples.append(Sample(str(i), Prompt(i, tokens[: length // 4]), tokens, mask, behaviour))
    weights = None
    if 0 < share < 1:
        weights = chosen_samples([length] * count, share, (0,)).tolist()
    return pack(
        samples,
        depth=plan.train_depth,
        tokens_per_micro_batch=length * count,
        advantages=[1.0 if i % 2 else -1.0 for i in range(count)],
        drafter_weights=weights,
    )

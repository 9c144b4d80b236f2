"""Take three steps with and without the drafter, on one rank, and follow the rounds of one long response."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.figures import Figures, forget_peak, peak_gib, timed
from gpu.plan import Plan
from megatron_rlspec import files
from megatron_rlspec.config import Config
from megatron_rlspec.losses.predict import walk
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import PackedBatch, Prompt, Sample


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    shape = shape_of(plan, plan.train_layers)
    configs = configs_of(plan)
    expected = _static_gib(folder)
    batches = batches_of(plan, shape["vocab_size"])
    milliseconds = {}
    for name, config in configs.items():
        forget_peak()
        with figures.attempt(name):
            trainer = Trainer(config, shape)
            taken = [timed(lambda: trainer.train_step(batches, objective="grpo")) for _ in range(4)]  # noqa: B023
            milliseconds[name] = statistics.median(taken[1:])
            note = f"{plan.train_layers} layers, {plan.train_sequences} samples of {plan.train_length}"
            figures.say(f"{name}: a step", milliseconds[name], "ms", f"{note}; the first took {taken[0]:.0f}")
            why = "--dry-run: weights, gradients, optimizer, activations"
            figures.peak(name, peak_gib(), "workspaces come on top", (expected[name], expected[name], why))
        trainer = None
        gc.collect()
    if len(milliseconds) == 2:
        both, alone = milliseconds.values()
        figures.say("drafter's share of a step", (both - alone) / both, "", "difference of the two medians")
    rows = 8192 if plan.on_gpu else 64
    accept, mask = torch.rand(rows, 3, device=plan.device), torch.ones(rows, 3, device=plan.device)
    took = statistics.median(timed(lambda: walk(accept, accept, mask, (1, 2, 3))) for _ in range(plan.repeats))
    was = (220, 220, "measured on a busy CPU, by a loop on the host") if rows == 8192 else ()
    figures.say(f"predicting acceptance, one response of {rows}", took, "ms", "in each micro-batch, on the device", was)


def _static_gib(folder: Path) -> dict[str, float]:
    """Return what `--dry-run` says of each configuration, computed in a process that sees no GPU, as it needs."""
    command = [sys.executable, str(Path(__file__).parent.parent / "gpu_part.py"), "dry_run", str(folder)]
    subprocess.run([*command, str(folder / "unused")], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
    return files.read_json(folder / "static.json")


def configs_of(plan: Plan) -> dict[str, Config]:
    """Return the configurations that are compared."""
    configs = {}
    for name, trained in (("policy and drafter", True), ("policy alone", False)):
        settings = {
            "model": {"dtype": plan.dtype, "max_length": plan.train_length},
            "drafter": {"depth": plan.train_depth, "train": trained},
            "train": {"tokens_per_micro_batch": plan.train_sequences * plan.train_length},
            "rollout": {"max_new_tokens": plan.train_length // 2},
        }
        configs[name] = Config.model_validate(settings)
    return configs


def shape_of(plan: Plan, layers: int) -> dict[str, Any]:
    """Return config.json of the trained model."""
    shape = plan.shape
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
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


def batches_of(plan: Plan, vocab: int) -> list[PackedBatch]:
    """Return one step's micro-batches of random tokens."""
    return packed(plan.train_sequences, plan.train_length, plan.train_depth, vocab)


def packed(count: int, length: int, depth: int, vocab: int, seed: int = 0) -> list[PackedBatch]:
    """Pack `count` random samples of `length` tokens into one micro-batch."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(length) >= length // 4).astype(np.float32)
    samples = []
    for i in range(count):
        tokens = rng.integers(0, vocab, length)
        behaviour = np.where(mask, -np.log(vocab), 0).astype(np.float32)
        samples.append(Sample(str(i), Prompt(i, tokens[: length // 4]), tokens, mask, behaviour))
    advantages = [1.0 if i % 2 else -1.0 for i in range(len(samples))]
    return pack(samples, depth=depth, tokens_per_micro_batch=length * len(samples), advantages=advantages)

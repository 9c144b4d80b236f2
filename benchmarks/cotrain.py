"""Measure the cost of co-training: the policy's step with and without the drafter, side by side in one process.

    python benchmarks/cotrain.py [--quick] [--json FILE]

Overhead is (t_on - t_off) / t_off, divided by the drafter's share of FLOPs, F_drafter / F_policy (docs/design.md, Loss
cost). 1 means that a FLOP of the drafter takes as long as one of the policy. Steps alternate; figures are medians with
bootstrapped intervals. Gloo on a CPU, one rank, float32. Printed besides:

- forward passes of the policy per step, by the drafter's loss
- memory of the drafter's head, by the number of rows
- the share of the head's time that masking saves when one position in eight is trained
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import time
from pathlib import Path

import numpy as np
import torch

from megatron_rlspec.config import Config
from megatron_rlspec.losses.drafter import Student
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import PackedBatch, Prompt, Sample


def model(hidden: int, layers: int, vocab: int) -> dict:
    """Make config.json of a MiMo shape with 64-wide heads and a threefold feed-forward."""
    heads = hidden // 64
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 64,
        "attention_bias": True,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "initializer_range": 0.02,
    }


def flops(shape: dict, batch: PackedBatch, depth: int) -> tuple[float, float]:
    """Compute (policy, drafter) FLOPs of one step: matrix products and attention scores, forward and backward.

    Heads run on trained positions only. The drafter's head needs no weight gradient: 4 instead of 6 V H per position.
    """
    h = shape["hidden_size"]
    ffn = shape["intermediate_size"]
    vocab = shape["vocab_size"]
    q = shape["num_attention_heads"] * 64
    kv = shape["num_key_value_heads"] * 64
    lengths = np.diff(batch.cu_seqlens_padded.numpy()).astype(float)
    tokens = lengths.sum()
    layer = 6 * tokens * (h * (q + 2 * kv) + q * h + 3 * h * ffn) + 6 * q * (lengths**2).sum()
    policy = shape["num_hidden_layers"] * layer + 6 * vocab * h * float((batch.loss_mask != 0).sum())
    drafter = depth * (layer + 6 * tokens * 2 * h * h)
    drafter += 4 * vocab * h * sum(float((mask != 0).sum()) for mask in batch.drafter_mask)
    return policy, drafter


def batch_of(sequences: int, prompt: int, response: int, vocab: int, depth: int) -> list[PackedBatch]:
    """Pack random sequences of equal length into one micro-batch."""
    draw = np.random.default_rng(0)
    samples = []
    for i in range(sequences):
        tokens = draw.integers(0, vocab, prompt + response)
        mask = (np.arange(len(tokens)) >= prompt).astype(np.float32)
        samples.append(Sample(str(i), Prompt(i, tokens[:prompt]), tokens, mask, np.zeros(len(tokens), np.float32)))
    return pack(samples, depth=depth, tokens_per_micro_batch=sequences * (prompt + response))


def trainer(shape: dict, depth: int, **drafter: object) -> Trainer:
    """Build a trainer with freshly initialised weights: only time matters here."""
    options = {"model": {"dtype": "float32"}, "drafter": {"depth": depth, **drafter}}
    return Trainer(Config.model_validate(options), shape)


def interval(values: np.ndarray) -> list[float]:
    """Compute the 95 % interval of the median by bootstrap."""
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(values, (2000, len(values))), axis=1)
    return np.quantile(medians, [0.025, 0.975]).tolist()


def overhead(shape: dict, depth: int, repeats: int) -> dict:
    """Measure the step with and without the drafter, alternating."""
    batches = batch_of(8, 64, 192, shape["vocab_size"], depth)
    sides = {"off": trainer(shape, depth, train=False), "on": trainer(shape, depth)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name in sorted(sides, reverse=bool(repeat % 2)):
            began = time.perf_counter()
            sides[name].train_step(batches, objective="sft")
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    policy, drafter = flops(shape, batches[0], depth)
    ratio = (np.array(seconds["on"]) / np.array(seconds["off"]) - 1) / (drafter / policy)
    return {
        "depth": depth,
        "seconds_off": float(np.median(seconds["off"])),
        "seconds_on": float(np.median(seconds["on"])),
        "flop_share": drafter / policy,
        "overhead_over_flop_share": float(np.median(ratio)),
        "interval_95": interval(ratio),
    }


def policy_forwards(shape: dict, depth: int) -> dict[str, int]:
    """Count the policy's forward passes in one step with one micro-batch, by the drafter's loss."""
    counts = {}
    for loss in ("ce", "forward_kl"):
        side = trainer(shape, depth, loss=loss)
        calls = []
        side.policy.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        side.train_step(batch_of(2, 16, 48, shape["vocab_size"], depth), objective="sft")
        counts[loss] = len(calls)
    return counts


def learn(*rows: torch.Tensor) -> None:
    """Run the drafter's cross-entropy forward and backward: hidden states, output layer, labels, weights."""
    student = Student(*rows)
    student.learn_labels()
    student.finish()[0].backward()


def head_memory(rows: int, hidden: int, vocab: int) -> float:
    """Measure MiB that the drafter's loss takes beyond its inputs and its gradient. Call it in a process of its own."""
    torch.set_num_threads(2)
    states = torch.randn(rows, hidden, requires_grad=True)
    states.grad = torch.zeros(rows, hidden)
    head = torch.randn(vocab, hidden)
    labels = torch.zeros(rows, dtype=torch.int64)
    weight = torch.ones(rows)
    learn(states[:8], head, labels[:8], weight[:8])  # so that libraries allocate their buffers now
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learn(states, head, labels, weight)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def masking(hidden: int, vocab: int, repeats: int) -> dict[str, float]:
    """Measure which share of the head's time is saved if one row in eight is trained, and state the share of FLOPs."""
    rows = 2048
    states = torch.randn(rows, hidden, requires_grad=True)
    head = torch.randn(vocab, hidden)
    labels = torch.zeros(rows, dtype=torch.int64)
    everything = torch.ones(rows)
    few = (torch.arange(rows) % 8 == 0).float()
    ratios = []
    for _ in range(repeats + 1):
        spent = []
        for weight in (few, everything):
            began = time.perf_counter()
            learn(states, head, labels, weight)
            spent.append(time.perf_counter() - began)
        ratios.append(spent[0] / spent[1])
    return {"trained_share": 0.125, "flops_saved": 0.875, "time_saved": 1 - float(np.median(ratios[1:]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small shape and few repetitions")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    hidden, layers, vocab = (256, 4, 8192) if args.quick else (768, 12, 32768)
    repeats = 3 if args.quick else 9
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    shape = model(hidden, layers, vocab)
    cpu = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, threads: {threads}, float32"
    found: dict = {"conditions": f"{cpu}; {layers} layers of {hidden}, vocabulary {vocab}, 8 sequences of 64 + 192"}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        sizes = (1024, 4096)
        found["head_mib_by_rows"] = {rows: pool.apply(head_memory, (rows, hidden, vocab)) for rows in sizes}
    found["overhead"] = [overhead(shape, depth, repeats) for depth in ((1,) if args.quick else (1, 3))]
    found["policy_forwards_per_step"] = policy_forwards(model(128, 2, 512), 2)
    found["masking"] = masking(hidden, vocab, repeats)
    print(found["conditions"])
    for row in found["overhead"]:
        low, high = row["interval_95"]
        print(
            f"depth {row['depth']}: {row['seconds_off']:.2f} s without, {row['seconds_on']:.2f} s with the drafter; "
            f"FLOP share {row['flop_share']:.3f}; overhead over FLOP share "
            f"{row['overhead_over_flop_share']:.2f} [{low:.2f}, {high:.2f}]"
        )
    print("policy forwards a step:", ", ".join(f"{k} {n}" for k, n in found["policy_forwards_per_step"].items()))
    mib = ", ".join(f"{rows} rows {size:.0f} MiB" for rows, size in found["head_mib_by_rows"].items())
    print(f"drafter head beyond inputs and gradient: {mib} (all logits of 4096 rows: {4096 * vocab * 4 >> 20} MiB)")
    print(f"one position in eight trained: head time saved {found['masking']['time_saved']:.0%} (FLOPs 88 %)")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

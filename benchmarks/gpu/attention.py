"""Run the drafter's attention on one sequence, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gpu.figures import Figures, forget_peak, median, peak_gib
from gpu.plan import Plan
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.train.attention import PackedAttention, packed_sequences, rotary_factors


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    dtype, device = getattr(torch, plan.dtype), torch.device(plan.device)
    options = SimpleNamespace(
        attention_dropout=0.0,
        window_size=None,
        softmax_type="vanilla",
        kv_channels=plan.head_dim,
        multi_latent_attention=False,
    )
    core = PackedAttention(options, 1, None, "self", pg_collection=SimpleNamespace(cp=None))
    for heads, groups, tokens in plan.attention:
        name = f"one sequence of {tokens:,}"
        packed = packed_sequences(torch.tensor([0, tokens]), groups, 1, 0, device)
        cos, sin = rotary_factors(torch.arange(tokens, device=device), plan.head_dim, Rope(10000.0), dtype)
        packed = replace(packed, cos=cos, sin=sin)
        inputs = [
            torch.randn(tokens, count, plan.head_dim, device=device, dtype=dtype, requires_grad=True)
            for count in (heads, groups, groups)
        ]

        def forward(inputs: list[Any] = inputs, packed: Any = packed) -> Any:
            return core(*inputs, None, packed_seq_params=packed)

        note = f"{heads} and {groups} heads of {plan.head_dim}"
        with figures.attempt(f"forward, {name}"):
            forget_peak()
            figures.say(f"forward, {name}", median(plan.repeats, forward), "ms", note)
            figures.peak(f"forward, {name}", peak_gib(), note)
        with figures.attempt(f"backward, {name}"):
            forget_peak()
            both = median(plan.repeats, lambda: forward().sum().backward())
            figures.say(f"backward, {name}", both, "ms", f"{note}; forward and backward")
            figures.peak(f"backward, {name}", peak_gib(), note)

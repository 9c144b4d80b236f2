"""Make a synthetic MiMo of a given size, and describe the conditions of a run, for the benchmarks."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from megatron_rlspec.models.names import name_table
from megatron_rlspec.models.rows import Row


def model(gigabytes: float, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Make (config.json, tensors) of MiMo's shape and about that size. Above 3 GB layers are 3584 wide, as at 7B."""
    hidden = 512
    if gigabytes > 0.5:
        hidden = 1536
    if gigabytes > 3:
        hidden = 3584
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 512 if hidden % 512 == 0 else 4,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "vocab_size": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
    }
    size = torch.finfo(dtype).bits / 8
    per_layer = sum(_count(shape) for name, shape in shapes(config).items() if ".layers.0." in name) * size
    outside = sum(_count(shape) for name, shape in shapes(config).items() if ".layers.0." not in name) * size
    config["num_hidden_layers"] = max(1, round((gigabytes * 1e9 - outside) / per_layer))
    generator = torch.Generator().manual_seed(0)
    # Drawing a gigabyte of normals takes longer than pushing it, so blocks of one draw are repeated.
    draw = (torch.randn(1 << 20, generator=generator) * 0.02).to(dtype)
    tensors = {}
    for name, shape in shapes(config).items():
        flat = draw.repeat(-(-_count(shape) // draw.numel()))[: _count(shape)]
        tensors[name] = flat.view(shape).clone()
    return config, tensors


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a MiMo, by name."""
    h = config["hidden_size"]
    i = config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    by_end = {
        "embed_tokens.weight": (config["vocab_size"], h),
        "lm_head.weight": (config["vocab_size"], h),
        "q_proj.weight": (q, h),
        "k_proj.weight": (kv, h),
        "v_proj.weight": (kv, h),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "o_proj.weight": (h, q),
        "gate_proj.weight": (i, h),
        "up_proj.weight": (i, h),
        "down_proj.weight": (h, i),
        "input_proj.weight": (h, 2 * h),
    }
    rows: dict[str, Row] = name_table(config).rows
    names = [name for row in rows.values() for name in row.hf]
    return {name: next((shape for end, shape in by_end.items() if name.endswith(end)), (h,)) for name in names}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def conditions(**of_the_run: Any) -> dict[str, Any]:
    """Describe what the figures depend on: machine, load, and the benchmark's command line."""
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    return machine | {"torch": torch.__version__} | of_the_run

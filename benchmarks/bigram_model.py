"""Random models whose acceptance is known by construction: nearly bigram targets, drafters that compute the bigram.

The target's layers are computed in full but add little to the embedding, so its next token depends on the last one.
The scale of the head sets the entropy. The MTP layer passes on the embedding of the newest token, so its argmax is
nearly the target's. Noise mixed into that embedding sets how often it is not.
"""

from __future__ import annotations

import math
from typing import Any

import torch

VOCAB = 512
MTP = "model.mtp_layers.0."


def checkpoint(sharpness: float, layers: int, hidden: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Make (config.json, tensors) of a MiMo whose MTP layer passes on the embedding; its layers add little to it."""
    g, heads, kv, inter = torch.Generator().manual_seed(0), 4, 2, 3 * hidden

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * std

    one, unit = torch.ones(hidden), 1 / math.sqrt(hidden)
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, hidden, std=1.0),
        "model.norm.weight": one,
        "lm_head.weight": normal(VOCAB, hidden, std=sharpness * unit),
    }
    for prefix in [*(f"model.layers.{i}." for i in range(layers)), MTP]:
        for name, rows in (("q", hidden), ("k", hidden // heads * kv), ("v", hidden // heads * kv)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, hidden, std=unit)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(rows)
        tensors[prefix + "self_attn.o_proj.weight"] = normal(hidden, hidden, std=0.02 * unit)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = normal(inter, hidden, std=unit)
        tensors[prefix + "mlp.down_proj.weight"] = normal(hidden, inter, std=0.02 / math.sqrt(inter))
        tensors[prefix + "input_layernorm.weight"] = tensors[prefix + "post_attention_layernorm.weight"] = one
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{MTP}{name}.weight"] = one
    tensors[MTP + "input_proj.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    config = {
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "attention_bias": True, "hidden_size": hidden,
        "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads,
        "head_dim": hidden // heads, "num_key_value_heads": kv, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
        "hidden_act": "silu", "eos_token_id": None, "bos_token_id": None, "use_sliding_window": False,
        "torch_dtype": "float32",
    }  # fmt: skip
    return config, {name: tensor.clone() for name, tensor in tensors.items()}


def worse_drafter(tensors: dict[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    """Make MTP tensors that mix a share `noise` of random directions into what the drafter passes on; 1: only noise."""
    drafter = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith(MTP)}
    mix = drafter[MTP + "input_proj.weight"]
    hidden = len(mix)
    random = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(1)) / math.sqrt(hidden)
    mix[:, hidden:] = math.sqrt(1 - noise**2) * torch.eye(hidden) + noise * random
    return drafter

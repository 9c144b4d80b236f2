"""Make random models with a known acceptance: targets that are nearly bigram models, drafters that compute the bigram.

The target's layers are computed in full but add little to the embedding, so its next token depends on the last one.
The scale of the head sets the entropy. The MTP layer returns the embedding of the newest token, so its argmax is nearly
the target's. Noise mixed into that embedding lowers the acceptance.
"""

from __future__ import annotations

import math
from typing import Any

import torch

VOCAB = 512
MTP = "model.mtp_layers.0."


def checkpoint(
    sharpness: float,
    layers: int,
    hidden: int,
    *,
    vocab: int = VOCAB,
    heads: int = 4,
    kv: int = 2,
    ffn: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    sure: float = 0.0,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Make (config.json, tensors) of a MiMo whose MTP layer returns the embedding; its layers add little to it.

    `ffn` is three times `hidden` unless given. Numbers are drawn on `device`; tensors are on the CPU. After a share
    `sure` of the tokens one other token follows nearly always, as in a policy that RL has made certain.
    """
    g = torch.Generator(device).manual_seed(0)
    inter = ffn or 3 * hidden

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, device=device) * std).to("cpu", dtype)

    unit = 1 / math.sqrt(hidden)
    tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": normal(vocab, hidden, std=sharpness * unit),
    }
    g_cpu = torch.Generator().manual_seed(2)
    first = torch.randperm(vocab, generator=g_cpu)[: int(sure * vocab)]
    # Seven in ten lead to another sure token, so that a text has stretches of them.
    then = torch.where(
        torch.rand(len(first), generator=g_cpu) < 0.7,
        first[torch.randperm(len(first), generator=g_cpu)],
        torch.randint(vocab, (len(first),), generator=g_cpu),
    )
    above_all = 7 * sharpness / hidden  # the largest of 150,000 other logits is at 4.7 `sharpness`
    tensors["lm_head.weight"].index_add_(0, then, above_all * tensors["model.embed_tokens.weight"][first])
    for prefix in [*(f"model.layers.{i}." for i in range(layers)), MTP]:
        for name, rows in (("q", hidden), ("k", hidden // heads * kv), ("v", hidden // heads * kv)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, hidden, std=unit)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(rows, dtype=dtype)
        tensors[prefix + "self_attn.o_proj.weight"] = normal(hidden, hidden, std=0.02 * unit)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = normal(inter, hidden, std=unit)
        tensors[prefix + "mlp.down_proj.weight"] = normal(hidden, inter, std=0.02 / math.sqrt(inter))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=dtype)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{MTP}{name}.weight"] = torch.ones(hidden, dtype=dtype)
    halves = [torch.zeros(hidden, hidden, dtype=dtype), torch.eye(hidden, dtype=dtype)]
    tensors[MTP + "input_proj.weight"] = torch.cat(halves, 1)
    return config_of(layers, hidden, vocab, heads, kv, inter, dtype), tensors


def config_of(
    layers: int, hidden: int, vocab: int, heads: int, kv: int, ffn: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the config.json of a MiMo of this shape."""
    return {
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "attention_bias": True, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "head_dim": hidden // heads, "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
        "hidden_act": "silu", "eos_token_id": None, "bos_token_id": None, "use_sliding_window": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def worse_drafter(tensors: dict[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    """Make MTP tensors that mix a share `noise` of random directions into the drafter's output; 1: only noise."""
    drafter = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith(MTP)}
    mix = drafter[MTP + "input_proj.weight"]
    hidden = len(mix)
    random = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(1)) / math.sqrt(hidden)
    mix[:, hidden:] = math.sqrt(1 - noise**2) * torch.eye(hidden) + noise * random
    return drafter

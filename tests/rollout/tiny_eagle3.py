"""A tiny random Llama and an EAGLE-3 drafter for it, written as the two directories that SGLang loads."""

from __future__ import annotations

from typing import Any

import tiny_mimo
import torch
from torch import Tensor

from megatron_rlspec.models.config import MAPS, PREFIX

VOCAB = 160
WORDS = 120
HIDDEN = 64
LAYERS = 8  # so that SGLang's own choice of layers, 2, 4 and 5, is three different ones


def target_config(**changes: Any) -> dict[str, Any]:
    config = tiny_mimo.config(HIDDEN, LAYERS, heads=4, kv_heads=2, ffn=128, vocab=VOCAB)
    mimo = (
        "attention_bias",
        "num_nextn_predict_layers",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
    )
    config = {name: value for name, value in config.items() if name not in mimo}
    return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000} | changes


def drafter_config(**changes: Any) -> dict[str, Any]:
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "rope_theta": 1e6,
        "draft_vocab_size": WORDS,
    }
    return target_config(**own) | changes


def target_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a Llama, a Qwen2 or a Qwen3."""
    draw = _normal(seed)
    tensors = {
        "model.embed_tokens.weight": draw(config["vocab_size"], HIDDEN, std=0.5),
        "lm_head.weight": draw(config["vocab_size"], HIDDEN, std=0.3),
        "model.norm.weight": 1 + draw(HIDDEN, std=0.02),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= _block(draw, config, prefix, HIDDEN)
        for name in "qkv" if config["model_type"] == "qwen2" else "":
            width = len(tensors[f"{prefix}self_attn.{name}_proj.weight"])
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = draw(width)
        for name in "qk" if config["model_type"] == "qwen3" else "":
            tensors[f"{prefix}self_attn.{name}_norm.weight"] = 1 + draw(config["head_dim"])
    return tensors


def drafter_weights(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Return the tensors of the drafter's file. Its words are drawn at random from the target's."""
    draw = _normal(seed)
    words = config["draft_vocab_size"]
    ids = torch.randperm(config["vocab_size"], generator=torch.Generator().manual_seed(seed))[:words].sort().values
    tensors = _block(draw, config, "midlayer.", 2 * HIDDEN)
    tensors["midlayer.hidden_norm.weight"] = 1 + draw(HIDDEN, std=0.02)
    tensors["fc.weight"] = draw(HIDDEN, 3 * HIDDEN)
    tensors["norm.weight"] = 1 + draw(HIDDEN, std=0.02)
    tensors["lm_head.weight"] = draw(words, HIDDEN, std=0.3)
    for index in range(1, config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        tensors |= _block(draw, config, prefix, HIDDEN)
        tensors[f"{prefix}hidden_norm.weight"] = tensors.pop(f"{prefix}input_layernorm.weight")
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + draw(3 * HIDDEN, std=0.3)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{tap}.weight": 1 + draw(HIDDEN, std=0.3) for tap in range(3)}
    return tensors | maps(ids, config["vocab_size"])


def maps(ids: Tensor, vocab: int) -> dict[str, Tensor]:
    marked = torch.zeros(vocab, dtype=torch.bool)
    marked[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def _normal(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = 0.08) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    return draw


def _block(draw: Any, config: dict[str, Any], prefix: str, width: int) -> dict[str, Tensor]:
    heads = config["num_attention_heads"] * config["head_dim"]
    groups = config["num_key_value_heads"] * config["head_dim"]
    wide = config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (groups, width),
        "self_attn.v_proj": (groups, width),
        "self_attn.o_proj": (HIDDEN, heads),
        "mlp.gate_proj": (wide, HIDDEN),
        "mlp.up_proj": (wide, HIDDEN),
        "mlp.down_proj": (HIDDEN, wide),
    }
    tensors = {f"{prefix}{name}.weight": draw(*shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = 1 + draw(HIDDEN, std=0.02)
    return tensors


def agreeing(target: dict[str, Tensor], drafter: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make the target context-free, and the drafter draft its likeliest word, if that is among the drafter's.

    With outputs of attention and MLP at zero the target's logits are head(norm(embedding of x_t)). The drafter's one
    head attends to positions with the same token, by the channels that rotate slowest. It adds their embedding and, in
    a chain, takes away the drafter's last state, which the residual would carry on.
    """
    target = {name: tensor.clone() for name, tensor in target.items()}
    drafter = {name: tensor.clone() for name, tensor in drafter.items()}
    for name in target:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            target[name].zero_()
    slow = torch.zeros(HIDDEN, HIDDEN)
    half = HIDDEN // 2
    for channel in range(half // 2, half):
        slow[channel, channel] = slow[half + channel, half + channel] = 4.0
    nothing = torch.zeros(HIDDEN, HIDDEN)
    drafter["fc.weight"].zero_()
    drafter["midlayer.input_layernorm.weight"].fill_(1)
    drafter["midlayer.hidden_norm.weight"].fill_(1)
    drafter["midlayer.self_attn.q_proj.weight"] = torch.cat((slow, nothing), dim=1)
    drafter["midlayer.self_attn.k_proj.weight"] = torch.cat((slow, nothing), dim=1)
    drafter["midlayer.self_attn.v_proj.weight"] = torch.cat((torch.eye(HIDDEN), -torch.eye(HIDDEN)), dim=1)
    drafter["midlayer.self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    drafter["midlayer.mlp.down_proj.weight"].zero_()
    for name in drafter:
        if name.startswith("layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            drafter[name].zero_()
    drafter["norm.weight"] = target["model.norm.weight"].clone()
    ids = drafter["d2t"] + torch.arange(len(drafter["d2t"]))
    drafter["lm_head.weight"] = target["lm_head.weight"][ids].clone()
    return target, drafter


def pushed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the drafter's trained tensors under their names in a push."""
    return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items() if name not in MAPS}


write = tiny_mimo.write

"""The shapes that a config.json gives to the tensors of a model, by the last part of their names."""

from __future__ import annotations

from megatron_rlspec.models.config import DeepseekV3, Shared


def expected_shape(name: str, config: Shared) -> dict[str, int] | None:
    """Return the shape that config.json gives to a tensor, as key -> size; None if its name is not known."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    hidden = {"hidden_size": config.hidden_size}
    words = {"vocab_size": config.vocab_size}
    queries = {"num_attention_heads x head_dim": config.num_attention_heads * config.head_size}
    keys = {"num_key_value_heads x head_dim": config.groups * config.head_size}
    head = {"head_dim": config.head_size}
    wide = _mlp_width(name, config)
    routed = getattr(config, "num_experts", None)  # Qwen3-MoE's name
    experts: dict[str, int] = {"num_experts": routed or 0}
    if routed is None:
        experts = {"n_routed_experts": getattr(config, "n_routed_experts", None) or 0}
    shapes: dict[str, dict[str, int]] = {
        "embed_tokens": words | hidden,
        "lm_head": words | hidden,
        "head": words | hidden,
        "q_proj": queries | hidden,
        "k_proj": keys | hidden,
        "v_proj": keys | hidden,
        "o_proj": hidden | queries,
        "q_norm": head,
        "k_norm": head,
        "gate_proj": wide | hidden,
        "up_proj": wide | hidden,
        "down_proj": hidden | wide,
        "gate": experts | hidden,
        "input_proj": hidden | {"2 x hidden_size": 2 * config.hidden_size},
        "eh_proj": hidden | {"2 x hidden_size": 2 * config.hidden_size},
    }
    if isinstance(config, DeepseekV3):
        shapes |= _latent_attention(config)
    shape = shapes.get(part, hidden if part.endswith("norm") else None)
    if shape is None:
        return None
    if name.endswith((".bias", ".e_score_correction_bias")):
        return dict(list(shape.items())[:1])
    return shape


def _latent_attention(config: DeepseekV3) -> dict[str, dict[str, int]]:
    """Return the shapes of latent attention's tensors, by the last part of their names."""
    heads = config.num_attention_heads
    content = config.qk_nope_head_dim
    turned = config.qk_rope_head_dim
    hidden = {"hidden_size": config.hidden_size}
    low = {"q_lora_rank": config.q_lora_rank or 0}
    latent = {"kv_lora_rank": config.kv_lora_rank}
    whole = {"kv_lora_rank + qk_rope_head_dim": config.kv_lora_rank + turned}
    of_queries = heads * (content + turned)
    queries = {"num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)": of_queries}
    of_up = heads * (content + config.v_head_dim)
    up = {"num_attention_heads x (qk_nope_head_dim + v_head_dim)": of_up}
    return {
        "q_proj": queries | hidden,
        "q_a_proj": low | hidden,
        "q_a_layernorm": low,
        "q_b_proj": queries | low,
        "kv_a_proj_with_mqa": whole | hidden,
        "kv_a_layernorm": latent,
        "kv_b_proj": up | latent,
        "o_proj": hidden | {"num_attention_heads x v_head_dim": heads * config.v_head_dim},
    }


def _mlp_width(name: str, config: Shared) -> dict[str, int]:
    """Return the width of a dense MLP, of one expert, or of all shared experts together."""
    width = getattr(config, "moe_intermediate_size", None) or 0
    if ".mlp.experts." in name:
        return {"moe_intermediate_size": width}
    if ".shared_experts." in name:
        shared = getattr(config, "n_shared_experts", None) or 0
        return {"n_shared_experts x moe_intermediate_size": shared * width}
    return {"intermediate_size": config.intermediate_size or 0}

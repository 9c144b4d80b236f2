"""Tiny GLM4-MoE and DeepSeek-V3 with NextN drafters, in Transformers' classes and in megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from weight_oracles import mimo_checkpoint, mimo_logits, random_, rms

from megatron_rlspec.models.hf_files import read_hf, write_hf

SHARED = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
}
GLM4_MOE = {
    **SHARED,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
}
DEEPSEEK_V3 = {
    **SHARED,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# What megatron-core needs to compute the same function.
ROUTING = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "allgather",
}
OPTIONS = {
    "Glm4MoeForCausalLM": {**ROUTING, "qk_layernorm": True, "rotary_percent": 0.5},
    "DeepseekV3ForCausalLM": {
        **ROUTING,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
        "rope_type": "rope",
        "rotary_base": 10000,
        "rotary_scaling_factor": 1.0,
    },
}


IDS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": {},
    "tied": {"tie_word_embeddings": True},
    "glm4_moe": GLM4_MOE,
    "deepseek_v3": DEEPSEEK_V3,
}


def saved(config: dict[str, Any], directory: Path) -> dict[str, Tensor]:
    """Return the tensors that Transformers itself writes for this config, by its names on disk."""
    known = {k: v for k, v in config.items() if k != "architectures"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**known))
    model.save_pretrained(directory)
    return dict(read_hf(directory)[1])


def checkpoint(config: dict[str, Any], directory: Path, seed: int = 0) -> dict[str, Tensor]:
    """Return all tensors. The drafter's follow SGLang's deepseek_nextn.py: a decoder layer, norms, projection."""
    tensors = saved(config, directory / "names")
    last = config["num_hidden_layers"]
    h = config["hidden_size"]
    block = f"model.layers.{last - 1}."
    prefix = f"model.layers.{last}."
    tensors |= {prefix + n.removeprefix(block): t.clone() for n, t in tensors.items() if n.startswith(block)}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{norm}.weight"] = torch.empty(h)
    tensors[f"{prefix}eh_proj.weight"] = torch.empty(h, 2 * h)
    random_(tensors, seed)
    for name, tensor in tensors.items():
        if "e_score_correction_bias" in name:
            tensor *= 0.1  # moves some choices of experts, not all
    return tensors


def made(model: str, directory: Path) -> tuple[dict[str, Any], dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Return config.json, tensors, and the logits of `IDS`, of one of `CONFIGS`."""
    config = CONFIGS[model]
    if model in ("mimo", "tied"):
        config, tensors = mimo_checkpoint(**config)
        return config, tensors, mimo_logits(config, tensors, IDS)
    tensors = checkpoint(config, directory)
    return config, tensors, logits(config, tensors, IDS, directory)


@torch.no_grad()
def logits(config: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor, directory: Path) -> tuple[Tensor, Tensor]:
    """Compute target logits [B, L, V] and draft logits [B, L - 1, V] in Transformers, from checkpoints it loads."""
    prefix = f"model.layers.{config['num_hidden_layers']}."
    target = _load(config, {n: t for n, t in tensors.items() if not n.startswith(prefix)}, directory / "target")
    hidden = target.model(ids).last_hidden_state
    mtp, draft = _drafter(config, tensors, directory / "drafter")
    embedding = torch.nn.functional.embedding(ids[:, 1:], tensors["model.embed_tokens.weight"])
    drafted = draft.model(inputs_embeds=_joined(config, mtp, embedding, hidden[:, :-1])).last_hidden_state
    return target.lm_head(hidden), target.lm_head(drafted)


def _load(config: dict[str, Any], tensors: dict[str, Tensor], directory: Path) -> torch.nn.Module:
    write_hf(directory, config, {n: t.clone() for n, t in tensors.items()})
    model, told = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
    return model.eval()


@torch.no_grad()
def chains(config: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor, hidden: Tensor, directory: Path) -> Tensor:
    """Draft depths 1 to 3 from every position of `ids [L]`, as an engine does; return the logits `[3, L - 3, V]`.

    hidden  `[L, H]`, the target's. Each depth reads the text's next token and the last depth's output, behind the
            drafter's own inputs of all positions before.
    """
    mtp, draft = _drafter(config, tensors, directory)
    embedded = torch.nn.functional.embedding(ids, tensors["model.embed_tokens.weight"])
    first = _joined(config, mtp, embedded[1:], hidden[:-1])
    out = []
    for t in range(len(ids) - 3):
        inputs = first[: t + 1]
        states = []
        for depth in (1, 2, 3):
            state = draft.model(inputs_embeds=inputs[None]).last_hidden_state[0, -1]
            states.append(state)
            if depth < 3:
                more = _joined(config, mtp, embedded[t + 1 + depth], state)
                inputs = torch.cat([inputs, more[None]])
        out.append(draft.lm_head(torch.stack(states)))
    return torch.stack(out, 1)


def _drafter(
    config: dict[str, Any], tensors: dict[str, Tensor], directory: Path
) -> tuple[dict[str, Tensor], torch.nn.Module]:
    """Return the drafter's tensors, and a model of its layer alone whose final norm is the drafter's."""
    prefix = f"model.layers.{config['num_hidden_layers']}."
    mtp = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    alone = {f"model.layers.0.{n}": t for n, t in mtp.items() if n.startswith(("self_attn", "mlp", "input_", "post_"))}
    alone["model.norm.weight"] = mtp["shared_head.norm.weight"]
    alone |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return mtp, _load({**config, "num_hidden_layers": 1, "first_k_dense_replace": 0}, alone, directory)


def _joined(config: dict[str, Any], mtp: dict[str, Tensor], embedding: Tensor, hidden: Tensor) -> Tensor:
    eps = config["rms_norm_eps"]
    pair = torch.cat((rms(embedding, mtp["enorm.weight"], eps), rms(hidden, mtp["hnorm.weight"], eps)), dim=-1)
    return pair @ mtp["eh_proj.weight"].T

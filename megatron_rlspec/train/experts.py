"""Mixtures of experts of GLM4-MoE and Qwen3-MoE: Megatron's options for a config.json, and the routers' biases.

`model.py` calls `problems` and `options`. `shards.py`, `checkpoint.py` and `reference.py` take the biases into account.

A router of GLM4-MoE chooses its experts by sigmoid(logits) + bias and weighs them by the sigmoids alone (DeepSeek-V3,
arXiv 2412.19437, section 2.1.2). The bias is a buffer, which RL leaves as it is. There is no balancing loss, as in
slime's recipes. A router of Qwen3-MoE chooses by softmax, and has no bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from megatron_rlspec.config import ParallelConfig


def count(hf_config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer; 0 for a dense model."""
    return hf_config.get("n_routed_experts") or hf_config.get("num_experts") or 0


def options(hf_config: Mapping[str, Any], parallel_size: int, dtype: str) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` about experts; {} for a dense model.

    parallel_size  parallel.expert
    dtype          model.dtype

    Call it only if `problems` yields nothing. `model.transformer_config` adds the fields to the others.
    """
    if not count(hf_config):
        return {}
    layers = hf_config["num_hidden_layers"]
    dense = hf_config.get("first_k_dense_replace", 0)  # the first layers, which have no experts
    width = hf_config["moe_intermediate_size"]
    shared = hf_config.get("n_shared_experts") or 0
    router = _sigmoid_router(hf_config) if _has_bias(hf_config) else _softmax_router(hf_config)
    return {
        "num_moe_experts": count(hf_config),
        "expert_model_parallel_size": parallel_size,
        "moe_ffn_hidden_size": width,
        # Megatron makes one wide expert of all shared ones; None: there is none.
        "moe_shared_expert_intermediate_size": width * shared or None,
        # For each layer, 1 with experts and 0 without
        "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
        "moe_router_topk": hf_config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "none",
        # At least float32: rounding to 16 bits can change which experts are chosen.
        "moe_router_dtype": "fp64" if dtype == "float64" else "fp32",
        **router,
    }


def _sigmoid_router(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of GLM4-MoE's routers."""
    groups = _num_groups(hf_config)
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": hf_config["topk_group"] if groups else None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # so that Megatron does not change the bias
        "moe_router_topk_scaling_factor": hf_config.get("routed_scaling_factor", 1.0),
    }


def _softmax_router(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Qwen3-MoE's routers."""
    # norm_topk_prob: the softmax over all experts, scaled so that the chosen ones sum to 1. A softmax over the chosen
    # experts alone is the same.
    return {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
    }


def problems(hf_config: Mapping[str, Any], parallel: ParallelConfig) -> Iterator[str]:
    """Yield an error text for every setting of experts that cannot be trained in this layout.

    `model.check_model` raises the first. Without this check Megatron would ignore some of these settings.
    """
    total = count(hf_config)
    if not total:
        if parallel.expert > 1:
            yield f"parallel.expert={parallel.expert}, but this model is dense"
        return
    if total % parallel.expert:
        yield f"{total} experts are no multiple of parallel.expert={parallel.expert}"
    width = hf_config.get("moe_intermediate_size")
    chosen = hf_config.get("num_experts_per_tok", 0)
    if not isinstance(width, int):
        yield "no moe_intermediate_size, the width of an expert"
    elif width % parallel.tensor:
        yield f"moe_intermediate_size={width} is no multiple of tensor={parallel.tensor}"
    # Megatron's sigmoid router does not normalise the weight of a single expert. Softmax routers are refused alike.
    if chosen < 2:
        yield f"num_experts_per_tok={chosen}: at least 2 are supported, whose weights are normalised"
    if _has_bias(hf_config) and not hf_config.get("norm_topk_prob", True):
        yield "norm_topk_prob=false: only normalised weights are supported"
    # The model rates a group by its best 2 experts. Megatron rates it by its best (chosen // topk_group).
    if _num_groups(hf_config) and chosen != 2 * hf_config.get("topk_group", 1):
        yield f"num_experts_per_tok={chosen} with groups: only 2 for each of topk_group are supported"
    # Megatron's MoE layer raises otherwise, but only in the first forward pass of training.
    if parallel.tensor > 1 and not parallel.sequence:
        yield f"experts under parallel.tensor={parallel.tensor} need parallel.sequence=true"


def biases(module: nn.Module) -> dict[str, Tensor]:
    """Return the routers' biases by the module's names: the buffers themselves, not copies.

    They belong to the weights that are loaded, exported and saved, but `named_parameters` leaves them out. Megatron's
    router gives them the name `expert_bias`. {} for Qwen3-MoE and for a dense model.
    """
    return {
        name: buffer for name, buffer in module.named_buffers() if name.endswith(".expert_bias")
    }


def _has_bias(hf_config: Mapping[str, Any]) -> bool:
    """Return whether the routers choose by sigmoid and bias; otherwise by softmax."""
    return bool(hf_config.get("n_routed_experts"))


def _num_groups(hf_config: Mapping[str, Any]) -> int | None:
    """Return the number of groups of experts, of which a router first chooses `topk_group`; None without groups."""
    groups = hf_config.get("n_group", 1)
    return groups if groups > 1 else None

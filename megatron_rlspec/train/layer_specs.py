"""Megatron's specs of the layers of policy and drafters: Transformer Engine's on a GPU, the local ones elsewhere.

A spec names the class of each module of a layer. Megatron's functions return specs, and this module replaces single
classes in them. `model.py` builds the policy by `decoder_spec`, and `drafter.py` builds drafters by `drafter_spec` and
`eagle3_spec`.

Names of parameters follow from the classes in a spec. `models/names.py` has the names for Transformer Engine's and for
local specs: if a change here changes a name, change that table, too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rlspec.train import runtime
from megatron_rlspec.train.attention import PackedAttention
from megatron_rlspec.train.latent import LatentAttention
from megatron_rlspec.train.layers import DoubleInput, NormBesideEmbedding, RMSNorm, SwiGLU


def decoder_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return specs of the policy's layers and final norm on this pipeline stage.

    Core attention is Transformer Engine's where that is in use, else `PackedAttention`. Layers of one kind share one
    spec object.
    """
    first = get_transformer_layer_offset(config)
    count = get_num_layers_to_build(config)
    # For each layer of the model, over all stages, 1 with experts and 0 with a plain MLP. Each kind needs one spec.
    with_experts = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = {}
    for experts in set(with_experts):
        specs[experts], norm = _layer_spec(config, experts=bool(experts))
        if not runtime.has_transformer_engine():
            specs[experts].submodules.self_attention.submodules.core_attention = PackedAttention
    layers = [specs[experts] for experts in with_experts[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def drafter_spec(config: TransformerConfig) -> MultiTokenPredictionBlockSubmodules:
    """Return specs of the drafter's MTP layers, with experts if the model has any, like its last layer.

    Their core attention is `PackedAttention` on every device: no other one is chain-exact (`drafter.py`).
    """
    layer, norm = _layer_spec(config, experts=bool(config.num_moe_experts))
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    mtp = get_mtp_layer_spec(layer, use_transformer_engine=runtime.has_transformer_engine())
    # The norms of embedding, hidden state and output are those of the layer. Megatron would take WrappedTorchNorm for
    # local layers, which refuses sequence parallelism.
    mtp.submodules.enorm = mtp.submodules.hnorm = mtp.submodules.layer_norm = norm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[mtp] * config.mtp_num_layers)


def _layer_spec(config: TransformerConfig, *, experts: bool) -> tuple[ModuleSpec, type]:
    """Return the spec of one transformer layer, with experts or a plain MLP, and the class of its norm.

    The spec is new: callers set its core attention.
    """
    shared: dict[str, Any] = {
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "num_experts": config.num_moe_experts if experts else None,
    }
    norm: type = RMSNorm
    if runtime.has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        # A copy, because callers change the spec.
        layer = copy.deepcopy(
            get_gpt_layer_with_transformer_engine_spec(**shared, moe_grouped_gemm=experts)
        )
    else:
        layer = _local_layer_spec(shared)
    if config.multi_latent_attention:
        layer.submodules.self_attention.module = LatentAttention
    return layer, norm


def eagle3_spec(*, first: bool) -> ModuleSpec:
    """Return the spec of an EAGLE-3 drafter's layer.

    first  the drafter's first layer, whose attention reads embedding and hidden state side by side

    It is a local spec on every device: Transformer Engine's fused norm and projection takes the hidden state only.
    """
    layer = _local_layer_spec({"qk_layernorm": False, "num_experts": None})
    if first:
        layer.submodules.input_layernorm = NormBesideEmbedding
        layer.submodules.self_attention.submodules.linear_qkv = DoubleInput
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer


def _local_layer_spec(shared: Mapping[str, Any]) -> ModuleSpec:
    """Return Megatron's local spec of one layer with the norms and the activation of `layers.py`.

    shared  arguments of Megatron's function, without `moe_grouped_gemm` and `normalization`; "num_experts" is None for
            a plain MLP
    """
    experts = shared["num_experts"] is not None
    # A copy, because this changes the spec.
    layer = copy.deepcopy(
        get_gpt_layer_local_spec(**shared, moe_grouped_gemm=False, normalization="RMSNorm")
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    mlp = _submodules(layer.submodules.mlp)
    if experts:
        _submodules(mlp.experts).activation_func = SwiGLU
        _submodules(mlp.shared_experts).activation_func = SwiGLU
    else:
        mlp.activation_func = SwiGLU
    if shared["qk_layernorm"]:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = RMSNorm
        if shared.get("multi_latent_attention"):
            attention.kv_layernorm = RMSNorm
        else:
            attention.k_layernorm = RMSNorm
    return layer


def _submodules(spec: ModuleSpec | functools.partial) -> Any:
    """Return the submodules of a layer spec. In Megatron's main branch (0.20) some specs are partial calls."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules

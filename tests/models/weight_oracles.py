"""Tiny models in Transformers' own classes, their drafters written after SGLang's, and the same in megatron-core.

Nothing here reads the name tables. Transformers loads a checkpoint by its own rules. Each drafter below places its
tensors by hand, after the SGLang class that its docstring names.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from megatron_rlspec.config import ParallelConfig
from megatron_rlspec.train import runtime

MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "attention_bias": True,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float32",
}


def qwen2_model(config: dict[str, Any], layers: int | None = None) -> torch.nn.Module:
    plain = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    plain["num_hidden_layers"] = layers or config["num_hidden_layers"]
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**plain)).eval()


def spelling() -> str:
    """Return the kind of layer specs that `megatron_model` has."""
    return "te" if runtime.has_transformer_engine() else "local"


def mtp_block() -> str:
    """Return the name in memory of the layer inside Megatron's MTP layer; 0.17 renamed it."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

    known = MultiTokenPredictionLayerSubmodules.__annotations__
    return "mtp_model_layer" if "mtp_model_layer" in known else "transformer_layer"


def random_(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Redraw every tensor, norms around 1, so that no initial value hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * 0.2
        tensors[name] = (noise + 1 if "norm" in name else noise).to(tensor.dtype)
    return tensors


def mimo_checkpoint(seed: int = 0, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors of a tiny MiMo: the block has Transformers' names, the drafter SGLang's."""
    config = {**MIMO, **changes}
    tensors = dict(qwen2_model(config).state_dict())
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    prefix = "model.mtp_layers.0."
    h = config["hidden_size"]
    if config["num_nextn_predict_layers"]:
        block = qwen2_model(config, 1).model.layers[0].state_dict()
        tensors |= {prefix + name: tensor for name, tensor in block.items()}
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.empty(h)
        tensors[f"{prefix}input_proj.weight"] = torch.empty(h, 2 * h)
    return config, random_(tensors, seed)


@torch.no_grad()
def mimo_logits(config: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute target logits [B, L, V], and draft logits [B, L - 1, V] of (h_t, x_{t+1}) after SGLang's mimo_mtp.py."""
    target = qwen2_model(config)
    own = {name: t for name, t in tensors.items() if "mtp_layers" not in name}
    if config["tie_word_embeddings"]:
        own["lm_head.weight"] = own["model.embed_tokens.weight"]
    target.load_state_dict(own)
    hidden = target.model(ids).last_hidden_state

    prefix = "model.mtp_layers.0."
    mtp = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    block = qwen2_model(config, 1).model
    inside = {f"layers.0.{name}": t for name, t in mtp.items() if name.startswith(("self_attn", "mlp"))}
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        inside[f"layers.0.{norm}"] = mtp[norm]
    inside["norm.weight"] = mtp["final_layernorm.weight"]
    missing, unexpected = block.load_state_dict(inside, strict=False)
    assert missing == ["embed_tokens.weight"] and not unexpected

    embedding = torch.nn.functional.embedding(ids[:, 1:], tensors["model.embed_tokens.weight"])
    embedding[:, 0] = 0
    halves = rms(hidden[:, :-1], mtp["hidden_layernorm.weight"]), rms(embedding, mtp["token_layernorm.weight"])
    inputs = torch.cat(halves, dim=-1) @ mtp["input_proj.weight"].T
    return target.lm_head(hidden), target.lm_head(block(inputs_embeds=inputs).last_hidden_state)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def megatron_model(config: dict[str, Any], parallel: ParallelConfig | None = None, **options: Any) -> torch.nn.Module:
    """Build this rank's plain megatron-core GPTModel with its MTP block; Transformer Engine's specs if installed."""
    parallel = parallel or ParallelConfig()
    runtime.init_distributed(parallel)
    engine = runtime.has_transformer_engine()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim"),
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mtp_num_layers": config["num_nextn_predict_layers"] or None,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "pipeline_dtype": torch.float32,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "use_cpu_initialization": True,
        "moe_grouped_gemm": engine and "num_moe_experts" in options,
    }
    rotary_percent = options.pop("rotary_percent", 1.0)
    kind = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    transformer = kind(**{**settings, **options})
    if transformer.num_moe_experts:
        from megatron.core.transformer.moe import moe_utils

        moe_utils.te_general_gemm = None  # 0.16.1 does not define it without Transformer Engine
        spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=engine, normalization="RMSNorm")
    elif engine:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=transformer.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=transformer.qk_layernorm)
    if transformer.multi_latent_attention and not engine:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _latent_core_attention()
    mtp = transformer.mtp_num_layers and get_gpt_mtp_block_spec(transformer, spec, use_transformer_engine=engine)
    return GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=config["rope_theta"],
        rotary_percent=rotary_percent,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        mtp_block_spec=mtp or None,
    ).eval()


def _latent_core_attention() -> type:
    """Return megatron's plain attention class, but with arguments for latent attention's key and value widths."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.HAVE_TE = False  # 0.16.1 sets it without Transformer Engine, and then lacks its class

    class LatentCoreAttention(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    return LatentCoreAttention


@torch.no_grad()
def megatron_logits(model: torch.nn.Module, ids: Tensor, zero_first: bool) -> tuple[Tensor, Tensor] | None:
    """Compute target logits [B, L, V] and draft logits [B, L - 1, V] of MTP layer 0; None before the last stage.

    `zero_first`: MiMo's rule that the first embedding a drafter reads is 0. megatron does not have it.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    position_ids = torch.arange(ids.shape[1]).expand_as(ids)
    config = model.config
    group = parallel_state.get_pipeline_model_parallel_group()
    if not parallel_state.is_pipeline_first_stage():
        arrived = torch.empty(ids.shape[1], ids.shape[0], config.hidden_size)
        dist.recv(arrived, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
        model.set_input_tensor(arrived)
    last = model.post_process
    mtp = model.mtp_process
    depth = config.mtp_num_layers
    model.post_process, model.mtp_process, config.mtp_num_layers = False, False, None
    hidden = model(ids, position_ids, None)
    model.post_process, model.mtp_process, config.mtp_num_layers = last, mtp, depth
    if not last:
        dist.send(hidden, parallel_state.get_pipeline_model_parallel_next_rank(), group=group)
        return None

    def embed(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        out = model.embedding(input_ids=input_ids, position_ids=position_ids)
        if zero_first:
            out[0] = 0
        return out

    rotary = None if config.multi_latent_attention else model.rotary_pos_emb(ids.shape[1])
    both = model.mtp(input_ids=ids, position_ids=position_ids, hidden_states=hidden, attention_mask=None,
                     rotary_pos_emb=rotary, embedding=embed)  # fmt: skip
    drafted = both.chunk(depth + 1)[1]
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits = [model.output_layer(h, weight=weight)[0] for h in (hidden, drafted)]
    target, draft = (gather_from_tensor_model_parallel_region(x).transpose(0, 1) for x in logits)
    return target, draft[:, :-1]


def one_rank(function: Any, *args: Any) -> Any:
    """Call a function that uses megatron in a process of its own, since a job changes its process."""
    from train_ranks import on_ranks

    (result,) = on_ranks(1, function, *args)
    return result


def echo_checkpoint(version: int = 0, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Make a one-layer MiMo whose drafter repeats the target's layer, and so drafts almost what the target generates.

    The drafter reads the embedding half of its input only, and embeddings have unit RMS, so that its norm changes
    nothing: it computes the target's function of every token but the first. Attention, MLP and head all matter, hence a
    mistake in any tensor costs acceptance. Accept length is about 2.5 under 3 steps at temperature 1. `version` moves
    every tensor a little, as training does.
    """
    config, tensors = mimo_checkpoint(num_hidden_layers=1, num_attention_heads=4, **changes)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        scale = 1.0 if name == "lm_head.weight" else 0.2 if name.endswith(("v_proj.weight", "o_proj.weight")) else 0.1
        tensors[name] = torch.ones_like(tensor) if "norm" in name else _normal(tensor.shape, generator) * scale
    generator = torch.Generator().manual_seed(1000 + version)
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.002 * version * _normal(tensor.shape, generator)
    embedding = tensors["model.embed_tokens.weight"]
    prefix = "model.mtp_layers.0."
    h = config["hidden_size"]
    tensors["model.embed_tokens.weight"] = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt()
    for name in [name for name in tensors if name.startswith("model.layers.0.")]:
        tensors[prefix + name.removeprefix("model.layers.0.")] = tensors[name].clone()
    tensors[f"{prefix}final_layernorm.weight"] = tensors["model.norm.weight"].clone()
    halves = torch.zeros(h, h), torch.eye(h) * (1 + 0.002 * version)
    tensors[f"{prefix}input_proj.weight"] = torch.cat(halves, 1)
    return config, {name: tensor.contiguous() for name, tensor in tensors.items()}


def _normal(shape: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)

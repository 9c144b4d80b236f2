"""config.json of published models that people fine-tune, by their names on the Hub, with keys that change nothing."""

from __future__ import annotations

from typing import Any


def _dense(hidden: int, mlp: int, layers: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    common = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
    return (
        sizes | {"num_attention_heads": heads, "num_key_value_heads": groups, "attention_dropout": 0.0} | common | more
    )


def _llama(*sizes: int, factor: float = 8.0, tied: bool = False, **more: Any) -> dict[str, Any]:
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    stated = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "max_position_embeddings": 131072,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": scaling,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "vocab_size": 128256,
    }
    return _dense(*sizes, **{**stated, **more})


def _llama2(*sizes: int, **more: Any) -> dict[str, Any]:
    plain = {"rope_scaling": None, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 32000}
    return _llama(*sizes, **{**plain, "max_position_embeddings": 4096, **more})


def _smol(*sizes: int, **more: Any) -> dict[str, Any]:
    own = {"is_llama_config": True, "rope_interleaved": False, "pad_token_id": 2, "vocab_size": 49152}
    own["transformers.js_config"] = {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}
    return _llama2(*sizes, tied=True, **{**own, "max_position_embeddings": 8192, "rope_theta": 100000, **more})


def _qwen2(*sizes: int, vocab: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    stated = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "max_position_embeddings": 32768,
        "max_window_layers": sizes[2],
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "use_mrope": False,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
    }
    return _dense(*sizes, **{**stated, **more})


def _qwen3(*sizes: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    return _dense(
        *sizes,
        **{
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "max_window_layers": sizes[2],
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": tied,
            "vocab_size": 151936,
            **more,
        },
    )


def _qwen3_moe(*sizes: int, width: int, **more: Any) -> dict[str, Any]:
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return _qwen3(*sizes, **{**names, **experts, **more})


def _glm(*sizes: int, experts: int, width: int, dense: int, norm: bool, scale: float, context: int) -> dict[str, Any]:
    return _dense(
        *sizes,
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        attention_bias=True,
        eos_token_id=[151329, 151336, 151338],
        pad_token_id=151329,
        first_k_dense_replace=dense,
        head_dim=128,
        max_position_embeddings=context,
        moe_intermediate_size=width,
        n_group=1,
        n_routed_experts=experts,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_nextn_predict_layers=1,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=1000000,
        routed_scaling_factor=scale,
        tie_word_embeddings=False,
        topk_group=1,
        use_qk_norm=norm,
        vocab_size=151552,
    )


def _deepseek(*sizes: int, **more: Any) -> dict[str, Any]:
    stated = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "ep_size": 1,
        "kv_lora_rank": 512,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "pretraining_tp": 1,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    }
    return _dense(*sizes, **{**stated, **more})


_CODER = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "rope_theta": 10000000}
_LONG = {"max_position_embeddings": 262144, "rope_theta": 5000000}
_MATH = {"max_position_embeddings": 4096, "rope_theta": 10000, "sliding_window": 4096}
_DISTILLED = {"bos_token_id": 151646, "eos_token_id": 151643, "max_position_embeddings": 131072}
_QWEN2_7B = (3584, 18944, 28, 28, 4)
_LLAMA_8B, _LLAMA_70B = (4096, 14336, 32, 32, 8), (8192, 28672, 80, 64, 8)
_DEEPSEEK_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}

# By name: parameters in billions, as model cards or the Hub have it, and config.json.
_MODELS: dict[str, tuple[float, dict[str, Any]]] = {
    "Llama-2-7b-hf": (6.74, _llama2(4096, 11008, 32, 32, 32)),
    "TinyLlama-1.1B-Chat-v1.0": (1.10, _llama2(2048, 5632, 22, 32, 4, max_sequence_length=2048)),
    "Meta-Llama-3-8B-Instruct": (
        8.03,
        _llama2(*_LLAMA_8B, vocab_size=128256, rope_theta=500000.0, eos_token_id=128009),
    ),
    "Llama-3.1-8B": (8.03, _llama(*_LLAMA_8B, eos_token_id=128001)),
    "Llama-3.1-8B-Instruct": (8.03, _llama(*_LLAMA_8B)),
    "Llama-3.1-70B-Instruct": (70.6, _llama(*_LLAMA_70B)),
    "Llama-3.2-1B-Instruct": (1.24, _llama(2048, 8192, 16, 32, 8, factor=32.0, tied=True, head_dim=64)),
    "Llama-3.2-3B-Instruct": (3.21, _llama(3072, 8192, 28, 24, 8, factor=32.0, tied=True, head_dim=128)),
    "Llama-3.3-70B-Instruct": (70.6, _llama(*_LLAMA_70B, head_dim=128)),
    "Llama-3.1-Tulu-3-8B": (8.03, _llama(*_LLAMA_8B, vocab_size=128264, eos_token_id=128001, pad_token_id=128256)),
    "DeepSeek-R1-Distill-Llama-8B": (8.03, _llama(*_LLAMA_8B, eos_token_id=128001)),
    "DeepSeek-R1-Distill-Llama-70B": (70.6, _llama(*_LLAMA_70B, eos_token_id=128001)),
    "SmolLM2-135M-Instruct": (0.1345, _smol(576, 1536, 30, 9, 3)),
    "SmolLM2-360M-Instruct": (0.3618, _smol(960, 2560, 32, 15, 5)),
    "SmolLM2-1.7B-Instruct": (1.711, _smol(2048, 8192, 24, 32, 32, rope_theta=130000)),
    "Qwen2-7B-Instruct": (7.62, _qwen2(*_QWEN2_7B, vocab=152064, sliding_window=131072)),
    "Qwen2.5-0.5B-Instruct": (0.494, _qwen2(896, 4864, 24, 14, 2, vocab=151936, tied=True)),
    "Qwen2.5-1.5B-Instruct": (1.54, _qwen2(1536, 8960, 28, 12, 2, vocab=151936, tied=True)),
    "Qwen2.5-3B-Instruct": (3.09, _qwen2(2048, 11008, 36, 16, 2, vocab=151936, tied=True)),
    "Qwen2.5-7B-Instruct": (7.62, _qwen2(*_QWEN2_7B, vocab=152064)),
    "Qwen2.5-14B-Instruct": (14.77, _qwen2(5120, 13824, 48, 40, 8, vocab=152064)),
    "Qwen2.5-32B-Instruct": (32.76, _qwen2(5120, 27648, 64, 40, 8, vocab=152064)),
    "Qwen2.5-72B-Instruct": (72.7, _qwen2(8192, 29568, 80, 64, 8, vocab=152064)),
    "Qwen2.5-Math-1.5B": (1.54, _qwen2(1536, 8960, 28, 12, 2, vocab=151936, tied=True, **_MATH)),
    "Qwen2.5-Math-7B": (7.62, _qwen2(*_QWEN2_7B, vocab=152064, **_MATH)),
    "Qwen2.5-Coder-7B-Instruct": (7.62, _qwen2(*_QWEN2_7B, vocab=152064, sliding_window=131072)),
    "DeepSeek-R1-Distill-Qwen-1.5B": (1.777, _qwen2(1536, 8960, 28, 12, 2, vocab=151936, **_DISTILLED)),
    "DeepSeek-R1-Distill-Qwen-7B": (7.62, _qwen2(*_QWEN2_7B, vocab=152064, **_DISTILLED)),
    "DeepSeek-R1-Distill-Qwen-32B": (32.76, _qwen2(5120, 27648, 64, 40, 8, vocab=152064, **_DISTILLED)),
    "Qwen3-0.6B": (0.596, _qwen3(1024, 3072, 28, 16, 8, tied=True)),
    "Qwen3-1.7B": (1.72, _qwen3(2048, 6144, 28, 16, 8, tied=True)),
    "Qwen3-4B": (4.02, _qwen3(2560, 9728, 36, 32, 8, tied=True)),
    "Qwen3-4B-Instruct-2507": (4.02, _qwen3(2560, 9728, 36, 32, 8, tied=True, **_LONG)),
    "Qwen3-8B": (8.19, _qwen3(4096, 12288, 36, 32, 8)),
    "Qwen3-14B": (14.77, _qwen3(5120, 17408, 40, 40, 8)),
    "Qwen3-32B": (32.76, _qwen3(5120, 25600, 64, 64, 8)),
    "Qwen3-30B-A3B": (30.5, _qwen3_moe(2048, 6144, 48, 32, 4, width=768)),
    "Qwen3-30B-A3B-Instruct-2507": (30.5, _qwen3_moe(2048, 6144, 48, 32, 4, width=768, **_LONG)),
    "Qwen3-Coder-30B-A3B-Instruct": (30.5, _qwen3_moe(2048, 5472, 48, 32, 4, width=768, **_CODER)),
    "Qwen3-235B-A22B": (235.1, _qwen3_moe(4096, 12288, 94, 64, 4, width=1536)),
    "MiMo-7B-RL": (
        7.83,
        _qwen2(4096, 11008, 36, 32, 8, vocab=151680, **{"num_nextn_predict_layers": 1, "attention_bias": True})
        | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "head_dim": 128, "rope_theta": 640000},
    ),
    "GLM-4.5-Air": (
        109.2,  # without the drafter's copies of embedding and head
        _glm(4096, 10944, 46, 96, 8, experts=128, width=1408, dense=1, norm=False, scale=1.0, context=131072),
    ),
    "GLM-4.7": (
        358.3,
        _glm(5120, 12288, 92, 96, 8, experts=160, width=1536, dense=3, norm=True, scale=2.5, context=202752),
    ),
    "DeepSeek-V3-bf16": (
        684.5,
        _deepseek(
            *(7168, 18432, 61, 128, 128),
            **{"bos_token_id": 0, "eos_token_id": 1, "vocab_size": 129280, "max_position_embeddings": 163840},
            **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
            **{"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
            **{"q_lora_rank": 1536, "num_nextn_predict_layers": 1, "rope_theta": 10000, "rms_norm_eps": 1e-06},
            rope_scaling=_DEEPSEEK_YARN | {"original_max_position_embeddings": 4096},
        ),
    ),
    "Moonlight-16B-A3B-Instruct": (
        15.96,
        _deepseek(
            *(2048, 11264, 27, 16, 16),
            **{"bos_token_id": 163584, "eos_token_id": 163585, "vocab_size": 163840, "max_position_embeddings": 8192},
            **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446},
            **{"q_lora_rank": None, "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "rms_norm_eps": 1e-05},
            rope_scaling=None,
        ),
    ),
}
BILLIONS = {name: billions for name, (billions, _) in _MODELS.items()}
PUBLISHED = {name: config for name, (_, config) in _MODELS.items()}

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_ATTN_FACTOR = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.8782}
_SIZES = (2560, 9728, 36, 32, 8)
# By name: config.json, and what in it is not computed here.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSeek-V3-0324": (PUBLISHED["DeepSeek-V3-bf16"] | {"quantization_config": _FP8}, "quantization_config"),
    "Qwen3-8B-FP8": (PUBLISHED["Qwen3-8B"] | {"quantization_config": _FP8}, "quantization_config"),
    "DeepSeek-R1-0528-Qwen3-8B": (PUBLISHED["Qwen3-8B"] | {"rope_scaling": _ATTN_FACTOR}, "rope_scaling.attn_factor"),
    "Qwen2.5-7B-Instruct-1M": (
        PUBLISHED["Qwen2.5-7B-Instruct"] | {"dual_chunk_attention_config": {"chunk_size": 1}},
        "dual_chunk",
    ),
    "SmolLM3-3B": (_qwen3(*_SIZES, architectures=["SmolLM3ForCausalLM"]), "architecture SmolLM3ForCausalLM"),
    "GLM-4.7-Flash": (_qwen3(*_SIZES, architectures=["Glm4MoeLiteForCausalLM"]), "architecture Glm4MoeLite"),
    "Qwen3.5-4B": (_qwen3(*_SIZES, architectures=["Qwen3_5ForConditionalGeneration"]), "architecture Qwen3_5"),
    "gemma-3-1b-it": (_qwen3(*_SIZES, architectures=["Gemma3ForCausalLM"]), "no norms behind attention and MLP"),
}

"""config.json of published models by their names on the Hub, with keys that change nothing: one or two of a family."""

from __future__ import annotations

from typing import Any


def _sizes(hidden: int, mlp: int, layers: int, heads: int, groups: int) -> dict[str, Any]:
    found = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    found |= {"num_attention_heads": heads, "num_key_value_heads": groups, "attention_dropout": 0.0}
    return found | {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    return {"rope_scaling": scaling | {"factor": factor, "rope_type": "llama3"}}


_LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False},
    **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072},
    **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False},
    "vocab_size": 128256,
}
_LLAMA2 = _LLAMA | {
    **{"rope_scaling": None, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 32000},
    **{"max_position_embeddings": 4096, "max_sequence_length": 2048},
}
_QWEN2 = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151645},
    **{"max_position_embeddings": 32768, "max_window_layers": 28, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
    **{"sliding_window": 32768, "use_sliding_window": False, "use_mrope": False, "tie_word_embeddings": False},
    "vocab_size": 152064,
}
_QWEN3 = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128},
    **{"bos_token_id": 151643, "eos_token_id": 151645, "max_position_embeddings": 40960, "max_window_layers": 28},
    **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None},
    **{"use_sliding_window": False, "tie_word_embeddings": False, "vocab_size": 151936},
}
_QWEN3_MOE = _QWEN3 | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001},
}
_CODER = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "rope_theta": 10000000}
_GLM = {
    **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128},
    **{"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329, "n_group": 1, "topk_group": 1},
    **{"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1},
    **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000},
    **{"tie_word_embeddings": False, "vocab_size": 151552},
}
_AIR = {
    **{"n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "use_qk_norm": False},
    **{"routed_scaling_factor": 1.0, "max_position_embeddings": 131072},
}
_DEEPSEEK = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False},
    **{"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "ep_size": 1},
    **{"kv_lora_rank": 512, "moe_layer_freq": 1, "norm_topk_prob": True, "pretraining_tp": 1, "qk_nope_head_dim": 128},
    **{"qk_rope_head_dim": 64, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False},
    **{"topk_method": "noaux_tc", "v_head_dim": 128},
}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
_V3 = {
    **{"bos_token_id": 0, "eos_token_id": 1, "vocab_size": 129280, "max_position_embeddings": 163840},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    **{"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "q_lora_rank": 1536},
    **{"num_nextn_predict_layers": 1, "rope_theta": 10000, "rms_norm_eps": 1e-06},
    "rope_scaling": _YARN | {"original_max_position_embeddings": 4096},
}
_MOONLIGHT = {
    **{"bos_token_id": 163584, "eos_token_id": 163585, "vocab_size": 163840, "max_position_embeddings": 8192},
    **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "q_lora_rank": None},
    **{"num_nextn_predict_layers": 0, "rope_theta": 50000.0, "rms_norm_eps": 1e-05, "rope_scaling": None},
}
_TIED = {"tie_word_embeddings": True}
_SMOL = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": "float16"}}
_MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1, "head_dim": 128}
_MIMO |= {"rope_theta": 640000, "attention_bias": True, "vocab_size": 151680}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B-Instruct": _sizes(2048, 8192, 16, 32, 8) | _LLAMA | _llama3(32.0) | _TIED | {"head_dim": 64},
    "SmolLM2-135M-Instruct": _sizes(576, 1536, 30, 9, 3) | _LLAMA2 | _TIED | _SMOL | {"vocab_size": 49152},
    "Qwen2.5-0.5B-Instruct": _sizes(896, 4864, 24, 14, 2) | _QWEN2 | _TIED | {"vocab_size": 151936},
    "Qwen2.5-1.5B-Instruct": _sizes(1536, 8960, 28, 12, 2) | _QWEN2 | _TIED | {"vocab_size": 151936},
    "Qwen2.5-7B-Instruct": _sizes(3584, 18944, 28, 28, 4) | _QWEN2,
    "Qwen3-0.6B": _sizes(1024, 3072, 28, 16, 8) | _QWEN3 | _TIED,
    "Qwen3-8B": _sizes(4096, 12288, 36, 32, 8) | _QWEN3,
    "Qwen3-30B-A3B": _sizes(2048, 6144, 48, 32, 4) | _QWEN3_MOE,
    "Qwen3-Coder-30B-A3B-Instruct": _sizes(2048, 5472, 48, 32, 4) | _QWEN3_MOE | _CODER,
    "MiMo-7B-RL": _sizes(4096, 11008, 36, 32, 8) | _QWEN2 | _MIMO,
    "GLM-4.5-Air": _sizes(4096, 10944, 46, 96, 8) | _GLM | _AIR,
    "DeepSeek-V3-bf16": _sizes(7168, 18432, 61, 128, 128) | _DEEPSEEK | _V3,
    "Moonlight-16B-A3B-Instruct": _sizes(2048, 11264, 27, 16, 16) | _DEEPSEEK | _MOONLIGHT,
}

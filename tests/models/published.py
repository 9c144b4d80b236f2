"""config.json of published models that people try first, by their names on the hub."""

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
    return _dense(
        *sizes,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        max_position_embeddings=131072,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=scaling,
        rope_theta=500000.0,
        tie_word_embeddings=tied,
        vocab_size=128256,
        **more,
    )


def _qwen2(*sizes: int, vocab: int, tied: bool = False) -> dict[str, Any]:
    return _dense(
        *sizes,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        bos_token_id=151643,
        eos_token_id=151645,
        max_position_embeddings=32768,
        max_window_layers=sizes[2],
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=32768,
        use_sliding_window=False,
        tie_word_embeddings=tied,
        vocab_size=vocab,
    )


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


def _qwen3_moe(*sizes: int, width: int) -> dict[str, Any]:
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
    return _qwen3(*sizes, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **experts)


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B-Instruct": _llama(4096, 14336, 32, 32, 8),
    "Llama-3.2-1B-Instruct": _llama(2048, 8192, 16, 32, 8, factor=32.0, tied=True, head_dim=64),
    "Qwen2.5-0.5B-Instruct": _qwen2(896, 4864, 24, 14, 2, vocab=151936, tied=True),
    "Qwen2.5-1.5B-Instruct": _qwen2(1536, 8960, 28, 12, 2, vocab=151936, tied=True),
    "Qwen2.5-7B-Instruct": _qwen2(3584, 18944, 28, 28, 4, vocab=152064),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, 32, 4, width=768),
    "Moonlight-16B-A3B-Instruct": _dense(
        2048,
        11264,
        27,
        16,
        16,
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        attention_bias=False,
        aux_loss_alpha=0.001,
        bos_token_id=163584,
        eos_token_id=163585,
        ep_size=1,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        max_position_embeddings=8192,
        moe_intermediate_size=1408,
        moe_layer_freq=1,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=True,
        num_experts_per_tok=6,
        num_nextn_predict_layers=0,
        pretraining_tp=1,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=50000.0,
        routed_scaling_factor=2.446,
        scoring_func="sigmoid",
        seq_aux=True,
        tie_word_embeddings=False,
        topk_group=1,
        topk_method="noaux_tc",
        v_head_dim=128,
        vocab_size=163840,
    ),
}
# Their parameters in billions, as the model cards say.
BILLIONS = {
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.2-1B-Instruct": 1.24,
    "Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen2.5-7B-Instruct": 7.62,
    "Qwen3-0.6B": 0.596,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.5,
    "Moonlight-16B-A3B-Instruct": 15.96,
}

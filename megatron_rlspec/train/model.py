"""The policy: a `GPTModel` built from a Hugging Face config, which returns hidden states instead of logits.

Head and loss run outside, in chunks over the trained positions (`mtp/loss.py`), so logits of the whole batch never
exist; and the drafter reads the same hidden states, detached. There is no MTP inside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.train import experts, runtime
from megatron_rlspec.train.attention import PackedSequences, packed_sequences, rotary_factors
from megatron_rlspec.types import PackedBatch
from megatron_rlspec.weights.families import facts_of
from megatron_rlspec.weights.model_config import check_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's, and the share of a head's channels that is rotated, which Megatron gives to its models only."""

    rotary_percent: float = 1.0


def transformer_config(hf_config: Mapping[str, Any], config: Config) -> DecoderConfig:
    """Describe a Llama-shaped decoder (Llama, Qwen2, Qwen3, MiMo, GLM4-MoE) to Megatron. Call after `init_distributed`.

    Raises ConfigError for what it would otherwise have to ignore: scaled rotary embeddings, windows, other activations,
    and sizes that tensor parallelism does not divide.
    """
    check(hf_config, config)
    dtype = DTYPES[config.model.dtype]
    facts = facts_of(hf_config)
    heads, parallel = hf_config["num_attention_heads"], config.parallel
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return DecoderConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=hf_config.get("num_key_value_heads") or heads,
        kv_channels=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        layernorm_epsilon=hf_config.get("rms_norm_eps", 1e-6),
        normalization="RMSNorm",
        qk_layernorm=facts.has_qk_norm(hf_config),
        rotary_percent=rotary_percent(hf_config),
        add_bias_linear=False,
        add_qkv_bias=facts.has_qkv_bias(hf_config),
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=hf_config.get("initializer_range", 0.02),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        # Micro-batches are packed, so pipeline stages exchange their lengths. Megatron allows that only with this
        # dispatcher, even where there is no expert to dispatch to.
        variable_seq_lengths=parallel.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        # Losses arrive divided by the step's global count: neither DDP nor the schedule may scale them again.
        calculate_per_token_loss=True,
        **(recompute if parallel.recompute else {}),
        **experts.options(hf_config, config),
        **runtime.device_options(),
    )


def check(hf_config: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError, naming the key, if this model cannot be trained here under this configuration."""
    where = config.model.path or "the model"
    typed = check_config(hf_config, where)
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    problems = [
        *experts.problems(hf_config, config),
        (typed.vocab_size % tensor, f"vocab_size={typed.vocab_size} is no multiple of parallel.tensor={tensor}"),
        (typed.groups % tensor, f"num_key_value_heads={typed.groups} is no multiple of parallel.tensor={tensor}"),
        (
            typed.num_hidden_layers % pipeline,
            f"num_hidden_layers={typed.num_hidden_layers} is no multiple of parallel.pipeline={pipeline}",
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise ConfigError(f"config.json of {where}: {message}")


def rotary_base(hf_config: Mapping[str, Any]) -> float:
    return float(hf_config.get("rope_theta") or (hf_config.get("rope_parameters") or {}).get("rope_theta", 10000.0))


def rotary_percent(hf_config: Mapping[str, Any]) -> float:
    """GLM4-MoE rotates the first half of a head's channels, whether its config.json says so or not."""
    default = facts_of(hf_config).rotary_share
    parameters = hf_config.get("rope_parameters") or {}
    return float(hf_config.get("partial_rotary_factor", parameters.get("partial_rotary_factor", default)))


class Policy(GPTModel):
    """`forward(input_ids, position_ids, None, packed_seq_params=...)` -> hidden states after the final norm.

    `[T, 1, H]` on the last pipeline stage, of all tokens of this context-parallel rank, and identical on its
    tensor-parallel ranks; what the next stage needs on the others.
    """

    def __init__(self, config: TransformerConfig, hf_config: Mapping[str, Any], max_length: int) -> None:
        # Our core attention rotates by each token's position itself; Transformer Engine's is given Megatron's angles.
        rope = runtime.has_transformer_engine()
        super().__init__(
            config=config,
            transformer_layer_spec=runtime.decoder_spec(config),
            vocab_size=hf_config["vocab_size"],
            max_sequence_length=max_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
            position_embedding_type="rope" if rope else "none",
            rotary_base=rotary_base(hf_config),
            rotary_percent=rotary_percent(hf_config),
        )

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.post_process and self.config.sequence_parallel:
            # The loss sums the head's gradient over tensor-parallel ranks itself: backward only splits.
            return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states

    def head_weight(self) -> Tensor:
        """`[V / tensor, H]` on the last stage; the embedding itself if tied."""
        return self.shared_embedding_or_output_weight() if self._tied else self.output_layer.weight

    @property
    def _tied(self) -> bool:
        return self.share_embeddings_and_output_weights


def describe(batch: PackedBatch, config: TransformerConfig, base: float, device: torch.device) -> PackedSequences:
    """What attention needs to know of a micro-batch."""
    cp_size, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if int(batch.cu_seqlens_padded[-1]) != batch.tokens.numel() * cp_size:
        raise ValueError(
            f"cu_seqlens_padded ends at {int(batch.cu_seqlens_padded[-1])}, but {cp_size} context-parallel ranks "
            f"hold {batch.tokens.numel()} tokens each"
        )
    groups = config.num_query_groups // config.tensor_model_parallel_size
    packed = packed_sequences(batch.cu_seqlens_padded, groups, cp_size, cp_rank, device)
    return at_positions(packed, batch.position_ids.to(device), config, base)


def at_positions(packed: PackedSequences, positions: Tensor, config: TransformerConfig, base: float) -> PackedSequences:
    """The same sequences with every token's rotary position given: `positions [T]`."""
    dims = int(config.kv_channels * getattr(config, "rotary_percent", 1.0))
    cos, sin = rotary_factors(positions, dims, base, config.params_dtype)
    return replace(packed, cos=cos, sin=sin)

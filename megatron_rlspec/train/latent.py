"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) of packed sequences, in policy and drafter.

Megatron's `MLASelfAttention` computes the angles of the rotary embedding from the length of a sequence. The drafter's
depths need the angles of given positions, so `LatentAttention` makes queries, keys and values itself, with the angles
that `PackedSequences` holds. It also sums, over tensor-parallel ranks, the gradient of the keys' rotated part, which
all heads share: Megatron 0.16.1 leaves that sum out where the down projections are column-parallel.

`layer_specs.py` puts `LatentAttention` into the layers; `model.transformer_config` calls `options`. Queries, keys and
values then go to the layer's core attention, which must not rotate them again.

The norms of the latent vectors take `rms_norm_eps`, as in SGLang. Transformers takes 1e-6 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from torch import Tensor

from megatron_rlspec.models.rope import Rope
from megatron_rlspec.train.attention import PackedSequences, rotated

# Megatron 0.16.1 may import a placeholder in place of Transformer Engine's class, sets HAVE_TE, and then fails in
# `isinstance(..., TELinear)`.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False


def options(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's `MLATransformerConfig` that differ from those of other models, or are added.

    `hf_config` must have the keys of latent attention, such as `kv_lora_rank`; `q_lora_rank` may be missing or null.
    """
    rope = Rope.of(hf_config)
    return {
        # Every head has keys of its own; only their rotated part is shared.
        "num_query_groups": hf_config["num_attention_heads"],
        "kv_channels": hf_config["qk_nope_head_dim"] + hf_config["qk_rope_head_dim"],
        "q_lora_rank": hf_config.get("q_lora_rank"),
        "kv_lora_rank": hf_config["kv_lora_rank"],
        "qk_head_dim": hf_config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf_config["qk_rope_head_dim"],
        "v_head_dim": hf_config["v_head_dim"],
        "qk_layernorm": True,
        "rope_type": "rope",
        "apply_rope_fusion": False,  # `LatentAttention` rotates by itself
        # From these two fields Megatron computes the factor on the attention scores.
        "rotary_scaling_factor": rope.factor,
        "mscale_all_dim": rope.mscale,
    }


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Give core attention queries and keys `[t, n, c + r]` and values `[t, n, v]`, rotated.

    t tokens, n heads of this tensor-parallel rank, c channels of a head that are not rotated, r rotated channels behind
    them, v channels of a value.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Replace Megatron's. `hidden_states`: `[t, 1, H]`, or this rank's rows of it under sequence parallelism.

        Megatron returns latent vectors in the place of the two None. `PackedAttention` does not read them.
        """
        assert isinstance(packed_seq_params, PackedSequences)
        config = self.config
        if config.q_lora_rank is None:
            queries, _bias = self.linear_q_proj(hidden_states)
        else:
            latent = self._all_channels(
                self.linear_q_down_proj(hidden_states)[0], config.q_lora_rank
            )
            normed = self.q_layernorm(self._own_rows(latent, len(hidden_states)))
            queries, _bias = self.linear_q_up_proj(normed)
        parts = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        plain, to_rotate = self._split_heads(queries).split(parts, -1)
        query = torch.cat([plain, rotated(_neighbours_to_halves(to_rotate), packed_seq_params)], -1)

        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        # One projection makes the latent vector of keys and values, and the keys' rotated part, which heads share.
        both = self._all_channels(self.linear_kv_down_proj(hidden_states)[0], width)
        latent, shared = both.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        normed = self.kv_layernorm(self._own_rows(latent, len(hidden_states)))
        up, _bias = self.linear_kv_up_proj(normed)
        plain, value = self._split_heads(up).split([config.qk_head_dim, config.v_head_dim], -1)
        rotary = rotated(
            _neighbours_to_halves(self._for_all_heads(shared, len(plain))), packed_seq_params
        )
        key = torch.cat([plain, rotary.expand(-1, plain.shape[1], -1)], -1)
        return query, key, value, None, None

    def _split_heads(self, x: Tensor) -> Tensor:
        """Split `[t, 1, n · d]` into heads, `[t, n, d]`."""
        return x[:, 0].unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _all_channels(self, x: Tensor, width: int) -> Tensor:
        """Return all `width` channels of a down projection. Local specs cut them over the tensor-parallel ranks."""
        if x.shape[-1] == width:
            return x
        return gather_from_tensor_model_parallel_region(x)

    def _own_rows(self, x: Tensor, rows: int) -> Tensor:
        """Return the rows that sequence parallelism gives to this rank; `x` has `rows` of them, or all.

        `x` has all rows where a down projection of the local spec has gathered its input.
        """
        if len(x) == rows:
            return x
        return scatter_to_sequence_parallel_region(x)

    def _for_all_heads(self, x: Tensor, rows: int) -> Tensor:
        """Return all `rows` rows, `[t, 1, r]`, of the keys' rotated part, which the heads of all ranks read.

        Both branches must sum the gradient over the tensor-parallel ranks in the backward: each rank computes only that
        of its own heads.
        """
        if len(x) != rows:
            return gather_from_sequence_parallel_region(x)
        return copy_to_tensor_model_parallel_region(x)


def _neighbours_to_halves(x: Tensor) -> Tensor:
    """Reorder channels for `rotated`, which rotates channel i with channel i + r / 2. DeepSeek rotates neighbours.

    Channels (0, 1, 2, 3, ...) become (0, 2, ..., 1, 3, ...). Queries and keys must be reordered alike: only then their
    products stay the same.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

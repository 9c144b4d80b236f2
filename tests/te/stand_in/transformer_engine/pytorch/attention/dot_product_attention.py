"""Causal softmax attention over packed sequences, score matrix and all."""

import math

import torch

from transformer_engine.pytorch.distributed import gather_rows
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
    ):
        super().__init__()
        self._join(tp_group, tp_size)
        assert attention_type == "self" and softmax_type == "vanilla" and not return_max_logit
        assert window_size is None and not attention_dropout
        self.heads = num_attention_heads // self.tp_size
        self.groups = (num_gqa_groups or num_attention_heads) // self.tp_size
        self.channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.scale = softmax_scale or 1.0 / math.sqrt(self.channels[0])
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
    ):
        if qkv_format in (None, "sbhd"):
            return self._batch(query_layer, key_layer, value_layer, attn_mask_type)
        assert qkv_format == "thd" and attn_mask_type == "padding_causal", (qkv_format, attn_mask_type)
        assert core_attention_bias is None and window_size is None
        assert query_layer.dtype == key_layer.dtype == value_layer.dtype
        assert query_layer.shape[1:] == (self.heads, self.channels[0]), query_layer.shape
        assert key_layer.shape[1:] == (self.groups, self.channels[0]), key_layer.shape
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert max_seqlen_q == max_seqlen_kv == int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
        ends = (cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded).tolist()
        size, rank = (1, 0) if self.cp_group is None else (self.cp_group.size(), self.cp_group.rank())
        mine = _rows(ends, size, rank)
        if size > 1:
            order = torch.cat([_rows(ends, size, other) for other in range(size)]).argsort()
            key_layer = gather_rows(key_layer, self.cp_group)[order]
            value_layer = gather_rows(value_layer, self.cp_group)[order]
        assert len(mine) == len(query_layer), "cu_seqlens do not add up to this rank's tokens"
        return self._attend(query_layer, key_layer, value_layer, mine, ends).flatten(1)

    def _batch(self, q, k, v, attn_mask_type):
        assert attn_mask_type == "causal" and self.cp_group is None, attn_mask_type
        length, batch = q.shape[:2]
        packed = [x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)]
        ends = [length * index for index in range(batch + 1)]
        out = self._attend(*packed, torch.arange(length * batch), ends)
        return out.unflatten(0, (batch, length)).transpose(0, 1).flatten(2).contiguous()

    def _attend(self, q, k, v, rows, ends):
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(len(q), self.heads, self.channels[1], dtype=q.dtype)
        for first, last in zip(ends[:-1], ends[1:], strict=True):
            here = ((rows >= first) & (rows < last)).nonzero()[:, 0]
            repeated = [x[first:last].repeat_interleave(self.heads // self.groups, dim=1).to(exact) for x in (k, v)]
            scores = torch.einsum("qhd,khd->hqk", q[here].to(exact), repeated[0]) * self.scale
            hidden = torch.arange(first, last)[None, :] > rows[here][:, None]
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out = out.index_copy(0, here, torch.einsum("hqk,khd->qhd", weights, repeated[1]).to(q.dtype))
        return out


def _rows(ends, size, rank):
    """Rows of the packed batch that a context-parallel rank holds: of each sequence two chunks of 2 · size."""
    if size == 1:
        return torch.arange(ends[-1])
    held = []
    for first, last in zip(ends[:-1], ends[1:], strict=True):
        chunk = (last - first) // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            held.append(torch.arange(first + index * chunk, first + (index + 1) * chunk))
    return torch.cat(held)

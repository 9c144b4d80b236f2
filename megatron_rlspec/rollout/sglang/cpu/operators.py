"""Compute in plain torch what SGLang's CPU engine calls in `sgl_kernel`, with the same names and arguments.

The operators cover chain drafting: with another topk than 1 SGLang runs without its adaptive drafts, and `rlspec
serve` then ends. So no function here checks `topk`. Attention is in `attention.py`. The operators here work on the
whole batch at once. `stand_ins.install` puts them where SGLang calls them. No sglang is imported. Signatures follow the
call sites in sglang 0.5.23: `mem_cache/allocation.py`, `kernels/ops/speculative/*.py`,
`kernels/ops/sampling/murmur_hash.py`, `layers/attention/intel_amx_backend.py`.

Shapes: B requests, K = num_steps + 1 verified tokens. `req_to_token [pool, max_context]` maps (request slot, position)
to a row of the KV cache. `req_pool_indices [B]` are the requests' slots; ranges start[i]..end[i] exclude the end.
SGLang passes all arguments, also those that are not used here, so names and order must stay. Most functions write their
results into tensors that SGLang passes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rlspec import noise
from megatron_rlspec.rollout.sglang.cpu.attention import decode_attention_cpu, extend_attention_cpu


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the cache rows `out_cache_loc` to positions start[i]..end[i] of every request, request after request.

    `out_cache_loc` may be longer than all ranges together: its rest is not used.
    """
    places = _places(req_pool_indices, start, end)
    req_to_token[places] = out_cache_loc[: len(places[0])].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Do the reverse of `assign_req_to_token_pool_cpu`: read the cache rows of these positions into `out_cache_loc`."""
    places = _places(req_pool_indices, start, end)
    out_cache_loc[: len(places[0])] = req_to_token[places].to(out_cache_loc.dtype)


def _places(slots: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return (slot, position) of every element of the ranges start[i]..end[i], request after request."""
    lengths = (end - start).long()
    rows = torch.repeat_interleave(slots.long(), lengths)
    # Element j of the result, which belongs to request i, has position start[i] + j - (elements before request i).
    first = torch.repeat_interleave(start.long() - (lengths.cumsum(0) - lengths), lengths)
    return rows, first + torch.arange(len(rows))


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the cache rows of the `num_steps` positions from `seq_lens[i]` on into out_cache_loc [B * num_steps]."""
    columns = seq_lens.long()[:, None] + torch.arange(num_steps)
    out_cache_loc.view(len(seq_lens), -1).copy_(
        req_to_token[req_pool_indices.long()[:, None], columns]
    )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Return the cache rows of the drafting requests, [B, longest context + num_steps].

    Beyond a request's own context they are arbitrary.
    """
    return req_to_token[req_pool_indices.long(), : int(seq_lens.max()) + num_steps]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Write the tree of a chain: node j of request i has position verified_seq_len[i] + j, and node j + 1 follows it.

    positions [B * K] int64. Of each node, [B, K] int64: `retrieve_index` its place in the batch, `retrieve_next_token`
    the next node of the request, `retrieve_next_sibling` another node with the same parent; -1: none. `tree_mask` stays
    as it is: the mask of a chain is the causal one, which the verify pass applies without reading it.
    """
    batch = len(verified_seq_len)
    node = torch.arange(draft_token_num)
    positions.view(batch, -1).copy_(verified_seq_len.long()[:, None] + node)
    retrieve_index.copy_(torch.arange(batch)[:, None] * draft_token_num + node)
    next_node = node + 1
    next_node[-1] = -1  # the chain's end
    retrieve_next_token.copy_(next_node.expand(batch, -1))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept drafts while they equal the target's tokens. Writes its results in place; chains only.

    SGLang passes all arguments by name, and spells three of them `retrive`.

    candidates, target_predict [B, K]: candidates[:, 0] is the last accepted token, target_predict[:, j] the target's
    token after node j. Results: predicts [B * K], the target's tokens; accept_index [B, K], the flat indices of the
    accepted nodes and then -1; accept_token_num [B], the number of accepted drafts.
    """
    batch, nodes = candidates.shape
    # cumprod is 0 from the first draft on that differs, so the sum counts the drafts before it.
    accepted = (candidates[:, 1:] == target_predict[:, :-1]).cumprod(1).sum(1)
    node = torch.arange(accept_index.shape[1])  # 0 is the last accepted token, which is always kept
    flat = torch.arange(batch)[:, None] * nodes + node
    accept_index.copy_(torch.where(node <= accepted[:, None], flat, -1))
    predicts.copy_(target_predict.reshape(-1))
    accept_token_num.copy_(accepted)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int
) -> None:
    """Write the last new token of every request, the target's own, into bonus_tokens [B].

    accept_tokens [B, stride]; accept_lens [B]: how many of them are new, the last one included.
    """
    last = torch.arange(len(accept_lens)) * stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Write the cache rows of the accepted nodes, packed to the front.

    accept_index  as `verify_tree_greedy_cpu` writes it: flat indices into out_cache_loc [B * K], and -1
    """
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor
) -> None:
    """Do nothing: drafts in chains move no rows. SGLang calls this when it starts, to warm it up."""


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hash (seed, position, column): seed [N], positions [N], columns [V] -> [N, V] uint32; see `noise.murmur3`."""
    # Views, not conversions: the hash takes the same 64 bits, whether SGLang passes them signed or not.
    return noise.murmur3(seed.view(torch.int64), positions.view(torch.int64), columns).view(
        torch.uint32
    )


# What SGLang imports from `sgl_kernel`. `stand_ins.install` puts it there under the function's own name, as it does
# with OPERATORS. So SGLang would miss a function that is renamed here.
FUNCTIONS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        assign_draft_cache_locs_contiguous_cpu,
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        build_draft_decode_metadata_cpu,
        build_tree_kernel_efficient_cpu,
        copy_all_layer_kv_cache_cpu,
        fill_accept_out_cache_loc_cpu,
        fill_bonus_tokens_cpu,
        verify_tree_greedy_cpu,
    )
}
# What SGLang calls through `torch.ops.sgl_kernel`.
OPERATORS: dict[str, Callable] = {
    f.__name__: f for f in (decode_attention_cpu, extend_attention_cpu, murmur_hash32_cpu)
}

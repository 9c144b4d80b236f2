"""Compute decode and extend attention in plain torch, with the signatures of the CPU operators of `sgl_kernel`.

SGLang's `layers/attention/intel_amx_backend.py` (0.5.23) calls them for dense models in float32, bfloat16 and float16.
They gather the requests' keys and values from the paged cache, pad them to the longest request, and mask the padding.
`operators.OPERATORS` has both functions; `stand_ins.install` puts them where SGLang calls them.

Shapes: B requests (at least 1), L query tokens of one request, S cached tokens, h query and n key/value heads, d head
size. `req_to_token [pool, max_context]` maps (request slot, position) to a row of the KV cache. `req_pool_indices [B]`
are the requests' slots, `seq_lens [B]` their cached tokens. SGLang passes all arguments by position, also those that
are not used here, so their order must stay. `sliding_window` is the window's size + 1; 0: no window.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Most query-key pairs, B * L * S, of one padded prefill call: they bound the size of its mask. A larger call takes its
# requests one by one.
_MAX_PADDED_PAIRS = 1 << 25


class _Plan:
    """What all layers of one forward pass share: the cache rows to gather, and the mask over them.

    key_buffer  of the first layer that asks
    inputs      the tensors from which rows and mask were made
    rows        [B, S] int64, rows of the KV cache; changed in place
    mask        of `_additive`; None: every query sees every key
    query_rows  [B, L] int64, rows of the query tensor, padded; None without padding
    """

    def __init__(
        self,
        key_buffer: Tensor,
        inputs: tuple[Tensor, ...],
        rows: Tensor,
        mask: Tensor | None,
        query_rows: Tensor | None = None,
    ) -> None:
        self.first_buffer = key_buffer.data_ptr()
        self.inputs = inputs  # kept alive, so that no other tensor can be mistaken for one of them
        # Beyond a request's end `req_to_token` is arbitrary. Those columns are masked, but must be valid rows.
        self.rows = rows.reshape(-1).clamp_(min=0)
        self.shape = rows.shape
        self.mask = mask
        self.query_rows = query_rows

    def gather(self, buffer: Tensor) -> Tensor:
        """Return keys or values [B, S, n, d] of a paged buffer [cache rows, n, d].

        `index_select` takes a quarter of the time of indexing by a matrix.
        """
        return buffer.index_select(0, self.rows).view(*self.shape, *buffer.shape[1:])

    def serves(self, key_buffer: Tensor, inputs: tuple[Tensor, ...]) -> bool:
        """Return whether this is the plan of the present pass.

        Two passes may have the same objects as inputs, with other values in them, so identity alone does not suffice:
        when the buffer of the first layer comes again, a new pass has begun. Decode gives three inputs and extend four,
        so neither gets the other's plan.
        """
        same = len(inputs) == len(self.inputs) and all(map(operator.is_, self.inputs, inputs))
        return same and key_buffer.data_ptr() != self.first_buffer


_plan: _Plan | None = None  # of the present pass; a scheduler runs its passes in one thread


def _shared(key_buffer: Tensor, inputs: tuple[Tensor, ...], make: Callable[[], tuple]) -> _Plan:
    """Return the plan of the present pass, which its layers share.

    make  returns the last arguments of `_Plan`, from `rows` on; called by the first layer of a pass only
    """
    global _plan
    if _plan is None or not _plan.serves(key_buffer, inputs):
        _plan = _Plan(key_buffer, inputs, *make())
    return _plan


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend: query [B, L, h, d]; key, value [B, S, n, d]; mask from `_additive`. Returns [B, L, h, d].

    The h / n query heads of one key head become further query rows, so that grouped heads need no copy of the keys.
    """
    batch, length, heads, size = query.shape
    kv_heads = key.shape[2]
    # [B, n, (h / n) * L, d]: heads before tokens, the order of the mask's rows
    rows = (
        query.view(batch, length, kv_heads, -1, size)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, kv_heads, -1, size)
    )
    out = F.scaled_dot_product_attention(
        rows, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return (
        out.view(batch, kv_heads, -1, length, size)
        .permute(0, 3, 1, 2, 4)
        .reshape(batch, length, heads, size)
    )


def _additive(visible: Tensor, query: Tensor, key_buffer: Tensor) -> Tensor:
    """Turn visible [B, L, S] bool into a mask of 0 or -inf, [B, 1, (h / n) * L, S], in the query's dtype.

    The rows are those of `_attend`: the L tokens once for each of the h / n heads.
    """
    mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
    group = query.shape[-2] // key_buffer.shape[-2]
    return mask.repeat(1, group, 1)[:, None]


def _refuse(*unsupported: object) -> None:
    """Raise NotImplementedError if any of these arguments asks for what is not computed here."""
    if any(unsupported):
        raise NotImplementedError(
            "the plain torch CPU operators attend causally, without a window, sinks, a cap and cross attention"
        )


def decode_attention_cpu(
    query: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scaling: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Attend with one query per request: query, output [B, h, d]; buffers [cache rows, n, d].

    key and value [B, n, d] of the new tokens are written to the cache rows `loc [B]` first; `seq_lens` includes them.
    None: they are there already. The result is written into `output`. Raises NotImplementedError for what SGLang does
    not use for dense models.
    """
    _refuse(logit_cap, is_cross_attention, sliding_window > 0, sinks is not None)
    if key is not None:
        assert value is not None, "keys come with values"
        key_buffer.index_copy_(0, loc, key.view(-1, *key_buffer.shape[1:]))
        value_buffer.index_copy_(0, loc, value.view(-1, *value_buffer.shape[1:]))

    def make() -> tuple:
        longest = int(seq_lens.max())
        rows = req_to_token[req_pool_indices, :longest].long()
        if len(seq_lens) == 1:  # no padding, and the only query is the last token
            return rows, None
        visible = torch.arange(longest) < seq_lens[:, None]
        return rows, _additive(visible[:, None], query, key_buffer)

    plan = _shared(key_buffer, (req_to_token, req_pool_indices, seq_lens), make)
    keys = plan.gather(key_buffer)
    values = plan.gather(value_buffer)
    out = _attend(query[:, None], keys, values, plan.mask, scaling)
    output.copy_(out[:, 0])


def extend_attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    extend_start: Tensor,
    max_extend_len: int,
    scaling: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Attend with the last `extend_lens[i]` tokens of request i: prefill, verify and draft-extend. Causal.

    query, output [sum of extend_lens, h, d]; those of request i begin at row extend_start[i]. `seq_lens` includes the
    new tokens, whose keys and values are in the buffers already: `key` and `value` are not read. The result is written
    into `output`. Raises as `decode_attention_cpu`.
    """
    _refuse(logit_cap, is_cross_attention, sliding_window > 0, sinks is not None)
    _refuse(tree_mask is not None, not is_causal)
    batch = len(extend_lens)
    total = query.shape[0]
    # Whether all requests have equally many new tokens, so that no query is padded.
    uniform = batch * max_extend_len == total

    def make() -> tuple:
        longest = int(seq_lens.max())
        rows = req_to_token[req_pool_indices, :longest].long()
        # [B, L]: the position of each query, and so the last one that it sees
        last_seen = (seq_lens - extend_lens)[:, None] + torch.arange(max_extend_len)
        mask = _additive(torch.arange(longest) <= last_seen[:, :, None], query, key_buffer)
        query_rows = None
        if not uniform:
            index = torch.arange(max_extend_len)
            # Row `total` is the extra one for padding, below.
            query_rows = torch.where(
                index < extend_lens[:, None], extend_start[:, None] + index, total
            ).long()
        return rows, mask, query_rows

    # No plan is shared here: every layer makes the rows and the mask anew, one request at a time.
    if not uniform and batch * max_extend_len * int(seq_lens.max()) > _MAX_PADDED_PAIRS:
        for i in range(batch):
            first, length, end = int(extend_start[i]), int(extend_lens[i]), int(seq_lens[i])
            rows = req_to_token[req_pool_indices[i], :end].long()
            visible = torch.arange(end) <= (torch.arange(length) + end - length)[:, None]
            mask = _additive(visible[None], query, key_buffer)
            part = query[first : first + length][None]
            seen = _attend(part, key_buffer[rows][None], value_buffer[rows][None], mask, scaling)
            output[first : first + length] = seen[0]
        return

    plan = _shared(key_buffer, (req_to_token, req_pool_indices, seq_lens, extend_lens), make)
    keys = plan.gather(key_buffer)
    values = plan.gather(value_buffer)
    if uniform:
        out = _attend(
            query.view(batch, max_extend_len, *query.shape[1:]), keys, values, plan.mask, scaling
        )
        output.view(out.shape).copy_(out)
        return
    # Padding reads one extra row of zeros behind the real ones, and its results are dropped.
    assert plan.query_rows is not None, "requests of different lengths have padding"
    padded = torch.cat((query, query.new_zeros(1, *query.shape[1:])))[plan.query_rows]
    out = _attend(padded, keys, values, plan.mask, scaling)
    real = plan.query_rows < total
    output[plan.query_rows[real]] = out[real]

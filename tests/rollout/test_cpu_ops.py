"""Attention over requests of very different lengths is the same with padding and without."""

from __future__ import annotations

import pytest
import torch

from megatron_rlspec.rollout.sglang.cpu import attention as cpu_attention

HEADS = 4
KV_HEADS = 2
SIZE = 8
SCALE = SIZE**-0.5
NONE_OF_THESE = (0.0, False, 0, None, None)  # logit_cap, is_cross_attention, sliding_window, encoder_lens, sinks


class Cache:
    """Requests with scattered cache rows, as the paged allocator leaves them."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        torch.manual_seed(seed)
        rows = torch.randperm(512)
        self.req_to_token = torch.full((16, 64), -1, dtype=torch.int32)
        self.slots = torch.randperm(16)[: len(lengths)]
        self.lengths = torch.tensor(lengths)
        for slot, length in zip(self.slots.tolist(), lengths, strict=True):
            self.req_to_token[slot, :length], rows = rows[:length].int(), rows[length:]
        self.keys = torch.randn(512, KV_HEADS, SIZE, dtype=dtype)
        self.values = torch.randn(512, KV_HEADS, SIZE, dtype=dtype)


def extend(cache: Cache, new: list[int], query: torch.Tensor) -> torch.Tensor:
    output = torch.full_like(query, float("nan"))
    new_lens = torch.tensor(new, dtype=torch.int32)
    start = (new_lens.cumsum(0) - new_lens).int()
    cpu_attention.extend_attention_cpu(
        query, None, None, output, cache.keys, cache.values, 1.0, 1.0, cache.req_to_token, cache.slots,
        cache.lengths, new_lens, start, max(new), SCALE, *NONE_OF_THESE, None, True,
    )  # fmt: skip
    return output


def test_extend_attention_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """It equals the padded one, which the engine's tests compare with Transformers."""
    cache = Cache([9, 14, 30])
    new = [9, 2, 11]
    query = torch.randn(sum(new), HEADS, SIZE)
    padded = extend(cache, new, query)
    monkeypatch.setattr(cpu_attention, "_MAX_PADDED_PAIRS", 1)
    torch.testing.assert_close(extend(cache, new, query), padded, atol=1e-5, rtol=1e-5)

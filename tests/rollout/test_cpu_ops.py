"""Each plain torch operator equals a slow one that loops over requests and tokens."""

from __future__ import annotations

import ctypes

import pytest
import torch

from megatron_rlspec.rollout.sglang.cpu import attention as cpu_attention
from megatron_rlspec.rollout.sglang.cpu import operators as cpu_ops

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

    def slow_attention(self, query: torch.Tensor, request: int, position: int) -> torch.Tensor:
        """Compute one token's attention: query [HEADS, SIZE] at `position` over positions 0..position, in float64."""
        rows = self.req_to_token[self.slots[request], : position + 1].long()
        out = torch.empty(HEADS, SIZE, dtype=torch.float64)
        for head in range(HEADS):
            key = self.keys[rows, head // (HEADS // KV_HEADS)].double()
            value = self.values[rows, head // (HEADS // KV_HEADS)].double()
            out[head] = torch.softmax(key @ query[head].double() * SCALE, 0) @ value
        return out


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("lengths", [[7], [5, 1, 19, 8]], ids=["one", "many"])
def test_decode_attention(lengths: list[int], dtype: torch.dtype, tolerance: float) -> None:
    cache = Cache(lengths, dtype)
    query = torch.randn(len(lengths), HEADS, SIZE, dtype=dtype)
    key, value = torch.randn(2, len(lengths), KV_HEADS, SIZE, dtype=dtype)
    loc = cache.req_to_token[cache.slots, cache.lengths - 1].long()
    output = torch.full_like(query, float("nan"))
    cpu_attention.decode_attention_cpu(
        query, cache.keys, cache.values, 1.0, 1.0, output, key.flatten(1), value, loc, torch.empty(0),
        cache.req_to_token, cache.slots, cache.lengths, SCALE, *NONE_OF_THESE,
    )  # fmt: skip
    assert torch.equal(cache.keys[loc], key) and torch.equal(cache.values[loc], value)
    slow = torch.stack([cache.slow_attention(query[i], i, n - 1) for i, n in enumerate(lengths)])
    torch.testing.assert_close(output.double(), slow, atol=tolerance, rtol=tolerance)


def extend(cache: Cache, new: list[int], query: torch.Tensor) -> torch.Tensor:
    output = torch.full_like(query, float("nan"))
    new_lens = torch.tensor(new, dtype=torch.int32)
    start = (new_lens.cumsum(0) - new_lens).int()
    cpu_attention.extend_attention_cpu(
        query, None, None, output, cache.keys, cache.values, 1.0, 1.0, cache.req_to_token, cache.slots,
        cache.lengths, new_lens, start, max(new), SCALE, *NONE_OF_THESE, None, True,
    )  # fmt: skip
    return output


def slow_extend(cache: Cache, new: list[int], query: torch.Tensor) -> torch.Tensor:
    out = []
    at = 0
    for request, (length, count) in enumerate(zip(cache.lengths.tolist(), new, strict=True)):
        for position in range(length - count, length):
            out.append(cache.slow_attention(query[at], request, position))
            at += 1
    return torch.stack(out)


@pytest.mark.parametrize("new", [[4, 4, 4], [9, 2, 11], [1, 1, 1]], ids=["verify", "ragged", "single"])
def test_extend_attention(new: list[int]) -> None:
    cache = Cache([9, 14, 30])
    query = torch.randn(sum(new), HEADS, SIZE)
    torch.testing.assert_close(extend(cache, new, query).double(), slow_extend(cache, new, query), atol=1e-5, rtol=1e-5)


def test_extend_attention_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "_MAX_PADDED_PAIRS", 1)
    cache = Cache([9, 14, 30])
    new = [9, 2, 11]
    query = torch.randn(sum(new), HEADS, SIZE)
    torch.testing.assert_close(extend(cache, new, query).double(), slow_extend(cache, new, query), atol=1e-5, rtol=1e-5)


def test_layers_share_a_plan_and_passes_do_not() -> None:
    """Two layers, two passes with the same tensors changed in place, as a scheduler that reuses its buffers does."""
    layers = [Cache([5, 9], seed=s) for s in (1, 2)]
    first = layers[0]
    layers[1].req_to_token, layers[1].slots, layers[1].lengths = first.req_to_token, first.slots, first.lengths
    for _ in range(2):
        for layer in layers:
            query = torch.randn(2, HEADS, SIZE)
            output = torch.empty_like(query)
            cpu_attention.decode_attention_cpu(
                query, layer.keys, layer.values, 1.0, 1.0, output, None, None, None, None,
                first.req_to_token, first.slots, first.lengths, SCALE, *NONE_OF_THESE,
            )  # fmt: skip
            slow = [layer.slow_attention(query[i], i, int(n) - 1) for i, n in enumerate(first.lengths)]
            torch.testing.assert_close(output.double(), torch.stack(slow), atol=1e-5, rtol=1e-5)
        first.lengths += 1
        first.req_to_token[first.slots, first.lengths - 1] = torch.tensor([500, 501], dtype=torch.int32)


def test_cache_rows_of_ragged_ranges() -> None:
    slots = torch.tensor([2, 0])
    start = torch.tensor([1, 3])
    end = torch.tensor([4, 5])
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    out = torch.empty(5, dtype=torch.int64)
    cpu_ops.assign_extend_cache_locs_cpu(slots, table, start, end, out, 20)
    assert out.tolist() == [41, 42, 43, 3, 4]
    cpu_ops.assign_req_to_token_pool_cpu(slots, table, start, end, torch.arange(100, 105), 20)
    assert table[2, :5].tolist() == [40, 100, 101, 102, 44] and table[0, 3:6].tolist() == [103, 104, 5]
    locs = torch.empty(6, dtype=torch.int64)
    cpu_ops.assign_draft_cache_locs_contiguous_cpu(slots, table, torch.tensor([5, 7]), locs, 20, 1, 3)
    assert locs.tolist() == [45, 46, 47, 7, 8, 9]
    drafting = cpu_ops.build_draft_decode_metadata_cpu(table, slots, torch.tensor([5, 7]), 1, 3, 20)
    assert torch.equal(drafting, table[slots, :10])


def test_chain_tree_and_greedy_verification() -> None:
    torch.manual_seed(0)
    batch = 50
    nodes = 4
    positions = torch.empty(batch * nodes, dtype=torch.int64)
    index, following, sibling = torch.full((3, batch, nodes), -7)
    lengths = torch.randint(1, 30, (batch,))
    cpu_ops.build_tree_kernel_efficient_cpu(
        None, None, lengths, None, positions, index, following, sibling, 1, nodes - 1, nodes, 1
    )
    candidates, targets = torch.randint(0, 2, (2, batch, nodes))
    predicts = torch.zeros(batch * nodes, dtype=torch.int32)
    accept = torch.zeros(batch, nodes, dtype=torch.int32)
    counts = torch.zeros(batch, dtype=torch.int32)
    cpu_ops.verify_tree_greedy_cpu(predicts, accept, counts, candidates, index, following, sibling, targets)
    bonus = torch.empty(batch, dtype=torch.int32)
    cpu_ops.fill_bonus_tokens_cpu(predicts[accept.long()], counts + 1, bonus, nodes)
    for i in range(batch):
        node = 0
        walked = [i * nodes]
        while following[i, node] >= 0 and candidates[i, following[i, node]] == targets[i, node]:
            node = int(following[i, node])
            walked.append(int(index[i, node]))
        assert accept[i].tolist() == walked + [-1] * (nodes - len(walked))
        assert counts[i] == len(walked) - 1
        assert [predicts[j] for j in walked] == targets[i, : len(walked)].tolist()
        assert bonus[i] == targets[i, node]
        assert positions.view(batch, nodes)[i].tolist() == [int(lengths[i]) + j for j in range(nodes)]
    packed = torch.full((batch * nodes,), -1)
    cpu_ops.fill_accept_out_cache_loc_cpu(accept, torch.arange(1000, 1000 + batch * nodes), packed)
    assert packed[packed >= 0].tolist() == [1000 + j for j in accept.flatten().tolist() if j >= 0]
    with pytest.raises(NotImplementedError, match="topk=2"):
        cpu_ops.build_draft_decode_metadata_cpu(None, None, None, 2, 3, 20)


def test_rows_are_copied_in_every_layer() -> None:
    layers = [torch.arange(20.0).view(5, 4), torch.arange(10.0).view(5, 2)]
    expected = [layer.clone() for layer in layers]
    for layer in expected:
        layer[[0, 1]] = layer[[1, 3]]
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    strides = torch.tensor([layer.stride(0) * 4 for layer in layers])
    cpu_ops.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([0, 1]), torch.tensor([1, 3]))
    assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))


def slow_murmur(seed: int, position: int, column: int) -> int:
    """Compute MurmurHash3_x86_32 with seed 0 over four blocks, in Python integers."""

    def u32(x: int) -> int:
        return ctypes.c_uint32(x).value

    def rotate(x: int, r: int) -> int:
        return u32(x << r) | (x >> (32 - r))

    h = 0
    for block in (u32(seed), u32(seed >> 32), u32(position), u32(column)):
        h = u32(rotate(h ^ u32(rotate(u32(block * 0xCC9E2D51), 15) * 0x1B873593), 13) * 5 + 0xE6546B64)
    h ^= 16
    h = u32((h ^ (h >> 16)) * 0x85EBCA6B)
    h = u32((h ^ (h >> 13)) * 0xC2B2AE35)
    return h ^ (h >> 16)


def test_murmur_hash() -> None:
    seeds = [0, 42, 2**63 + 12345, 2**40 - 1]
    positions = [0, 1, 77, 4095]
    columns = [0, 1, 159, 151_000]
    hashed = cpu_ops.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32
    slow = [[slow_murmur(s, p, c) for c in columns] for s, p in zip(seeds, positions, strict=True)]
    assert hashed.to(torch.int64).tolist() == slow

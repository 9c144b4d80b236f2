"""Products with packed weights against `F.linear`, and copies after changes of their matrices."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rlspec.rollout.embedded import packed as room
from megatron_rlspec.rollout.embedded.packed import PackedWeights

TOLERANCE = {torch.float64: 0.0, torch.float32: 1e-4, torch.bfloat16: 0.25}


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    monkeypatch.setattr(room, "LEAST", 0)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_products_are_those_of_plain_weights(dtype, rows):
    packed = PackedWeights()
    weight = drawn(48, 32, dtype=dtype)
    bias = drawn(48, dtype=dtype, seed=1)
    x = drawn(rows, 32, dtype=dtype, seed=2)
    y = drawn(rows, 48, dtype=dtype, seed=3)
    before = y.clone()
    near = {"rtol": 0, "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(packed.linear(x, weight, bias), F.linear(x, weight, bias), **near)
    torch.testing.assert_close(packed.add(y, x, weight), torch.addmm(y, x, weight.t()), **near)
    assert torch.equal(y, before)


def test_a_changed_matrix_is_packed_again():
    packed = PackedWeights()
    fused = drawn(48, 32)
    x = drawn(3, 32, seed=1)
    packed.linear(x, fused)
    with torch.no_grad():
        fused[16:32].copy_(drawn(16, 32, seed=2))  # as `Decoder.write` does, through a view
    torch.testing.assert_close(packed.linear(x, fused), F.linear(x, fused), rtol=0, atol=1e-4)
    with torch.inference_mode():
        fused[:16].zero_()
        torch.testing.assert_close(packed.linear(x, fused), F.linear(x, fused), rtol=0, atol=1e-4)


def test_a_change_that_torch_does_not_count_needs_forget():
    packed = PackedWeights()
    weight = drawn(48, 32)
    x = drawn(3, 32, seed=1)
    stale = packed.linear(x, weight)
    weight.data.zero_()
    assert torch.equal(packed.linear(x, weight), stale)
    packed.forget()
    assert not packed.linear(x, weight).any()

"""Hand-written backward passes equal autograd through the textbook formulas."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rlspec.train.layers import RMSNorm, SwiGLU


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_equals_torchs(dtype):
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=True)
    norm = RMSNorm(config, 12, eps=1e-3)
    assert norm.weight.sequence_parallel
    torch.manual_seed(0)
    norm.weight.data = torch.randn(12, dtype=dtype)
    x, grad = (torch.randn(7, 2, 12, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    reference = torch.nn.functional.rms_norm(x, (12,), norm.weight, 1e-3)
    tolerance = {} if dtype != torch.bfloat16 else {"rtol": 2e-2, "atol": 6e-2}
    torch.testing.assert_close(norm(x), reference, **tolerance)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    for mine, theirs in zip(ours, torch.autograd.grad(reference, (x, norm.weight), grad), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_swiglu_equals_silu_of_the_first_half_times_the_second():
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 3, 4, dtype=torch.float64)
    reference = torch.nn.functional.silu(x[..., :4]) * x[..., 4:]
    swiglu = SwiGLU(None)
    torch.testing.assert_close(swiglu(x), reference)
    torch.testing.assert_close(torch.autograd.grad(swiglu(x), x, grad), torch.autograd.grad(reference, x, grad))

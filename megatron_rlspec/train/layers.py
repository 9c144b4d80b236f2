"""Norm and activation of the local layer specs, in plain torch, with the backward written out.

With Transformer Engine the policy and the MTP drafter take its kernels instead. On a CPU, autograd without a written
backward would read and write every activation about twice as often. `RMSNorm` also sets the attribute that sequence
parallelism needs; Megatron's WrappedTorchNorm refuses sequence parallelism.

`NormBesideEmbedding` and `DoubleInput` are for the first layer of an EAGLE-3 drafter, whose attention reads embedding
and hidden state side by side.

Megatron constructs the classes by the specs in `layer_specs.py`, so their constructors take its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

_aten = torch.ops.aten


class RMSNorm(nn.Module):
    """Compute x / sqrt(mean(x²) + eps) · weight over the last dimension. 16-bit types are computed in float32."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # With True, Megatron sums the weight's gradient over tensor-parallel ranks, which hold different tokens then.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class NormBesideEmbedding(RMSNorm):
    """RMSNorm of a hidden state, behind an embedding: `[..., H]` to `[..., 2H]`, as EAGLE-3's attention reads them.

    Megatron's layer gives its norm the hidden state alone. So `Eagle3Drafter.run` (`drafter.py`) sets `embedded`,
    `[..., H]`, before every call of the layer. It does so inside the function that is called again for recomputation:
    by then a later depth has overwritten `embedded`.
    """

    embedded: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.embedded, super().forward(x)], -1)


class DoubleInput(ColumnParallelLinear):
    """A column-parallel projection for `NormBesideEmbedding`: its input is twice as wide as Megatron's layer says."""

    def __init__(self, input_size: int, *args: Any, **options: Any) -> None:
        super().__init__(2 * input_size, *args, **options)


class _RMSNorm(torch.autograd.Function):
    """`RMSNorm.forward`: x `[..., H]`, weight `[H]`. Only tensors that are made here are overwritten in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
        # 1 / sqrt(mean(x²) + eps), `[..., 1]`, in place of the norm
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        unit = x * scale  # the normalised input, in the type of `scale`: float32 or float64
        product = unit * grad
        dweight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (product @ weight.to(product.dtype)).div_(x.shape[-1])[..., None]
        # dx = scale · (grad · weight - unit · mean(unit · grad · weight))
        dx = torch.mul(grad, weight).to(unit.dtype)
        dx.addcmul_(unit, mean, value=-1).mul_(scale)
        return dx.to(x.dtype), dweight, None


class SwiGLU(MegatronModule):
    """Compute silu(gate) · up: `[..., 2F]`, laid out as (gate, up), to `[..., F]`."""

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    """`SwiGLU.forward`. Its backward writes both halves of the gradient into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)  # views: the two calls below fill `dx`
        _aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
        torch.mul(torch.nn.functional.silu(gate), grad, out=dup)
        return dx

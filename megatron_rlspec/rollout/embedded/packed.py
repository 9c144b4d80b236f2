"""Multiply few rows by weight matrices on a CPU, from copies that oneDNN has rearranged once.

`F.linear` rearranges the matrix in every call: MKL in float32, where two rows take twice the time of one, and oneDNN in
bfloat16. With a copy in oneDNN's layout, a few rows take the time of reading the matrix, and a row's result hardly
depends on the rows beside it. The copies take as much memory as the matrices.

The operators are private ones of torch, which `torch.compile` uses on a CPU too. Another version of torch may change
them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Matrices with fewer elements are not packed: a call of oneDNN costs 10 µs more, and small matrices stay in cache.
LEAST = 1 << 17


class PackedWeights:
    """The copies, by matrix. A copy is made at its first use, and again after its matrix has changed in place.

    Used by the embedded engine's model and by SGLang's scheduler on a CPU (`rollout/sglang/cpu/products.py`). Products
    are for inference: copies have no gradient. A matrix must not be made under `torch.inference_mode`: torch does not
    count changes of such tensors, and reading the count raises RuntimeError.
    """

    def __init__(self) -> None:
        # By the matrix itself: its `_version` when the copy was made, and the copy; None for a matrix that is not
        # packed. The keys keep matrices alive, so a matrix that is replaced needs a `forget`.
        self._copies: dict[Tensor, tuple[int, Tensor | None]] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [..., I] @ weightᵀ + bias [..., O] of a weight [O, I]."""
        packed = self._packed(weight)
        if packed is None:
            return F.linear(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return x [N, O] + y [N, I] @ weightᵀ of a weight [O, I]. The sum is rounded once."""
        packed = self._packed(weight)
        if packed is None:
            return torch.addmm(x, y, weight.t())
        return torch.ops.mkldnn._linear_pointwise.binary(y, x, packed, None, "add")

    def forget(self, weight: Tensor | None = None) -> None:
        """Drop the copy of a matrix; None: all copies. Does nothing for a matrix without a copy.

        Needed after changes through `.data`, which torch does not count, and for a matrix that is replaced.
        """
        if weight is None:
            self._copies.clear()
        else:
            self._copies.pop(weight, None)

    def _packed(self, weight: Tensor) -> Tensor | None:
        """Return the up-to-date copy of a matrix; None if it is not packed."""
        # `_version` counts changes in place from 0, also those through views of the matrix; -1: no copy was made yet
        version, copy = self._copies.get(weight, (-1, None))
        if version != weight._version:
            copy = _pack(weight)
            self._copies[weight] = (weight._version, copy)
        return copy


def _pack(weight: Tensor) -> Tensor | None:
    """Return a copy in oneDNN's layout; None for a small matrix, or without a fast product of this dtype."""
    if weight.device.type != "cpu" or weight.numel() < LEAST:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    fast = weight.dtype == torch.float32
    if weight.dtype == torch.bfloat16:
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach()) if fast else None

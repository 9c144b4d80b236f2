"""Left shifts over packed sequences; inputs, labels and masks of each drafter depth.

At position t, depth d of the drafter (1, 2, ...) reads token t + d and predicts token t + 1 + d. With a token-aligned
loss mask m, depth d is trained at t only if m is 1 on all of t + 1, ..., t + 1 + d and these tokens are in one
sequence: an engine would generate all of them within one draft. m at t itself does not matter.

A whole batch is shifted before it is split for context parallelism, so nothing travels between ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shift_packed(x: Tensor, cu_seqlens: Tensor, steps: int = 1) -> Tensor:
    """Return `out[..., t] = x[..., t + steps]` where t + steps is in t's sequence, else 0; x `[..., T]`.

    `cu_seqlens [n + 1]` holds the boundaries, with padding if sequences are padded. Positions past its last entry
    belong to no sequence. Differentiable in `x`. Does not synchronise with the device.
    """
    total = x.shape[-1]
    t = torch.arange(total, device=cu_seqlens.device)
    is_beyond = t + steps >= _ends(cu_seqlens, total)
    shifted = x.roll(-steps, -1)  # wraps round at the end, which the mask below hides
    return shifted.masked_fill(is_beyond, 0)


def drafter_targets(
    tokens: Tensor, mask: Tensor, cu_seqlens: Tensor, depth: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return inputs, labels and loss masks of depths 1..depth, from token-aligned `tokens [T]` and `mask [T]`.

    Entry d - 1 of the three lists, all `[T]`: token t + d (the input), token t + 1 + d (the label), and 1 in the mask's
    type where that label is trained. Beyond a sequence's end all three are 0.
    """
    inputs = []
    labels = []
    masks = []
    token = shift_packed(tokens, cu_seqlens)
    trained = shift_packed(mask, cu_seqlens) != 0
    for steps in range(2, depth + 2):
        inputs.append(token)
        token = shift_packed(tokens, cu_seqlens, steps)
        labels.append(token)
        trained = trained & (shift_packed(mask, cu_seqlens, steps) != 0)
        masks.append(trained.to(mask.dtype))
    return inputs, labels, masks


def _ends(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return `[total]`, the end of each position's sequence; 0 for positions in no sequence."""
    ends = cu_seqlens[1:].long()
    # `right` skips empty sequences, which share their end with the sequence before
    positions = torch.arange(total, device=ends.device)
    sequence = torch.searchsorted(ends, positions, right=True)
    none = ends.new_zeros(1)
    return torch.cat([ends, none])[sequence]

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
    t = torch.arange(x.shape[-1], device=cu_seqlens.device)
    return x.roll(-steps, -1).masked_fill(t + steps >= _ends(cu_seqlens, x.shape[-1]), 0)


def drafter_targets(
    tokens: Tensor, mask: Tensor, cu_seqlens: Tensor, depth: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return inputs, labels and loss masks of depths 1..depth, from token-aligned `tokens [T]` and `mask [T]`.

    Entry d - 1 of the three lists, all `[T]`: token t + d (the input), token t + 1 + d (the label), and 1 in the mask's
    type where that label is trained. Beyond a sequence's end all three are 0.
    """
    shifted = [
        [shift_packed(x, cu_seqlens, steps) for x in (tokens, mask)]
        for steps in range(1, depth + 2)
    ]
    trained = shifted[0][1] != 0
    masks = []
    for _, ahead in shifted[1:]:
        trained = trained & (ahead != 0)
        masks.append(trained.to(mask.dtype))
    inputs = [shifted_tokens for shifted_tokens, _ in shifted[:-1]]
    labels = [shifted_tokens for shifted_tokens, _ in shifted[1:]]
    return inputs, labels, masks


def _ends(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return `[total]`, the end of each position's sequence; 0 for positions in no sequence."""
    ends = cu_seqlens[1:].long()
    # skips empty sequences
    sequence = torch.searchsorted(ends, torch.arange(total, device=ends.device), right=True)
    return torch.cat([ends, ends.new_zeros(1)])[sequence]

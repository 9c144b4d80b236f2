"""Left shifts over packed sequences, and what each drafter depth reads, predicts and may be trained on.

At position t the drafter's depth d (1, 2, ...) reads token t + d and predicts token t + 1 + d. With a token-aligned
loss mask m it is trained there only if m is 1 on all of t + 1, ..., t + 1 + d and these lie in one sequence: each is a
token that an engine would have had to generate within the same draft. m at t itself does not matter.
"""

from __future__ import annotations

import torch


def shift_packed(x: torch.Tensor, cu_seqlens: torch.Tensor, steps: int = 1, fill: float = 0) -> torch.Tensor:
    """`out[..., t] = x[..., t + steps]` where t + steps lies in t's sequence, else `fill`; x `[..., T]`, any dtype.

    `cu_seqlens [n + 1]` holds the boundaries as laid out (the padded ones, where sequences are padded). Positions past
    its last entry belong to no sequence. Differentiable in `x`; nothing is read back to the host.
    """
    if steps < 0:
        raise ValueError(f"steps={steps}, but the shift is to the left: steps >= 0")
    return x.roll(-steps, -1).masked_fill(_crosses(cu_seqlens, x.shape[-1], steps), fill)


def drafter_targets(
    tokens: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, depth: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Inputs, labels and loss masks of depths 1..depth, from token-aligned `tokens [T]` and `mask [T]`.

    Entry d - 1 of the three lists, all `[T]`: token t + d (read), token t + 1 + d (predicted), and 1 in the mask's type
    where that prediction is trained. Beyond a sequence's end all three are 0.
    """
    shifted = [shift_packed(tokens, cu_seqlens, steps) for steps in range(1, depth + 2)]
    trained = shift_packed(mask, cu_seqlens) != 0
    masks = []
    for steps in range(2, depth + 2):
        trained = trained & (shift_packed(mask, cu_seqlens, steps) != 0)
        masks.append(trained.to(mask.dtype))
    return shifted[:-1], shifted[1:], masks


def _crosses(cu_seqlens: torch.Tensor, total: int, steps: int) -> torch.Tensor:
    """`[total] bool`: t + steps lies beyond the end of t's sequence, or t in none."""
    t = torch.arange(total, device=cu_seqlens.device)
    ends = cu_seqlens[1:].contiguous().to(t.dtype)
    sequence = torch.searchsorted(ends, t, right=True)  # empty sequences are passed over: their end is not beyond t
    end = torch.cat([ends, t.new_zeros(1)])[sequence]
    return t + steps >= end

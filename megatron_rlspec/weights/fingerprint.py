"""A fingerprint of one tensor's bits: exact, cheap, and a sum over elements, so that shards add up to the whole."""

from __future__ import annotations

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64 with wrap-around; shifts are made logical by masking."""
    x = (x ^ ((x >> 30) & 0x3_FFFF_FFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1F_FFFF_FFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1_FFFF_FFFF)


def fingerprint(tensor: torch.Tensor, start: int = 0) -> int:
    """Σ over elements of mix(bits ^ mix(index)), modulo 2⁶⁴, as an unsigned integer.

    `start` is the flat index of the first element within the full tensor: contiguous shards' fingerprints add up
    (modulo 2⁶⁴) to the fingerprint of the whole. -0.0 and 0.0 differ; so do two NaNs with different bits.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_WORDS[flat.element_size()])
    total = 0
    for first in range(0, bits.numel(), _CHUNK):
        part = bits[first : first + _CHUNK].to(torch.int64)
        index = torch.arange(start + first, start + first + part.numel(), device=part.device)
        total += int(_mix(part ^ _mix(index + 1)).sum().item())
    return total % (1 << 64)

"""A fingerprint of one tensor's bits: exact, cheap, and a sum over elements, so that shards add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Difference:
    """Names that an engine lacks, has beyond what it was sent, or holds with other bits."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.missing or self.extra or self.differing)

    @property
    def names(self) -> tuple[str, ...]:
        return self.missing + self.extra + self.differing

    def __str__(self) -> str:
        parts = (("lacks", self.missing), ("has besides", self.extra), ("holds otherwise", self.differing))
        return "; ".join(f"{verb} {_list(names)}" for verb, names in parts if names) or "holds what it was sent"


def compare(expected: Mapping[str, int], held: Mapping[str, int]) -> Difference:
    """What an engine holds against what it was sent, both as name -> fingerprint."""
    return Difference(
        missing=tuple(sorted(expected.keys() - held.keys())),
        extra=tuple(sorted(held.keys() - expected.keys())),
        differing=tuple(sorted(name for name in expected.keys() & held.keys() if expected[name] != held[name])),
    )


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

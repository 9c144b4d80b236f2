"""Frequencies of rotary embeddings, plain and scaled. Trainer and embedded engine both take them from here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a config.json.

    base      of the angles
    factor    Llama 3.1's scaling, by which the slowest frequencies are divided; 1: none
    low       waves longer than original / low tokens are divided by `factor`
    high      waves shorter than original / high tokens stay; those between are interpolated
    original  context length before the scaling, in tokens
    """

    base: float = 10000.0
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> Rope:
        """Read a config.json that `models.config.check_config` accepts; its names are Transformers' 4 or 5."""
        stated = settings(hf_config)
        base = float(hf_config.get("rope_theta") or stated.get("rope_theta") or 10000.0)
        if kind(stated) == "default":
            return cls(base)
        return cls(
            base,
            float(stated["factor"]),
            float(stated["low_freq_factor"]),
            float(stated["high_freq_factor"]),
            int(stated["original_max_position_embeddings"]),
        )

    def frequencies(self, dims: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the angle of one position in each of `dims / 2` planes, `[dims / 2]` float32.

        Source of the scaling: Transformers' `modeling_rope_utils.py`, `_compute_llama3_parameters`.
        """
        exponent = torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims
        plain = 1.0 / self.base**exponent
        if self.factor == 1:
            return plain
        wavelength = 2 * math.pi / plain
        longest = self.original / self.low
        scaled = torch.where(wavelength > longest, plain / self.factor, plain)
        share = (self.original / wavelength - self.low) / (self.high - self.low)
        between = (1 - share) * scaled / self.factor + share * scaled
        inside = (wavelength >= self.original / self.high) & (wavelength <= longest)
        return torch.where(inside, between, scaled)


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding, under the names of Transformers 4 or 5."""
    return {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}


def kind(stated: Mapping[str, Any]) -> str:
    """Return the type of rotary embedding that `settings` states; "default" without one."""
    return str(stated.get("rope_type", stated.get("type", "default")))

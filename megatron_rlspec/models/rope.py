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
    factor    the slowest frequencies are divided by it; 1: none
    low       waves longer than original / low tokens are divided by `factor`
    high      waves shorter than original / high tokens stay; those between are interpolated
    original  context length before the scaling, in tokens
    yarn      interpolate as YaRN does, by the index of the frequency; as Llama 3.1 does, by its wave length
    mscale    YaRN of latent attention: the scores are multiplied by (0.1 · mscale · ln factor + 1)², cosine and sine by
              nothing; 0: not stated
    """

    base: float = 10000.0
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    yarn: bool = False
    mscale: float = 0.0

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> Rope:
        """Read a config.json that `models.config.check_config` accepts; its names are Transformers' 4 or 5."""
        stated = settings(hf_config)
        base = float(hf_config.get("rope_theta") or stated.get("rope_theta") or 10000.0)
        if kind(stated) == "default":
            return cls(base)
        if kind(stated) == "yarn":
            slow, fast = float(stated.get("beta_slow") or 1), float(stated.get("beta_fast") or 32)
            original = int(stated["original_max_position_embeddings"])
            mscale = float(stated.get("mscale_all_dim") or 0)
            return cls(
                base, float(stated["factor"]), slow, fast, original, yarn=True, mscale=mscale
            )
        return cls(
            base,
            float(stated["factor"]),
            float(stated["low_freq_factor"]),
            float(stated["high_freq_factor"]),
            int(stated["original_max_position_embeddings"]),
        )

    def frequencies(self, dims: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the angle of one position in each of `dims / 2` planes, `[dims / 2]` float32.

        Source of the scaling: Transformers' `modeling_rope_utils.py`, `_compute_llama3_parameters` and
        `_compute_yarn_parameters`.
        """
        exponent = torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims
        plain = 1.0 / self.base**exponent
        if self.factor == 1:
            return plain
        if self.yarn:
            share = self._unscaled(dims).to(device)
            return 1.0 / (self.factor * self.base**exponent) * (1 - share) + plain * share
        wavelength = 2 * math.pi / plain
        longest = self.original / self.low
        scaled = torch.where(wavelength > longest, plain / self.factor, plain)
        share = (self.original / wavelength - self.low) / (self.high - self.low)
        between = (1 - share) * scaled / self.factor + share * scaled
        inside = (wavelength >= self.original / self.high) & (wavelength <= longest)
        return torch.where(inside, between, scaled)

    @property
    def magnitude(self) -> float:
        """Return the factor on cosine and sine. YaRN thereby makes attention sharper, as its contexts are longer."""
        return (
            0.1 * math.log(self.factor) + 1
            if self.yarn and self.factor > 1 and not self.mscale
            else 1.0
        )

    def _unscaled(self, dims: int) -> Tensor:
        """Return, for each of YaRN's frequencies, the share that is not divided by `factor`, `[dims / 2]` float32."""
        # indices of the frequencies that turn so many times within the original context
        first, last = (
            dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            for turns in (self.high, self.low)
        )
        start, end = max(math.floor(first), 0), min(math.ceil(last), dims - 1)
        ramp = (torch.arange(dims // 2, dtype=torch.float32) - start) / (end - start or 0.001)
        return 1 - ramp.clamp(0, 1)


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding, under the names of Transformers 4 or 5."""
    return {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}


def kind(stated: Mapping[str, Any]) -> str:
    """Return the type of rotary embedding that `settings` states; "default" without one."""
    return str(stated.get("rope_type", stated.get("type", "default")))

"""Frequencies of rotary embeddings, plain and scaled. Trainer and embedded engine both take them from here.

The frequencies must be equal on both sides, or log-probs of engine and trainer differ. Transformers computes those of
scaled embeddings (`ROPE_INIT_FUNCTIONS`). `models/config.py` checks the settings before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Keys that are not part of the scaling. With `partial_rotary_factor` callers pass fewer channels (`dims`).
_NOT_SCALING = ("rope_theta", "partial_rotary_factor", "rope_type", "type")


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a config.json.

    base      `rope_theta`: plane i of d / 2 turns by base^(-2i/d) radians per position
    kind      type of the scaling: "default" (none), "llama3" or "yarn"
    settings  (name, value) pairs of the scaling, sorted, under Transformers' names. A tuple, so that the object is
              hashable
    """

    base: float = 10000.0
    kind: str = "default"
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> Rope:
        """Read a config.json that `models.config.check_config` accepts, with the names of Transformers 4 or 5."""
        stated = settings(hf_config)
        base = float(hf_config.get("rope_theta") or stated.get("rope_theta") or 10000.0)
        if kind(stated) == "default":
            return cls(base)
        scaling = {key: value for key, value in stated.items() if key not in _NOT_SCALING}
        return cls(base, kind(stated), tuple(sorted(scaling.items())))

    @property
    def factor(self) -> float:
        """Return the number by which the slowest frequencies are divided; 1: no scaling."""
        return float(dict(self.settings).get("factor", 1))

    @property
    def mscale(self) -> float:
        """Return `mscale_all_dim` of latent attention; 0: not stated.

        Scores of latent attention are multiplied by (0.1 · mscale · ln factor + 1)², its cosine and sine by nothing.
        """
        return float(dict(self.settings).get("mscale_all_dim") or 0)

    @property
    def magnitude(self) -> float:
        """Return the factor by which the caller multiplies cosine and sine; 1 for the plain embedding.

        With YaRN it makes attention sharper, because contexts are longer.
        """
        if self.kind == "default":
            return 1.0
        # The factor does not depend on the number of channels; 2 is the smallest one that has a frequency.
        return self._scaled(2, "cpu")[1]

    def frequencies(self, dims: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the radians per position in each of `dims / 2` planes, `[dims / 2]` float32.

        dims  channels of a head that are rotated, an even number
        """
        if self.kind == "default":
            exponent = torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims
            return 1.0 / self.base**exponent
        return self._scaled(dims, device)[0]

    def _scaled(self, dims: int, device: torch.device | str) -> tuple[Tensor, float]:
        """Return frequencies `[dims / 2]` and the factor on cosine and sine, by Transformers' function."""
        # Imported only now: the import takes seconds, and most models do not need it.
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaling = dict(self.settings)
        config = LlamaConfig(
            head_dim=dims,
            rope_theta=self.base,
            rope_scaling={"rope_type": self.kind, "rope_theta": self.base, **scaling},
            max_position_embeddings=int(
                scaling["factor"] * scaling["original_max_position_embeddings"]
            ),
        )
        # Transformers makes some tensors on torch's default device, which is meta in a dry run, and not on `device`.
        with torch.device(device):
            return ROPE_INIT_FUNCTIONS[self.kind](config, device)


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding: `rope_scaling` (Transformers 4) with `rope_parameters` (5) over it.

    {} if config.json has neither. `Trained.rope` in `models/config.py` joins them in the same way.
    """
    return {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}


def kind(stated: Mapping[str, Any]) -> str:
    """Return the type of rotary embedding that `settings` states; "default" without one."""
    return str(stated.get("rope_type", stated.get("type", "default")))

"""The config.json of an EAGLE-3 drafter. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_rlspec.models.config import (
    EAGLE3,
    CheckpointError,
    Llama,
    Size,
    shown,
    validated,
    without_unknown,
)

_TAPPED = "eagle_aux_hidden_state_layer_ids"
_JOINED_NORM = "norm_before_fc"


class Eagle3(Llama):
    """The config.json of an EAGLE-3 drafter, as SGLang's `models/llama_eagle3.py` and SpecForge write and read it."""

    draft_vocab_size: Size
    tie_word_embeddings: Literal[False] = Field(
        False, description="the drafter has a head of its own"
    )  # type: ignore[assignment]
    target_hidden_size: Size | None = None
    num_aux_hidden_states: Size | None = None
    eagle_config: dict[str, Any] | None = None
    fc_norm: bool | None = None  # norm the hidden states of each layer that it reads
    use_aux_norm: bool | None = None  # an older name of fc_norm
    norm_before_fc: bool | None = None  # norm all of them together; eagle_config may state it
    norm_output: bool | None = None  # the next draft reads the state after the final norm

    @model_validator(mode="after")
    def _aux_hidden_states(self) -> Eagle3:
        stated = self.eagle_config or {}
        for key, value in stated.items():
            if key not in ("use_aux_hidden_state", _JOINED_NORM, _TAPPED) and value:
                raise ValueError(
                    f"eagle_config.{key}={shown(value)}: not implemented; expected no such key"
                )
        if stated.get("use_aux_hidden_state", True) is not True:
            raise ValueError("eagle_config.use_aux_hidden_state: only true is implemented")
        ids = stated.get(_TAPPED)
        if ids is not None and (not isinstance(ids, list) or any(type(i) is not int for i in ids)):
            raise ValueError(
                f"eagle_config.{_TAPPED}={shown(ids)}: expected a list of layer numbers"
            )
        return self

    @property
    def norms_each(self) -> bool:
        """Return whether the hidden states of each layer that it reads are normed before `fc`."""
        return bool(self.fc_norm or self.use_aux_norm)

    @property
    def norms_joined(self) -> bool:
        """Return whether the hidden states are normed together before `fc`, and before the norms of each."""
        return bool((self.eagle_config or {}).get(_JOINED_NORM, self.norm_before_fc))

    @property
    def tapped(self) -> int:
        """Return how many layers of the target it reads."""
        return len((self.eagle_config or {}).get(_TAPPED) or (0, 0, 0))

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return the layers of a target of `layers` layers whose inputs the drafter reads, counted from 0.

        `eagle_aux_hidden_state_layer_ids` names layers by their outputs; without them these are SGLang's default.
        Raises ValueError for layers that the target cannot give: SGLang then computes on, and accepts no draft.
        """
        ids = (self.eagle_config or {}).get(_TAPPED)
        found = (2, layers // 2, layers - 3) if ids is None else tuple(i + 1 for i in ids)
        if (
            len(found) < 2
            or list(found) != sorted(set(found))
            or found[0] < 0
            or found[-1] >= layers
        ):
            raise ValueError(
                f"eagle_config.{_TAPPED}={'SGLang default ' if ids is None else ''}{[i - 1 for i in found]}: "
                f"the target has {layers} layers; expected "
                f"at least two ascending numbers from -1 (its embedding) to {layers - 2}"
            )
        if self.num_aux_hidden_states not in (None, len(found)):
            raise ValueError(
                f"num_aux_hidden_states={self.num_aux_hidden_states}: expected {len(found)}, as layers"
            )
        return found


def layer_of_drafter(index: int) -> str:
    """Return what the names of an EAGLE-3 drafter's layer begin with, as SGLang and SpecForge name them."""
    return f"layers.{index}." if index else "midlayer."


def check_drafter_config(config: Mapping[str, Any], where: str) -> Eagle3:
    """Check the config.json of an EAGLE-3 drafter and return it typed. Raises CheckpointError."""
    names = config.get("architectures")
    if names != [EAGLE3]:
        raise CheckpointError(
            f"config.json of {where}: architectures={shown(names)}; expected [{EAGLE3}], as SpecForge writes it"
        )
    found = validated(Eagle3, config, where)
    without_unknown(found, EAGLE3, where)
    return found

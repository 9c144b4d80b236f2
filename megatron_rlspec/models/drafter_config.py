"""The config.json of an EAGLE-3 drafter: its keys, what follows from them, and its check without the target's.

`check_drafter_config` is the entry; `conversion/eagle3.py` compares drafter and target. No import of torch, as in
`config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_rlspec.models.config import (
    EAGLE3,
    CheckpointError,
    Llama,
    Size,
    refuse_unknown_keys,
    shown,
    validated,
)


class EagleConfig(BaseModel):
    """`eagle_config` in the config.json of an EAGLE-3 drafter. Any other key in it is refused.

    eagle_aux_hidden_state_layer_ids  layers of the target whose outputs the drafter reads, from 0; -1: its embedding
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    use_aux_hidden_state: Literal[True] = True
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_fc: bool | None = None


class Eagle3(Llama):
    """The config.json of an EAGLE-3 drafter, as SGLang's `models/llama_eagle3.py` and SpecForge write and read it.

    draft_vocab_size       S, the number of tokens that it chooses drafts from: the rows of its output head
    target_hidden_size     of the target; None: as the drafter's own
    num_aux_hidden_states  how many layers of the target it reads; None: as `eagle_config` says

    `norms_each` and `norms_joined` can each be stated under two keys. The properties decide as SGLang does.
    """

    draft_vocab_size: Size
    tie_word_embeddings: Literal[False] = Field(
        False, description="the drafter has a head of its own"
    )  # type: ignore[assignment]
    target_hidden_size: Size | None = None
    num_aux_hidden_states: Size | None = None
    eagle_config: EagleConfig | None = Field(
        None, description="its other settings are not implemented"
    )
    fc_norm: bool | None = None  # norm the hidden states of each layer that it reads
    use_aux_norm: bool | None = None  # an older name of fc_norm
    norm_before_fc: bool | None = None  # norm all of them together; eagle_config may state it
    norm_output: bool | None = None  # the next draft reads the state after the final norm

    @property
    def settings(self) -> EagleConfig:
        """Return `eagle_config`, with defaults where it is not there."""
        return self.eagle_config or EagleConfig()

    @property
    def norms_each(self) -> bool:
        """Return whether the hidden states of each layer that it reads are normed before `fc`."""
        return bool(self.fc_norm or self.use_aux_norm)

    @property
    def norms_joined(self) -> bool:
        """Return whether the hidden states are normed together before `fc`, and before the norms of each."""
        stated = self.settings.norm_before_fc
        return bool(self.norm_before_fc if stated is None else stated)

    @property
    def layers_read(self) -> int:
        """Return how many layers of the target it reads: as many as `taps` has, without the target's config.json."""
        # three by SGLang's default, as in `taps`, which refuses an empty list
        return len(self.settings.eagle_aux_hidden_state_layer_ids or (0, 0, 0))

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return the layers of a target of `layers` layers whose inputs the drafter reads, counted from 0, ascending.

        config.json names layers by their outputs (`eagle_aux_hidden_state_layer_ids`), and the output of layer i is the
        input of layer i + 1. Without that key these are SGLang's default (`set_eagle3_layers_to_capture`).

        Raises ValueError for layers that the target cannot give: SGLang then computes on, and accepts no draft.
        """
        ids = self.settings.eagle_aux_hidden_state_layer_ids
        taps = (2, layers // 2, layers - 3) if ids is None else tuple(i + 1 for i in ids)
        if len(taps) < 2 or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= layers:
            default = "SGLang's default " if ids is None else ""
            raise ValueError(
                f"eagle_config.eagle_aux_hidden_state_layer_ids={default}{[i - 1 for i in taps]}: the target has "
                f"{layers} layers; expected at least two ascending numbers from -1 (its embedding) to {layers - 2}"
            )
        if self.num_aux_hidden_states not in (None, len(taps)):
            raise ValueError(
                f"num_aux_hidden_states={self.num_aux_hidden_states}: expected {len(taps)}, as layers"
            )
        return taps


def layer_of_drafter(index: int) -> str:
    """Return the prefix of the tensors of layer `index`, as SGLang and SpecForge name them."""
    return f"layers.{index}." if index else "midlayer."


def check_drafter_config(config: Mapping[str, Any], where: str) -> Eagle3:
    """Check the config.json of an EAGLE-3 drafter alone and return it typed. Raises CheckpointError.

    `conversion.eagle3.check_drafter` also compares it with its target and with its tensors.
    """
    names = config.get("architectures")
    if names != [EAGLE3]:
        raise CheckpointError(
            f"config.json of {where}: architectures={shown(names)}; expected [{EAGLE3}], as SpecForge writes it"
        )
    typed = validated(Eagle3, config, where)
    refuse_unknown_keys(typed, EAGLE3, where)
    return typed

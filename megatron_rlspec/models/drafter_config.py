"""The config.json of an EAGLE-3 drafter: its keys, what follows from them, and its check without the target's.

`check_drafter_config` is the entry. `conversion/eagle3.py` compares drafter and target. This module does not import
torch, which takes seconds (as `config.py`).
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

    use_aux_hidden_state              the drafter reads hidden states of several layers; false is not implemented
    eagle_aux_hidden_state_layer_ids  layers of the target whose outputs the drafter reads, counted from 0, ascending;
                                      -1: the target's embedding; None: SGLang's default (`Eagle3.taps`)
    norm_before_fc                    see `Eagle3.norms_joined`; None: the key of that name beside `eagle_config` counts
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    use_aux_hidden_state: Literal[True] = True
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_fc: bool | None = None


class Eagle3(Llama):
    """The config.json of an EAGLE-3 drafter, as SpecForge writes it and SGLang's `models/llama_eagle3.py` reads it.

    draft_vocab_size       S, the number of tokens that the drafter chooses drafts from: the rows of its output head
    target_hidden_size     H of the target, which must be the drafter's own (`conversion/eagle3.py`); None: not stated
    num_aux_hidden_states  how many layers of the target the drafter reads; None: as `eagle_config` says

    Read `norms_each` and `norms_joined`, not the keys behind them: each can be stated under two keys. The properties
    decide as SGLang does, but for one case: if `eagle_config.norm_before_fc` is an explicit null, SGLang ignores the
    other key, and `norms_joined` reads it.
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
    fc_norm: bool | None = None  # norm the hidden states of each layer alone
    use_aux_norm: bool | None = None  # an older name of fc_norm
    # norm the hidden states of all layers together; `eagle_config` may state it
    norm_before_fc: bool | None = None
    # the next draft reads the state after the final norm, not before it
    norm_output: bool | None = None

    @property
    def settings(self) -> EagleConfig:
        """Return `eagle_config`, with defaults where it is not there."""
        return self.eagle_config or EagleConfig()

    @property
    def norms_each(self) -> bool:
        """Return whether the hidden states of each layer that the drafter reads are normed alone, before `fc`."""
        return bool(self.fc_norm or self.use_aux_norm)

    @property
    def norms_joined(self) -> bool:
        """Return whether the hidden states of all layers are normed together, before `fc`.

        If `norms_each` is true, too, this norm comes first.
        """
        stated = self.settings.norm_before_fc
        return bool(self.norm_before_fc if stated is None else stated)

    @property
    def layers_read(self) -> int:
        """Return how many layers of the target the drafter reads: the length of `taps`, which needs the target.

        `num_aux_hidden_states` is not read: `taps` refuses another number there.
        """
        # Without the key there are three, SGLang's default, as in `taps`. An empty list gives three here, too, but
        # `taps` refuses it.
        return len(self.settings.eagle_aux_hidden_state_layer_ids or (0, 0, 0))

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return the layers of a target of `layers` layers whose inputs the drafter reads, counted from 0, ascending.

        config.json names layers by their outputs (`eagle_aux_hidden_state_layer_ids`), and the output of layer i is the
        input of layer i + 1. Without that key these are SGLang's default (`set_eagle3_layers_to_capture`).

        Raises ValueError for fewer than two layers (the width must tell the target's states from the drafter's own,
        `rollout/embedded/model.py`), for layers out of order or that the target lacks (SGLang would read them in order,
        and leave those out), and if `num_aux_hidden_states` is another number.
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
    """Return the prefix of the tensors of the drafter's layer `index`, from 0, as SGLang and SpecForge name them."""
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

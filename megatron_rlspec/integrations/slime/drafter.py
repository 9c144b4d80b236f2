"""The MTP layers of slime's model, as a drafter with a step of its own.

slime builds, loads, saves and pushes the MTP layers. It wraps the whole model into one DDP and one optimizer. The MTP
layers are frozen (`requires_grad` False) meanwhile, so that neither DDP nor optimizer contains them. Afterwards they
get gradient buffers and an AdamW of their own. They are trainable only inside `SlimeMTP.trainable`: Megatron's gradient
finalisation runs over every trainable parameter of the model and would include them. slime's own MTP loss never runs.

`hooks.py` makes a `SlimeMTP` on each rank of the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rlspec.cotrainer.drafter import DrafterTraining
from megatron_rlspec.cotrainer.fields import DrafterFields
from megatron_rlspec.integrations.slime import routing
from megatron_rlspec.integrations.slime.options import Options, rollout_sampling
from megatron_rlspec.models.families import FAMILIES
from megatron_rlspec.models.rope import Rope
from megatron_rlspec.train.attention import PackedAttention
from megatron_rlspec.train.drafter import Drafter, MTPDrafter
from megatron_rlspec.train.drafter_step import DrafterObjective, objective_of


def slime_objective(options: Options, args: Any) -> DrafterObjective:
    """Return what the drafter of a slime run learns and predicts; `args` are slime's."""
    return objective_of(
        options.drafter, rollout_sampling(args), options.candidate_steps, options.verifier
    )


class AdoptedMTP(MTPDrafter):
    """A drafter around the MTP layer of slime's model, for depths above 1, with grouped-query attention.

    In training a depth reads the keys and values that a chain of drafts would have in an engine.

    It shares the layer's parameters. `__init__` does not call `MTPDrafter`'s, which would build another layer.
    """

    def __init__(self, model: GPTModel, zero_first_embedding: bool, rope: Rope) -> None:
        # The losses are divided by the step's global count already: DDP must not scale their gradients.
        config = replace(model.config, calculate_per_token_loss=True)
        config.rotary_percent = model.rotary_percent  # as train.model.DecoderConfig has it
        MegatronModule.__init__(self, config=config)
        self.mtp = model.mtp
        self.zero_first_embedding = zero_first_embedding
        self.rope = rope
        self.recompute = config.recompute_granularity == "full"


class SlimeMTP(DrafterTraining):
    """The MTP layers of slime's model: frozen while slime wraps it into DDP.

    Make it right after the model is built, before slime wraps the model. Call `make_ready` once slime has loaded a
    checkpoint (`hooks.py` does both).
    """

    def __init__(
        self, model: GPTModel, options: Options, args: Any, hf_config: Mapping[str, Any]
    ) -> None:
        """`args` are slime's; `hf_config` is config.json of the policy. Raises ValueError for another rotary base."""
        super().__init__(
            model,
            options.drafter,
            slime_objective(options, args),
            temperature=args.rollout_temperature,
            clip_grad=args.clip_grad,  # slime clips the norm of the policy's gradient without the drafter's
        )
        family = FAMILIES.get(hf_config["architectures"][0])
        self._zero_first_embedding = family is not None and family.zero_first_embedding
        self._rope = Rope.of(hf_config.get("text_config", hf_config))
        # Depth 1 takes Megatron's own rotary embedding; deeper ones take `Rope`, which reads config.json.
        if options.drafter.depth > 1 and self._rope.base != model.rotary_base:
            raise ValueError(
                f"config.json has rope_theta={self._rope.base:g}, but the model was built with --rotary-base "
                f"{model.rotary_base:g}; expected the same"
            )
        model.mtp.requires_grad_(False)  # before slime wraps the model into DDP
        routing.leave_out(model.mtp)

    def build(self) -> Drafter:
        """Return a drafter around the model's MTP layer. For depths above 1 the layer's attention is replaced."""
        if self.settings.depth > 1:
            attention = self.model.mtp.layers[0].transformer_layer.self_attention
            attention.core_attention = PackedAttention(
                attention.config, attention.layer_number, attention.attn_mask_type, "self"
            )
        return AdoptedMTP(self.model, self._zero_first_embedding, self._rope)

    def on_hidden(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any] | None = None
    ) -> None:
        """As `DrafterTraining.on_hidden`; the MTP layer's router chooses its experts itself."""
        with routing.unreplayed():
            super().on_hidden(hidden, fields, given)

    def unroll(
        self, hidden: Tensor, fields: DrafterFields, given: Mapping[str, Any]
    ) -> list[Tensor]:
        """As `DrafterTraining.unroll`. Depth 1 runs Megatron's own layer, so that it works with any attention."""
        if self.settings.depth > 1:
            return super().unroll(hidden, fields, given)
        model = self.model
        with torch.no_grad():
            # [t / tp, 1, H], of the tokens that follow each position. The embedding is the policy's: no gradient.
            embedded = model.embedding(input_ids=fields.tokens[0][None], position_ids=None)
            if self._zero_first_embedding:
                if model.config.sequence_parallel:
                    raise ValueError(
                        "--drafter.depth 1 with sequence parallelism and MiMo's rule for position 0; set 2"
                    )
                first = fields.position_ids == 0
                embedded = embedded.masked_fill(first[:, None, None], 0)
        out = model.mtp.layers[0]._proj_and_transformer_layer(
            hidden_states=hidden,
            decoder_input=embedded,
            rotary_pos_emb=given.get("rotary_pos_emb"),
            rotary_pos_cos=given.get("rotary_pos_cos"),
            rotary_pos_sin=given.get("rotary_pos_sin"),
            packed_seq_params=given.get("packed_seq_params"),
        )
        return [self.gather(out)[:, 0]]  # [t, 1, H] without its batch dimension

    @contextmanager
    def trainable(self) -> Iterator[None]:
        """Let the MTP layer be trained inside the `with` block, and nowhere else."""
        self.model.mtp.requires_grad_(True)
        try:
            yield
        finally:
            self.model.mtp.requires_grad_(False)

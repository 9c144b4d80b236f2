"""[drafter]: how the drafter is trained."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from megatron_rlspec.config.base import FUNCTION, LearningRate, Name, Section, Weight

LOSSES = ("ce", "forward_kl", "reverse_kl", "tv")


class DrafterConfig(Section):
    train: bool = Field(True, description="train the drafter together with the policy")
    depth: Annotated[int, Field(gt=0, le=64)] = Field(3, description="drafted tokens per position that are trained")
    repeated_layer: bool = Field(
        True, description="true: one MTP layer for all depths, as the engine drafts; false: a layer for each depth"
    )
    mtp_detach_heads: bool = Field(
        True, description="true: the drafter's loss does not reach the policy; false: it trains the policy too"
    )
    loss: Name = Field(
        "ce",
        description="distance to the policy p of the draft q: ce: -log q(token); forward_kl: KL(p, q); reverse_kl: "
        "KL(q, p); tv: total variation, 1 - acceptance rate; or module:function, see examples/custom_loss",
    )
    depth_decay: float = Field(0.8, gt=0, le=1, description="weight of depth d is depth_decay ** (d - 1)")
    lr: LearningRate = Field(1e-4, description="learning rate of the drafter")
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        20,
        description="steps over which the drafter's learning rate rises linearly from 0; earlier updates count, "
        "if model.path holds their moments; 0: none",
    )
    weight_decay: Weight = Field(0.0, description="AdamW's decoupled weight decay of the drafter")
    clip_grad: Weight = Field(1.0, description="largest norm of the drafter's gradient; 0: not clipped")

    @model_validator(mode="after")
    def _known_loss(self) -> DrafterConfig:
        if self.loss not in LOSSES and not FUNCTION.fullmatch(self.loss):
            known = "'ce', 'forward_kl', 'reverse_kl' or 'tv'"
            raise ValueError(f"loss={self.loss}: expected {known}, or module:function (got {self.loss!r})")
        return self

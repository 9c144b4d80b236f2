"""[drafter]: how the drafter is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rlspec.config.base import Positive, Section


class DrafterConfig(Section):
    train: bool = Field(True, description="co-train the drafter with the policy")
    depth: Positive = Field(3, description="unrolled drafter steps trained")
    repeated_layer: bool = Field(True, description="one MTP layer unrolled exactly as the engine drafts")
    mtp_detach_heads: bool = Field(True, description="false: classic joint training, which moves the policy")
    loss: Literal["ce", "forward_kl", "reverse_kl", "tv"] = Field("ce", description="training objective")
    depth_decay: float = Field(0.8, gt=0, le=1, description="weight of depth d is depth_decay ** (d - 1)")
    lr: float = Field(1e-4, gt=0, description="learning rate of the drafter")
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="its own gradient norm; 0: none")

"""[algorithm]: the policy's loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Count, Section


class AlgorithmConfig(Section):
    ratio: Literal["token", "sequence", "cispo"] = Field("token", description="token: GRPO; sequence: GSPO; cispo")
    normalise_std: bool = Field(True, description="divide a group's advantages by its standard deviation")
    clip_low: float = Field(0.2, ge=0, description="lower clip of the ratio is 1 - clip_low")
    clip_high: float = Field(0.28, ge=0, description="upper clip of the ratio is 1 + clip_high")
    dual_clip: float = Field(0.0, ge=0, description="bound on the loss of negative advantages; 0: none, else > 1")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference policy")
    kl_kind: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of that KL")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    aggregation: Literal["token", "sample", "constant"] = Field("token", description="how token losses are averaged")
    old_logprobs: Literal["recompute", "engine"] = Field("recompute", description="denominator of the ratio")
    tis_clip: float = Field(2.0, ge=0, description="cap on the train/engine importance weight; 0: none")
    stale_clip: float = Field(2.0, gt=0, description="cap on that weight for tokens drawn by an older policy")
    dynamic_sampling: bool = Field(False, description="drop groups whose rewards are all equal, and refill")
    overlong_tokens: Count = Field(0, description="length of the soft penalty zone before max_new_tokens; 0: none")

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1, or 0 for none")
        if self.dual_clip and self.ratio == "cispo":
            raise ValueError(f"dual_clip={self.dual_clip} bounds a clipped loss, but ratio=cispo does not clip it")
        return self

"""[optimizer]: Adam and its learning rate."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Count, Section


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0, description="learning rate of the policy")
    warmup_steps: Count = Field(0, description="linear warm-up")
    decay_steps: Count = Field(0, description="linear decay to a tenth over so many steps, drafter too; 0: none")
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="global gradient norm; 0: none")
    distributed: bool = Field(False, description="Megatron's distributed optimizer (ZeRO-1)")

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if 0 < self.decay_steps < self.warmup_steps:
            raise ValueError(f"decay_steps={self.decay_steps} end before warmup_steps={self.warmup_steps} do")
        return self

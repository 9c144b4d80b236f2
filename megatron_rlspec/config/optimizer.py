"""[optimizer]: Adam for the policy."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Count, LearningRate, Section, Weight


class OptimizerConfig(Section):
    lr: LearningRate = Field(1e-6, description="learning rate of the policy")
    warmup_steps: Count = Field(
        0, description="optimizer steps over which the learning rate rises linearly from 0"
    )
    decay_steps: Count = Field(
        0,
        description="optimizer steps until both learning rates, also drafter.lr, have fallen linearly to a tenth; "
        "0: no fall",
    )
    weight_decay: Weight = Field(0.0, description="AdamW's decoupled weight decay")
    beta2: float = Field(
        0.95, ge=0, lt=1, description="Adam's decay of the mean squared gradient, drafter too"
    )
    clip_grad: Weight = Field(
        1.0,
        description="largest norm of the policy's gradient, and of the drafter's; 0: not clipped",
    )
    distributed: bool | None = Field(
        None,
        description="split Adam's state over data-parallel ranks (Megatron's, ZeRO-1); auto: on with more than one of "
        "them on GPUs",
    )
    offload: bool | None = Field(
        None,
        description="keep Adam's state and the float32 weights in host memory while engines on the ranks' GPUs "
        "generate (bfloat16 models); auto: on where the KV cache is too small for a step's samples without it",
    )

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        if 0 < self.decay_steps < self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} end before warmup_steps={self.warmup_steps} do"
            )
        return self

"""[parallel]: Megatron's parallel sizes."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Positive, Section


class ParallelConfig(Section):
    tensor: Positive = Field(1, description="tensor parallel size")
    pipeline: Positive = Field(1, description="pipeline parallel size")
    context: Positive = Field(1, description="context parallel size")
    expert: Positive = Field(1, description="expert parallel size")
    sequence: bool = Field(False, description="sequence parallelism along the tensor parallel ranks")
    recompute: bool = Field(False, description="recompute every layer in the backward pass")

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor > 1, but tensor=1")
        return self

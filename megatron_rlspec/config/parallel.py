"""[parallel]: Megatron's parallel sizes. Data parallelism takes the ranks that are left."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Section

Ranks = Annotated[int, Field(gt=0, le=65536)]


class ParallelConfig(Section):
    tensor: Ranks = Field(1, description="tensor parallel size")
    pipeline: Ranks = Field(1, description="pipeline parallel size")
    context: Ranks = Field(1, description="context parallel size")
    expert: Ranks = Field(1, description="expert parallel size")
    sequence: bool = Field(False, description="sequence parallelism over the tensor parallel ranks")
    recompute: bool = Field(False, description="recompute every layer in the backward pass, to save memory")

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor > 1, but tensor=1")
        return self

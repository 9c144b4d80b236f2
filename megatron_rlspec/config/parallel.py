"""[parallel]: Megatron's parallel sizes. Data parallelism takes the ranks that are left."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Section

Ranks = Annotated[int, Field(gt=0, le=65536)]


class ParallelConfig(Section):
    tensor: Ranks = Field(1, description="tensor parallel size")
    pipeline: Ranks = Field(1, description="pipeline parallel size")
    context: Ranks = Field(1, description="context parallel size")
    expert: Ranks = Field(
        1, description="expert parallel size; it divides context x data parallel size"
    )
    sequence: bool = Field(False, description="sequence parallelism over the tensor parallel ranks")
    recompute: bool | None = Field(
        None,
        description="recompute every layer in the backward pass, to save memory; auto: on if a rank does not fit its "
        "GPU without",
    )

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor > 1, but tensor=1")
        return self

    @property
    def packed(self) -> int:
        """Return the number of which the tokens of a micro-batch are a multiple (`packing/pack.py`)."""
        halves = 2 if self.context > 1 else 1
        return self.context * math.lcm(halves, self.tensor if self.sequence else 1)

    def expert_problem(self, world: int) -> str:
        """Say in one line why `expert` does not fit a job of `world` ranks; "" if it does."""
        replicas = world // (self.tensor * self.pipeline)
        if replicas % self.expert == 0:
            return ""
        sizes = f"{world} ranks / (parallel.tensor={self.tensor} x pipeline={self.pipeline})"
        return f"parallel.expert={self.expert} must divide the {replicas} ranks that share experts: {sizes}"

"""[parallel], [placement], [push]: the ranks and GPUs of a run, and how weights travel between them.

`run/loading.py` places ranks and engines by [placement]. parallel.recompute=None is `auto` for users:
`memory_choices.py` decides it before the run is built.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Name, Needs, Section

Ranks = Annotated[int, Field(gt=0, le=65536)]
Mode = Literal["auto", "disaggregated", "colocated"]


class ParallelConfig(Section):
    """[parallel]: Megatron's parallel sizes. Data parallelism takes the ranks that are left."""

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
    def pack_multiple(self) -> int:
        """Return the number of which the tokens of a micro-batch are a multiple: `batch_unit` in `packing/pack.py`.

        Context parallelism cuts a sequence into two chunks for each rank; sequence parallelism cuts a rank's tokens
        over the tensor-parallel ranks.
        """
        halves = 2 if self.context > 1 else 1
        return self.context * math.lcm(halves, self.tensor if self.sequence else 1)

    def expert_problem(self, world: int) -> str:
        """Return in one line why `expert` does not fit a job of `world` ranks; "" if it does."""
        replicas = world // (self.tensor * self.pipeline)
        if replicas % self.expert == 0:
            return ""
        sizes = f"{world} ranks / (parallel.tensor={self.tensor} x pipeline={self.pipeline})"
        return f"parallel.expert={self.expert} must divide the {replicas} ranks that share experts: {sizes}"


class PlacementConfig(Section):
    """[placement]: which GPUs of this node train, and which ones the engines that the run launches have."""

    mode: Annotated[Mode, Needs("rollout.engine=sglang"), Needs("rollout.urls=")] = Field(
        "auto",
        description="disaggregated: trainer ranks have the first GPUs, engines the rest; colocated: engines share "
        "the ranks' GPUs and release their memory while training; auto: disaggregated if there are fewer ranks than "
        "GPUs. Without a GPU, and with rollout.urls, nothing is placed",
    )
    tensor: Annotated[int, Field(gt=0, le=64), Needs("rollout.engine=sglang")] = Field(
        1, description="GPUs of one engine: its tensor parallel size"
    )


class PushConfig(Section):
    """[push]: how weights travel to SGLang engines."""

    transport: Annotated[
        Literal["auto", "http", "handles", "group"], Needs("rollout.engine=sglang")
    ] = Field(
        "auto",
        description="http: in requests; handles: in rank 0's GPU memory, which engines read; group: one broadcast "
        "over NCCL, or gloo where engines share the ranks' GPUs. auto: handles to engines that share the ranks' GPUs, "
        "if these can read each other's memory; group to other engines that the run places on GPUs; http elsewhere",
    )
    address: Annotated[Name, Needs("push.transport=group", "push.transport=auto")] = Field(
        "127.0.0.1", description="transport=group: address at which engines reach this machine"
    )

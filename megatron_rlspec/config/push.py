"""[push]: how weights travel to SGLang engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_rlspec.config.base import Name, Needs, Section


class PushConfig(Section):
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

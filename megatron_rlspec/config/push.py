"""[push]: how weights travel to SGLang engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_rlspec.config.base import Name, Needs, Section


class PushConfig(Section):
    transport: Annotated[
        Literal["auto", "http", "ipc", "handles", "group"], Needs("rollout.engine=sglang")
    ] = Field(
        "auto",
        description="http: in requests; ipc: in memory that engines on the same machine map; handles: the same in the "
        "trainer's GPU, which engines must see; group: over NCCL, or gloo without a GPU. auto: http to engines at "
        "rollout.urls, group to those that the run places on GPUs of their own, handles to one on the trainer's only "
        "GPU, ipc to all others",
    )
    address: Annotated[Name, Needs("push.transport=group", "push.transport=auto")] = Field(
        "127.0.0.1", description="transport=group: address at which engines reach this machine"
    )

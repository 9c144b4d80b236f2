"""[push]: how weights travel to SGLang engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Name, Needs, Section


class PushConfig(Section):
    transport: Annotated[Literal["auto", "http", "files", "group", "ipc"], Needs("rollout.engine=sglang")] = Field(
        "auto",
        description="http: in requests; files: in a shared directory; group: over NCCL, or gloo without a GPU. auto: "
        "group to engines that the run places on GPUs of their own, files on shared GPUs, otherwise http",
    )
    directory: Annotated[Name, Needs("push.transport=files", "push.transport=auto")] = Field(
        "/dev/shm", description="transport=files: a directory that trainer and engines both see"
    )
    address: Annotated[Name, Needs("push.transport=group", "push.transport=auto")] = Field(
        "127.0.0.1", description="transport=group: address at which engines reach this machine"
    )

    @model_validator(mode="after")
    def _consistent(self) -> PushConfig:
        if self.transport == "ipc":
            raise ValueError(
                "transport=ipc: SGLang takes CUDA IPC handles as pickles only, and nothing from a network "
                "is unpickled here; expected http or files, or slime with --colocate"
            )
        return self

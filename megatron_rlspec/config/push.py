"""[push]: how weights travel to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rlspec.config.base import Section


class PushConfig(Section):
    transport: Literal["http", "files", "group"] = Field("http", description="how weights travel to SGLang engines")
    directory: str = Field("/dev/shm", description="of transport=files: seen by the trainer and by every engine")
    address: str = Field("127.0.0.1", description="of transport=group: this machine, as engines reach it")

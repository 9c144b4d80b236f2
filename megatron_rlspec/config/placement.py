"""[placement]: which GPUs of this node train, and which ones the engines that the run launches have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_rlspec.config.base import Needs, Section

Mode = Literal["auto", "disaggregated", "colocated"]


class PlacementConfig(Section):
    mode: Annotated[Mode, Needs("rollout.engine=sglang"), Needs("rollout.urls=")] = Field(
        "auto",
        description="disaggregated: trainer ranks have the first GPUs, engines the rest; colocated: engines share "
        "the ranks' GPUs and release their memory while training; auto: disaggregated if there are fewer ranks than "
        "GPUs. Without a GPU, and with rollout.urls, nothing is placed",
    )
    tensor: Annotated[int, Field(gt=0, le=64), Needs("rollout.engine=sglang")] = Field(
        1, description="GPUs of one engine: its tensor parallel size"
    )

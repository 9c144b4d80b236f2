"""[placement]: which GPUs of this node train, and which ones the engines that the run launches have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_rlspec.config.base import Needs, Seconds, Section


class PlacementConfig(Section):
    mode: Literal["auto", "apart", "together"] = Field(
        "auto",
        description="apart: trainer ranks have the first GPUs, engines the rest; together: engines share the ranks' "
        "GPUs and release their memory while training; auto: apart if torchrun started fewer ranks than GPUs. "
        "Without a GPU, and with rollout.urls, nothing is placed",
    )
    tensor: Annotated[int, Field(gt=0, le=64)] = Field(1, description="GPUs of one engine: its tensor parallel size")
    startup_seconds: Annotated[Seconds, Needs("rollout.engine=sglang")] = Field(
        600.0, description="an engine that does not answer for so long has not started"
    )
    gpu_gib: float = Field(0.0, ge=0, le=10_000, description="memory of one GPU in GiB; 0: what CUDA says")

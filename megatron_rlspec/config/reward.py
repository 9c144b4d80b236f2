"""[reward]: how answers are judged."""

from __future__ import annotations

from pydantic import Field

from megatron_rlspec.config.base import Positive, Section


class RewardConfig(Section):
    kind: str = Field("exact", description="exact, math, module:function, or an http(s) address")
    timeout_seconds: float = Field(10.0, gt=0, description="per sample; a reward that takes longer counts as failed")
    workers: Positive = Field(4, description="rewards computed at the same time")

"""[health]: checks of a push and of a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rlspec.config.base import Count, Positive, Section


class HealthConfig(Section):
    on_failure: Literal["plain", "stop"] = Field("plain", description="if a second push does not help: off, or stop")
    canary_prompts: Count = Field(16, description="prompts that every engine answers after a push; 0: no canary")
    canary_tokens: Positive = Field(8, description="longest of these answers")
    canary_share: float = Field(0.02, gt=0, le=1, description="of a run's time; pushes go without a canary beyond it")
    floor_share: float = Field(0.5, gt=0, le=1, description="share of the expected accepted drafts they must reach")
    logprob_gap: float = Field(0.5, gt=0, description="a step is skipped if engine and trainer differ by more nats")

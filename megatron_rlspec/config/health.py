"""[health]: checks of a weight push and of a training step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_rlspec.config.base import Needs, Section


class HealthConfig(Section):
    on_failure: Literal["plain", "stop"] = Field(
        "plain", description="if a repeated push fails too: decode without drafts (plain), or end the run (stop)"
    )
    canary_prompts: Annotated[int, Field(ge=0, le=65536)] = Field(
        16, description="fixed prompts that every engine answers after a push, to measure acceptance; 0: no such check"
    )
    canary_tokens: Annotated[int, Field(gt=0, le=65536), Needs("health.canary_prompts!=0")] = Field(
        8, description="longest of these answers in tokens"
    )
    canary_share: Annotated[float, Needs("health.canary_prompts!=0")] = Field(
        0.02, gt=0, le=1, description="share of the run's time for these checks; a push past it is not checked so"
    )
    floor_share: float = Field(
        0.5, gt=0, le=1, description="drafting goes on if at least this share of the expected drafts is accepted"
    )
    logprob_gap: float = Field(
        0.5,
        gt=0,
        le=1e6,
        description="skip a step if log-probabilities of engine and trainer differ by more, on average, in nats",
    )

"""[health]: checks of a weight push and of a training step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rlspec.config.base import Section


class HealthConfig(Section):
    on_failure: Literal["plain", "stop"] = Field(
        "plain", description="if a repeated push fails too: decode without drafts (plain), or end the run (stop)"
    )
    logprob_gap: float = Field(
        0.5,
        gt=0,
        le=1e6,
        description="skip a step if log-probabilities of engine and trainer differ by more, on average, in nats",
    )

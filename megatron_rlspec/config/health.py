"""[health]: checks of a training step."""

from __future__ import annotations

from pydantic import Field

from megatron_rlspec.config.base import Section


class HealthConfig(Section):
    logprob_gap: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="skip a step if log-probabilities of engine and trainer differ by more, on average, in nats; auto: "
        "0.5 in bfloat16, 0.01 in float32, and after three steps five times the run's own level",
    )

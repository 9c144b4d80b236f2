"""[reward]: how answers are judged."""

from __future__ import annotations

from pydantic import Field

from megatron_rlspec.config.base import Count, Positive, Section


class RewardConfig(Section):
    kind: str = Field(
        "exact",
        description="exact, math, an http(s) address, or module:function, which is called as "
        "function(prompt=str, response=str, label=str, metadata=dict) and returns a finite number",
    )
    timeout_seconds: float = Field(10.0, gt=0, description="per sample; a reward that takes longer counts as failed")
    workers: Positive = Field(4, description="rewards computed at the same time")
    max_failed_steps: Count = Field(
        1, description="stop after so many steps in a row in which every reward failed; 0: never"
    )

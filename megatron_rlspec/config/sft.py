"""[sft]: the supervised warm start."""

from __future__ import annotations

from pydantic import Field

from megatron_rlspec.config.base import Count, Positive, Section


class SftConfig(Section):
    path: str = Field("", description="rows of prompt and response, .jsonl or .parquet")
    response_key: str = Field("response", description="column with the written answer")
    steps: Positive = Field(1000, description="most steps")
    samples_per_step: Positive = Field(128, description="rows of one step")
    drafter_only: bool = Field(False, description="leave the policy as it is")
    eval_every: Count = Field(0, description="steps between evaluations on data.eval_path by a real engine; 0: none")
    eval_prompts: Positive = Field(64, description="held-out prompts of one evaluation")
    stop_reward: float = Field(1.0, description="stop once held-out reward is above this and accept length is flat")
    plateau: float = Field(0.1, gt=0, description="accept length is flat if an evaluation gains less than this")

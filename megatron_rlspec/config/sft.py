"""[sft]: the supervised warm start, `rlspec sft`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_rlspec.config.base import Count, Name, Positive, Section, Text


class SftConfig(Section):
    path: Text = Field("", description="prompts with written responses: a .jsonl or .parquet file")
    response_key: Name = Field("response", description="column of the written response")
    steps: Positive = Field(1000, description="most steps")
    samples_per_step: Annotated[int, Field(gt=0, le=2**20)] = Field(128, description="responses of one step")
    drafter_only: bool = Field(False, description="train the drafter, leave the policy as it is")
    eval_every: Count = Field(
        0, description="steps between evaluations, in which an engine answers data.eval_path; 0: none"
    )
    eval_prompts: Annotated[int, Field(gt=0, le=2**20)] = Field(64, description="held-out prompts of one evaluation")
    stop_reward: float = Field(
        1.0,
        ge=-1e6,
        le=1e6,
        description="stop early if an evaluation's mean reward is at least this and accept length has stopped rising",
    )
    plateau: float = Field(
        0.1, gt=0, le=1e6, description="accept length has stopped rising if an evaluation adds less than this"
    )

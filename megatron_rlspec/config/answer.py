"""[answer]: `rlspec answer`, by which a model writes answers to prompts."""

from __future__ import annotations

from pydantic import Field

from megatron_rlspec.config.base import Count, Section, Text


class AnswerConfig(Section):
    path: Text = Field(
        "",
        description="JSONL file that `rlspec answer` writes; rows that it holds already are kept",
    )
    prompts: Count = Field(
        0, description="answer so many prompts of data.path, the first ones; 0: all"
    )

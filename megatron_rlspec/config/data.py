"""[data]: prompts to train and to evaluate on."""

from __future__ import annotations

from pydantic import Field

from megatron_rlspec.config.base import Name, Section, Text


class DataConfig(Section):
    path: Text = Field("", description="training prompts: a .jsonl or .parquet file in slime's format")
    eval_path: Text = Field("", description="held-out prompts in the same format; empty: no evaluation")
    prompt_key: Name = Field("prompt", description="column of the prompt: text, or chat messages")
    label_key: Text = Field("label", description="column of the right answer, which the reward gets; empty: no labels")
    metadata_key: Text = Field("metadata", description="optional column with an object, which the reward gets too")
    apply_chat_template: bool = Field(False, description="format prompts with the tokenizer's chat template")
    shuffle: bool = Field(True, description="draw prompts in a new random order every epoch, seeded by train.seed")

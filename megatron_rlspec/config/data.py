"""[data]: prompts."""

from __future__ import annotations

from pydantic import Field

from megatron_rlspec.config.base import Section


class DataConfig(Section):
    path: str = Field("", description="training prompts: .jsonl or .parquet in slime's format")
    eval_path: str = Field("", description="held-out prompts, same format")
    prompt_key: str = Field("prompt", description="column with the text or the chat messages")
    label_key: str = Field("label", description="column with the answer the reward compares with")
    metadata_key: str = Field("metadata", description="optional column with anything else the reward needs")
    apply_chat_template: bool = Field(False, description="render messages with the tokenizer's chat template")
    shuffle: bool = Field(True, description="reshuffle every epoch, from train.seed")

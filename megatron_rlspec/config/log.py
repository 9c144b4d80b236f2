"""[log]: where the records of a run go beside its own directory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Section


class LogConfig(Section):
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        ("tensorboard",),
        description="tensorboard: event files in run_dir/tensorboard; wandb: Weights & Biases, set by the "
        "environment (WANDB_API_KEY, WANDB_PROJECT, WANDB_NAME, WANDB_TAGS, WANDB_MODE=offline); empty: none. "
        "metrics.jsonl is written in any case",
    )

    @model_validator(mode="after")
    def _consistent(self) -> LogConfig:
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"sinks={','.join(self.sinks)}: one of them twice; expected each once")
        return self

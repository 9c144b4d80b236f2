"""[log]: where the records of a run go beside its own directory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Needs, Section, Text


class LogConfig(Section):
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        ("tensorboard",),
        description="tensorboard, wandb: where records and samples go beside metrics.jsonl; event files in "
        "run_dir/tensorboard, and Weights & Biases, set by the environment (WANDB_API_KEY, WANDB_TAGS, "
        "WANDB_MODE=offline); empty: nowhere",
    )
    project: Annotated[Text, Needs("log.sinks")] = Field(
        "",
        description="project in Weights & Biases; empty: WANDB_PROJECT, or megatron_rlspec",
    )
    name: Annotated[Text, Needs("log.sinks")] = Field(
        "",
        description="name of the run there; empty: WANDB_NAME, or that of train.run_dir",
    )

    @model_validator(mode="after")
    def _consistent(self) -> LogConfig:
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"sinks={','.join(self.sinks)}: one of them twice; expected each once")
        return self

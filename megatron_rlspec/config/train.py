"""[train]: steps, seed, checkpoints and evaluations."""

from __future__ import annotations

from pydantic import Field

from megatron_rlspec.config.base import Count, Positive, Section


class TrainConfig(Section):
    steps: Positive = Field(100, description="RL steps")
    tokens_per_micro_batch: Positive = Field(8192, description="packing budget of one data-parallel rank")
    seed: int = Field(1, description="of data order, sampling and initialisation")
    run_dir: str = Field("runs/run", description="everything the run writes")
    save_every: Count = Field(0, description="steps between checkpoints; 0: only at the end, on Ctrl-C and on SIGTERM")
    keep: Positive = Field(2, description="checkpoints kept")
    resume: bool = Field(False, description="continue from the newest checkpoint in run_dir")
    eval_every: Count = Field(0, description="steps between evaluations; 0: first and last only")
    eval_prompts: Positive = Field(128, description="held-out prompts of one evaluation")
    max_bad_steps: Count = Field(3, description="stop after so many steps in a row with a non-finite loss")

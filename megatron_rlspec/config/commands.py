"""[sft], [answer], [replay]: what the commands beside `rlspec train` take.

`loop.py` runs `rlspec sft` and `rlspec replay`, and `commands/answer.py` `rlspec answer`. `run.py` checks the options
that a command demands or refuses.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_rlspec.config.base import MOST_STEPS, Count, Files, Name, Positive, Section, Text


class SftConfig(Section):
    """[sft]: the supervised warm start, `rlspec sft`."""

    path: Files = Field("", description="prompts with written responses, as data.path")
    response_key: Name = Field("response", description="column of the written response")
    steps: Positive = Field(
        2000,
        description="steps; with sft.drafter_only and sft.held_out fewer, if the accept length has stopped rising: if "
        "two evaluations together add less than 0.01",
    )
    samples_per_step: Annotated[int, Field(gt=0, le=2**20)] = Field(
        128, description="responses of one step"
    )
    held_out: Count = Field(
        64,
        description="keep the answers to so many prompts of sft.path out of training; every sft.eval_every steps the "
        "trainer measures the accept length of spec.drafts on them at 1, 3 and 5 drafts a round, without an engine",
    )
    drafter_only: bool = Field(
        True,
        description="train the drafter, leave the policy as it is; false: demonstrations train both",
    )
    eval_every: Count = Field(
        50,
        description="steps between evaluations: an engine answers train.eval_prompts of data.eval_path, if that is "
        "given; the trainer measures the drafter on sft.held_out prompts, if there are any; 0: none",
    )


class AnswerConfig(Section):
    """[answer]: `rlspec answer`, by which a model writes answers to prompts."""

    path: Text = Field(
        "",
        description="JSONL file that `rlspec answer` writes; rows that it holds already are kept",
    )
    prompts: Count = Field(
        0, description="answer so many prompts of data.path, the first ones; 0: all"
    )


class ReplayConfig(Section):
    """[replay]: a drafter trained along a recorded run, `rlspec replay`."""

    run: Text = Field("", description="the recorded run; `rlspec replay RUN` sets it")
    policy_step: Annotated[int, Field(ge=-1, le=MOST_STEPS)] = Field(
        -1,
        description="-1: each step's own policy and rollouts; n: the policy after n steps, from which engines generate",
    )

"""[replay]: a drafter trained along a recorded run, `rlspec replay`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_rlspec.config.base import MOST_STEPS, Section, Text


class ReplayConfig(Section):
    run: Text = Field("", description="the recorded run; `rlspec replay RUN` sets it")
    policy_step: Annotated[int, Field(ge=-1, le=MOST_STEPS)] = Field(
        -1,
        description="-1: each step's own policy and rollouts; n: the policy after n steps, from which engines generate",
    )
    fresh_drafter: bool = Field(
        False, description="start from a drafter with random weights, not from model.path's"
    )

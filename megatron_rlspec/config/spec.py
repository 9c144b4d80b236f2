"""[spec]: speculative decoding.

`rollout/start.py` hands it to the engines. An engine that is started by hand has the same options (`rlspec serve`,
`rollout/sglang/http/serve.py`), with the defaults of this section.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Needs, Section
from megatron_rlspec.types import OFF, Drafts, SpecConfig, Verifier

# Most drafter passes of one round. SGLang's buffers grow with them, and the embedded engine's cache has this many
# columns beyond the longest sample (`rollout/embedded/engine.py`). `rollout/sglang/scheduler/coupled.py` has a buffer
# for the drafts of a round behind the first, and `extensions/migration/embedded/move.py` reserves one column more.
MOST_DRAFTS = 64

DraftSteps = Annotated[int, Field(ge=0, le=MOST_DRAFTS)]


class SpecSection(Section):
    mode: Literal["adaptive", "fixed", "off"] = Field(
        "adaptive",
        description="adaptive: num_steps is chosen while the engines run; fixed: num_steps; off: no drafts",
    )
    num_steps: Annotated[DraftSteps, Needs("spec.mode!=off")] = Field(
        3, description="drafter passes per round (fixed), or at an SGLang engine's start (adaptive)"
    )
    candidate_steps: Annotated[tuple[DraftSteps, ...], Needs("spec.mode=adaptive")] = Field(
        (0, 1, 2, 3, 5),
        description="values of num_steps that mode=adaptive chooses from; 0: no drafts",
    )
    verifier: Verifier = Field(
        "position_keyed",
        description="position_keyed: the text depends on seed, prompt and weights only, not on the drafts; "
        "target_only: the same rule with ordinary random numbers",
    )
    drafts: Annotated[Drafts, Needs("spec.verifier=position_keyed")] = Field(
        "coupled",
        description="under verifier=position_keyed. coupled: drafts take the verifier's noise, so more are accepted "
        "above temperature 0; argmax: the drafter's likeliest token. The text is the same",
    )
    ragged: Annotated[bool, Needs("spec.mode=adaptive")] = Field(
        False,
        description="verify of each request the drafts that are worth it, by the drafter's probabilities, and not the "
        "same number of all. The text is the same. SGLang needs drafts=coupled and, on a GPU, FlashAttention 3; with "
        "SGLang, ragged rounds were not run on a GPU yet",
    )

    @model_validator(mode="after")
    def _consistent(self) -> SpecSection:
        steps = self.candidate_steps
        if not steps or len(set(steps)) < len(steps):
            raise ValueError(
                f"candidate_steps={list(steps)}: expected different numbers from 0 to {MOST_DRAFTS}"
            )
        if self.mode == "adaptive" and self.num_steps not in steps:
            raise ValueError(
                f"num_steps={self.num_steps} is not among candidate_steps={list(steps)}"
            )
        return self

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the numbers of drafts between which the run's engines switch; 0 is `types.OFF`."""
        return {"off": (0,), "fixed": (self.num_steps,), "adaptive": self.candidate_steps}[
            self.mode
        ]

    def config(self) -> SpecConfig:
        """Return the configuration that mode=fixed runs; OFF for the other modes.

        In adaptive mode an embedded engine starts with it, until it is given a rule (`rollout/start.py`).
        """
        return SpecConfig.of(self.num_steps) if self.mode == "fixed" else OFF

"""[tail]: what happens while a rollout ends with a few long samples. `extensions/migration/` does it."""

from __future__ import annotations

import itertools
from typing import Annotated

from pydantic import Field, field_validator

from megatron_rlspec.config.base import Needs, Positive, Section, Text


class TailConfig(Section):
    rebalance: bool = Field(
        False,
        description="move running samples from full engines to almost empty ones (RLHFSpec, section 6): between "
        "embedded engines with their KV caches, between SGLang's by a prefill of prompt and response",
    )
    every: Annotated[Positive, Needs("rollout.engine=embedded")] = Field(
        32,
        description="decode rounds of the embedded engines of several ranks between two decisions, and between the "
        "moments at which they begin requests and return samples",
    )
    tp: Annotated[tuple[int, ...], Needs("rollout.engine=embedded")] = Field(
        (1,),
        description="tensor-parallel sizes to which the engines of a run's ranks may change for the last samples, "
        "1 first, such as 1,2,4; needs tail.cost_table (PAT)",
    )
    cost_table: Annotated[Text, Needs("tail.tp")] = Field(
        "",
        description="durations of rounds at the sizes of tail.tp; "
        "`python benchmarks/round_costs.py sizes.json --model DIR --tp 1,2,4` writes it",
    )

    @field_validator("tp")
    @classmethod
    def _ever_larger(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        ordered = all(
            small < large and large % small == 0 for small, large in itertools.pairwise(sizes)
        )
        if not sizes or sizes[0] != 1 or not ordered or sizes[-1] > 1024:
            raise ValueError("expected 1 and then multiples of the size before, such as 1,2,4")
        return sizes

"""[tail]: what happens while a rollout ends with a few long samples."""

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
    every: Annotated[Positive, Needs("tail.rebalance", "tail.tp", "rollout.engine=embedded")] = (
        Field(
            32,
            description="decode rounds between two decisions; with the embedded engine on several ranks, also between "
            "the moments at which they begin requests and return samples",
        )
    )
    tp: tuple[int, ...] = Field(
        (1,),
        description="tensor-parallel sizes at which the last samples may be drawn, the smallest first; needs "
        "tail.cost_table. Embedded engines of a run's ranks change to them in place, such as 1,2,4. With SGLang two "
        "sizes, placement.tensor and a multiple: a second fleet sleeps on the same devices, and takes over when that "
        "pays; needs tail.rebalance, too",
    )
    cost_table: Text = Field(
        "",
        description="durations of rounds at the sizes of tail.tp, which `rlspec profile --tp 1,2,4` writes",
    )

    @field_validator("tp")
    @classmethod
    def _ever_larger(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        ordered = all(
            small < large and large % small == 0 for small, large in itertools.pairwise(sizes)
        )
        if not sizes or sizes[0] < 1 or not ordered or sizes[-1] > 1024:
            raise ValueError("expected multiples of the size before, such as 1,2,4")
        return sizes

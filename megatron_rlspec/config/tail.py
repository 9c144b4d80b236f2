"""[tail]: what happens while a rollout ends with a few long samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rlspec.config.base import Positive, Section


class TailConfig(Section):
    rebalance: Literal["off", "recompute", "kv", "auto"] = Field(
        "off",
        description="move running samples from full engines to empty ones: never, with their KV cache (kv), with "
        "their tokens only, which the other engine prefills (recompute), or by the cheaper way (auto)",
    )
    rule: Literal["makespan", "threshold"] = Field(
        "makespan",
        description="which samples move: those by which the rollout ends earlier (makespan), or by RLHFSpec's rule "
        "(threshold)",
    )
    every: Positive = Field(32, description="decode rounds between two decisions")
    gain: float = Field(
        0.05, ge=0, lt=1, description="least share of the remaining time that a move must save, beyond its cost"
    )

"""[spec]: speculative decoding."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_rlspec.config.base import Count, Positive, Section
from megatron_rlspec.types import OFF, SpecConfig, Verifier


class SpecSection(Section):
    mode: Literal["adaptive", "fixed", "off"] = Field("adaptive", description="how the speculative config is chosen")
    num_steps: Count = Field(3, description="drafter passes per round (fixed), or at the start (adaptive)")
    topk: Positive = Field(1, description="mode=fixed, embedded engine: children of a drafted node; 1 drafts a chain")
    num_draft_tokens: Count = Field(0, description="most tokens of a sample that a round verifies; 0: all drafted")
    tree_budget: Literal["none", "sample", "batch"] = Field(
        "none", description="verify what pays: one number a round for every sample, or one for the whole batch"
    )
    candidate_steps: tuple[int, ...] = Field((0, 1, 2, 3, 5), description="what the adaptive policy may choose from")
    verifier: Verifier = Field(
        "position_keyed", description="position_keyed: the text does not depend on what was drafted"
    )
    cost_table: str = Field("", description="JSON written by `rlspec profile`; empty: a simple acceptance rule")
    ridge_tokens: float = Field(
        128.0, gt=0, description="without a table: tokens a pass computes while it reads the weights; hardware sets it"
    )
    switching_margin: float = Field(0.01, ge=0, description="a gain of this share that lasts 16 rounds makes a switch")
    probe_share: float = Field(0.01, ge=0, le=0.2, description="bound on probing's share of time")
    catch_up_share: float = Field(
        0.0, ge=0, le=0.2, description="of the time off, what probes may spend besides on the drafter's catching up"
    )

    @model_validator(mode="after")
    def _consistent(self) -> SpecSection:
        if not self.candidate_steps or min(self.candidate_steps) < 0:
            raise ValueError(f"candidate_steps={list(self.candidate_steps)}, expected numbers of steps from 0 on")
        trees = f"topk={self.topk}" if self.topk > 1 else f"tree_budget={self.tree_budget}"
        if self.topk > 1 or self.tree_budget != "none":
            if self.mode != "fixed":
                raise ValueError(f"{trees} is for mode=fixed, but mode={self.mode}")
            if self.verifier == "rejection":
                raise ValueError(f"{trees} is not lossless with verifier=rejection; take position_keyed")
        if self.mode == "fixed":
            self.config()  # refuses numbers that do not fit together
        if self.cost_table and self.mode != "adaptive":
            raise ValueError(f"cost_table={self.cost_table} is what mode=adaptive decides by, but mode={self.mode}")
        if self.mode == "adaptive" and self.num_steps not in self.candidate_steps:
            raise ValueError(f"num_steps={self.num_steps} is not among candidate_steps={list(self.candidate_steps)}")
        return self

    def config(self) -> SpecConfig:
        """What mode=fixed runs, and other modes start with."""
        if self.mode != "fixed" or self.num_steps == 0:
            return OFF
        return SpecConfig(self.num_steps, self.topk, self.num_draft_tokens or -1)

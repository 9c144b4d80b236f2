"""Between rollouts: what the engines observed becomes the next rollout's schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec.spec.acceptance import Acceptance
from megatron_rlspec.spec.cost_table import CostTable
from megatron_rlspec.spec.roofline import Roofline
from megatron_rlspec.spec.solver import chains, compile_schedule
from megatron_rlspec.types import RoundStats, SpecConfig, SpecSchedule


class Adapter:
    """Keeps `schedule`, the one to run next.

    mode              "adaptive", "fixed" or "off"; only the first ever changes the schedule
    num_steps         of a fixed schedule, and of an adaptive one before anything was observed
    candidate_steps   what an adaptive one chooses from
    cost_table        path; empty: layers cost what layers cost (`Roofline.of_layers`), nothing measured
    """

    def __init__(
        self,
        mode: str,
        num_steps: int,
        candidate_steps: Sequence[int],
        cost_table: str,
        target_layers: int,
        max_batch: int,
    ) -> None:
        self.mode, self.max_batch = mode, max_batch
        self.candidates = chains(candidate_steps)
        self.cost = CostTable.load(Path(cost_table)).at(1) if cost_table else Roofline.of_layers(target_layers)
        self.acceptance = Acceptance(max(max(candidate_steps), 1))
        self.schedule = SpecSchedule.fixed(SpecConfig(0 if mode == "off" else num_steps))

    def observe(self, stats: Sequence[RoundStats]) -> dict[str, float]:
        """Take one rollout's statistics in; returns what the records keep of it."""
        rounds: dict[SpecConfig, int] = {}
        for found in stats:
            rounds[found.config] = rounds.get(found.config, 0) + found.rounds
            if found.config.num_steps:
                self.acceptance.observe_histogram(found.config.num_steps, found.accepted, found.rounds)
        if self.mode == "adaptive":
            self.schedule = compile_schedule(
                self.cost, self.acceptance.rates, self.candidates, max_batch=self.max_batch
            )
        total = sum(rounds.values())
        shares = {f"spec/share_{config}": n / total for config, n in sorted(rounds.items())}
        rates = {f"spec/accept_{d}": rate for d, rate in enumerate(self.acceptance.rates, 1)}
        return shares | rates | {"spec/rounds": float(total), "spec/ms_per_round": _ms(stats, total)}

    def state(self) -> dict[str, Any]:
        return {"acceptance": self.acceptance.to_json(), "schedule": self.schedule.to_json()}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            self.acceptance = Acceptance.from_json(state["acceptance"])
            self.schedule = SpecSchedule.from_json(state["schedule"])


def _ms(stats: Sequence[RoundStats], total: int) -> float:
    return sum(found.ms for found in stats) / total if total else math.nan

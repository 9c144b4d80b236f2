"""Acceptance as rollouts have shown it, and the data of the rule that engines get before the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.prior import Prior
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import RoundStats, SpecConfig

LEAST_DRAWS = 100  # drafts of one depth that make its rate an expectation


class Adapter:
    """Follows acceptance over rollouts, and makes the data of the engines' rule.

    cost_table     path; empty: every layer costs the same (`Roofline.of_layers`), nothing is measured
    target_layers  of the model, for `of_layers`
    ridge_tokens   of the machine, for `of_layers`
    """

    def __init__(
        self,
        candidate_steps: Sequence[int],
        cost_table: str,
        target_layers: int,
        ridge_tokens: float,
        margin: float,
        probe_share: float,
        catch_up_share: float = 0.0,
    ) -> None:
        if cost_table:
            CostTable.load(Path(cost_table))  # raises CostTableError before any engine starts
        self.cost = (
            {"table": cost_table}
            if cost_table
            else {"roofline": Roofline.of_layers(target_layers, ridge_tokens=ridge_tokens).to_json()}
        )
        self.settings = {"margin": margin, "probe_share": probe_share, "catch_up_share": catch_up_share}
        self.acceptance = Acceptance(max(*candidate_steps, 1))
        self.prior = Prior()
        self.believed: Acceptance | None = None  # in place of `acceptance`, for the next rollout
        self.forecast: list[float] | None = None  # rates a_1.. of the next rollout
        self.probing: dict[str, Any] | None = None  # what engines' probes may still lose, as the last reports say

    def rule(self) -> dict[str, Any]:
        acceptance = self.believed or self.acceptance
        rule: dict[str, Any] = self.cost | self.settings | {"acceptance": acceptance.to_json()}
        if self.forecast is not None:
            rule["forecast"] = self.forecast
        if self.probing is not None:
            rule["probing"] = self.probing
        return rule

    def expected(self) -> dict[SpecConfig, float]:
        """Return tokens per round of every chain whose depths were all drafted often enough lately."""
        known = [draws >= LEAST_DRAWS for draws in self.acceptance.draws]
        deep = known.index(False) if False in known else len(known)
        return {SpecConfig(k): self.acceptance.totals[k] for k in range(1, deep + 1)}

    def expect(self, forecast: Sequence[float] | None) -> dict[str, float]:
        """Mix the forecast rates a_1.. of the next rollout into what `rule()` says of acceptance; None: there are none.

        Returns metrics: the forecast's share in the mix, the drafts that it is worth, and its rates.
        """
        self.believed = None
        self.forecast = None if forecast is None else list(forecast)
        if forecast is None:
            self.prior.pending = None
            return {}
        known = self.acceptance.ratio_base[0] >= LEAST_DRAWS  # ever: `draws` fade while nothing is drafted
        rates, draws = self.prior.believe(self.acceptance.rates, forecast, known)
        self.believed = Acceptance.from_json(self.acceptance.to_json())
        self.believed.predict(rates, draws)
        return {"spec/prior_forecast_share": self.prior.share() if known else 1.0, "spec/prior_draws": draws} | {
            f"spec/prior_{d}": rate for d, rate in enumerate(self.believed.rates, 1)
        }

    def observe(self, stats: Sequence[RoundStats], reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Learn from one rollout's rounds and the engines' reports. Returns metrics."""
        self.prior.score(stats)
        self.believed = self.forecast = None
        if known := [report["probing"] for report in reports if report.get("probing")]:
            self.probing = min(known, key=lambda budget: budget["left_ms"])  # for engines that start again
        rounds: dict[SpecConfig, int] = {}
        for found in stats:
            rounds[found.config] = rounds.get(found.config, 0) + found.rounds
            if found.config.num_steps:
                self.acceptance.observe_histogram(found.config.num_steps, found.accepted, found.rounds)
            else:
                self.acceptance.observe_histogram(0, [], found.rounds)  # what was seen fades all the same
        total = sum(rounds.values())
        ms = sum(found.ms for found in stats)
        # Rounds right after a prefill have no time and are not counted: there may be none but those.
        values = {f"spec/share_{config}": n / total for config, n in sorted(rounds.items()) if total}
        values |= {f"spec/accept_{d}": rate for d, rate in enumerate(self.acceptance.rates, 1)}
        values |= {"spec/rounds": float(total), "spec/ms_per_round": ms / total if total else math.nan}
        decided = [report for report in reports if report.get("predicted_ms")]
        if decided:
            sums = {name: sum(report[name] for report in decided) for name in _ADDED}
            values["spec/estimated_regret"] = (
                sum(r["estimated_regret"] * r["predicted_ms"] for r in decided) / sums["predicted_ms"]
            )
            values["spec/switches"] = float(sums["switches"])
            values["spec/probes"] = float(sums["probes"])
            if "table" in self.cost:  # the rule without one counts in passes, not in ms
                values["spec/predicted_tokens_per_second"] = 1e3 * sums["predicted_tokens"] / sums["predicted_ms"]
                values["spec/observed_tokens_per_second"] = 1e3 * sums["emitted_tokens"] / ms if ms else math.nan
        return values


_ADDED = ("predicted_ms", "predicted_tokens", "emitted_tokens", "switches", "probes")

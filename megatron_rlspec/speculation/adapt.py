"""Follow acceptance over rollouts, and make the speculation rule that engines get before the next rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.prior import Prior
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import RoundStats, SpecConfig

WEIGHT = 4  # timings that the mean of a rollout's rounds counts for, at most
LEAST_DRAWS = 100  # drafts of a depth that must be observed before its rate is used as an expectation


class Adapter:
    """Follows acceptance over rollouts, and makes the data of the engines' rule.

    cost_table  path; empty: use `cost`
    cost        of the model, before rounds were measured
    tp          tensor-parallel size of the engines, for a table of several
    learn       without a table: learn costs from the engines' rounds

    Raises CostTableError.
    """

    def __init__(
        self,
        candidate_steps: Sequence[int],
        cost_table: str,
        cost: Roofline,
        margin: float,
        probe_share: float,
        catch_up_share: float = 0.0,
        *,
        learn: bool = True,
        tp: int = 1,
    ) -> None:
        self.table = CostTable.load(Path(cost_table)).of_engine(tp) if cost_table else None
        self.cost: dict[str, Any] = {"roofline": cost.to_json()}
        if self.table is not None:
            self.cost = {"table": cost_table, "tp": self.table.tps[0]}
        self.learnt = LearntCost(cost) if learn and not cost_table else None
        self.settings = {"margin": margin, "probe_share": probe_share, "catch_up_share": catch_up_share}
        self.acceptance = Acceptance(max(*candidate_steps, 1))
        self.prior = Prior()
        self.mixed: Acceptance | None = None  # `acceptance` mixed with the forecast, for the next rollout
        self.forecast: list[float] | None = None  # rates a_1.. of the next rollout
        self.probing: dict[str, Any] | None = None  # the engines' probe budget in the last reports

    def rule(self) -> dict[str, Any]:
        """Return the data of `SpecRule.from_json`, without candidates."""
        acceptance = self.mixed or self.acceptance
        cost = {"learnt": self.learnt.to_json()} if self.learnt else self.cost
        rule: dict[str, Any] = cost | self.settings | {"acceptance": acceptance.to_json()}
        if self.forecast is not None:
            rule["forecast"] = self.forecast
        if self.probing is not None:
            rule["probing"] = self.probing
        return rule

    def expected(self) -> dict[SpecConfig, float]:
        """Return tokens per round of the chains with enough recent drafts at every depth."""
        known = [draws >= LEAST_DRAWS for draws in self.acceptance.draws]
        deepest = known.index(False) if False in known else len(known)
        return {SpecConfig(k): self.acceptance.totals[k] for k in range(1, deepest + 1)}

    def expect(self, forecast: Sequence[float] | None) -> dict[str, float]:
        """Mix the forecast rates a_1.. of the next rollout into the acceptance of `rule()`. None: no forecast.

        Returns metrics: the forecast's share in the mix, the weight of the mix in drafts, and its rates.
        """
        self.mixed = None
        self.forecast = None if forecast is None else list(forecast)
        if forecast is None:
            self.prior.pending = None
            return {}
        # `ratio_base` and not `draws`, which fade while the engines do not draft.
        known = self.acceptance.ratio_base[0] >= LEAST_DRAWS
        rates, draws = self.prior.mix(self.acceptance.rates, forecast, known)
        self.mixed = Acceptance.from_json(self.acceptance.to_json())
        self.mixed.predict(rates, draws)
        metrics = {"spec/prior_forecast_share": self.prior.share() if known else 1.0, "spec/prior_draws": draws}
        for depth, rate in enumerate(self.mixed.rates, 1):
            metrics[f"spec/prior_{depth}"] = rate
        return metrics

    def observe(self, stats: Sequence[RoundStats], reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Learn from one rollout's rounds and the engines' reports. Returns metrics."""
        self.prior.score(stats)
        self.mixed = None
        self.forecast = None
        if budgets := [report["probing"] for report in reports if report.get("probing")]:
            self.probing = min(budgets, key=lambda budget: budget["left_ms"])  # for engines that are restarted
        rounds: dict[SpecConfig, int] = {}
        for found in stats:
            if self.learnt is not None and found.rounds and found.ms > 0:
                for _ in range(min(found.rounds, WEIGHT)):
                    self.learnt.add(found.config, found.batch, found.context_tokens, found.ms / found.rounds)
            rounds[found.config] = rounds.get(found.config, 0) + found.rounds
            if found.config.num_steps:
                self.acceptance.observe_histogram(found.config.num_steps, found.accepted, found.rounds)
            else:
                self.acceptance.observe_histogram(0, [], found.rounds)  # earlier observations fade
        if self.learnt is not None:
            self.learnt.fit()
        total = sum(rounds.values())
        ms = sum(found.ms for found in stats)
        # Engines do not report rounds right after a prefill, so `total` can be 0.
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
            if "table" in self.cost:  # without a table the rule counts in passes, not in ms
                values["spec/predicted_tokens_per_second"] = 1e3 * sums["predicted_tokens"] / sums["predicted_ms"]
                values["spec/observed_tokens_per_second"] = 1e3 * sums["emitted_tokens"] / ms if ms else math.nan
        return values


_ADDED = ("predicted_ms", "predicted_tokens", "emitted_tokens", "switches", "probes")

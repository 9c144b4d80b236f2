"""Learn from rollouts how to speculate. A run holds one `Learning`, in our own loop and inside slime.

    learning = Learning(Adapter(candidate_steps, cost_table, Roofline.of_model(config)))
    learning.expect(prediction)          before a rollout: the trainer's prediction of its acceptance, or None
    learning.rule()                      the argument of the engines' `set_spec_rule`
    learning.observe(rounds, reports)    after the rollout: the rounds and the `spec_rule_report`s of all engines
    learning.state(), .restore(state)    for checkpoints

`expect` and `observe` return metrics: `spec/...` and `predict/...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rlspec.speculation.acceptance import Acceptance, Prediction, accept_length, expected_tokens, pooled
from megatron_rlspec.speculation.adapt import Adapter
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.forecast import Forecast
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.prior import Prior
from megatron_rlspec.types import RoundStats, SpecConfig


class Learning:
    """Holds the forecast and its calibration, and the adapter with the observed acceptance and the prior.

    adapter      acceptance so far, and the settings of the engines' rule
    depth        deepest draft of the predictions; the adapter's own depth if that is larger
    adaptive     whether engines use `rule()`; if not, no forecast enters it
    scale_table  whether observed round times scale the cost table in `rule()`
    """

    def __init__(self, adapter: Adapter, depth: int = 1, *, adaptive: bool = True, scale_table: bool = False) -> None:
        self.adapter = adapter
        self.adaptive = adaptive
        self.forecast = Forecast(max(depth, adapter.acceptance.depth))
        self._table: CostTable | None = None
        if scale_table and "table" in adapter.cost:
            self._table = adapter.table

    def expect(self, prediction: Prediction | None) -> dict[str, float]:
        """Take the trainer's prediction of the next rollout's acceptance, or None. Returns metrics."""
        return self.forecast.expect(prediction) | self._mix()

    def observe(self, rounds: Sequence[RoundStats], reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Learn from one rollout: the rounds and `spec_rule_report`s of all engines. Returns metrics."""
        if self._table is not None:
            self._table = self._table.calibrated(rounds)
        found = self.adapter.observe(rounds, reports) | self.forecast.score(rounds)
        drafting = pooled(stats.accepted for stats in rounds if stats.config.num_steps)
        if any(drafting):  # `rollout/accept_length` counts rounds that drafted nothing, too, as 1
            found["spec/accept_length"] = accept_length(drafting)
        return found

    def rule(self) -> dict[str, Any]:
        """Return the data of `SpecRule.from_json` without candidates; every engine adds its own."""
        rule = self.adapter.rule()
        if self._table is not None:
            rule["table"] = self._table.to_json()
        return rule

    @property
    def renews(self) -> bool:
        """Return whether `rule()` differs from the rule before: it holds a forecast, or costs learned since."""
        return self.adapter.mixed is not None or (self.adaptive and self.adapter.learnt is not None)

    def accept_lengths(self) -> dict[SpecConfig, float]:
        """Return tokens per round of the chains with enough recent drafts at every depth."""
        return self.adapter.expected()

    def accept_length(self, chain: SpecConfig) -> float | None:
        """Return tokens per round of `chain`: predicted for the next rollout, else observed; None if unknown."""
        pending = self.forecast.pending
        if pending is not None and chain.num_steps in pending.steps:
            return expected_tokens(chain, self.forecast.calibration.apply(pending.rates(chain.num_steps)))
        return self.accept_lengths().get(chain)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {
            "acceptance": self.adapter.acceptance.to_json(),
            "prior": self.adapter.prior.to_json(),
            "forecast": self.forecast.to_json(),
            "probing": self.adapter.probing,
            "learnt": None if self.adapter.learnt is None else self.adapter.learnt.to_json(),
            "table": None if self._table is None else self._table.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> str:
        """Restore what `state` returned; missing parts stay as they are. Returns a line if acceptance was not restored.

        Acceptance of a run that drafted fewer steps has too few depths, and engines would refuse it. A scaled table is
        restored only if it comes from the same measurements as this run's table.
        """
        known = state["acceptance"]["depth"] if state.get("acceptance") else 0
        needed = self.adapter.acceptance.depth
        if 0 < known < needed:
            return f"the checkpoint holds acceptance of {known} drafts, expected {needed}: it is learned again"
        if known:
            self.adapter.acceptance = Acceptance.from_json(state["acceptance"])
        if state.get("prior"):
            self.adapter.prior = Prior.from_json(state["prior"])
        if state.get("forecast"):
            self.forecast = Forecast.from_json(state["forecast"])
            self._mix()
        self.adapter.probing = state.get("probing")
        if self.adapter.learnt is not None and state.get("learnt"):
            self.adapter.learnt.take_up(LearntCost.from_json(state["learnt"]))
        if self._table is not None and state.get("table"):
            table = CostTable.from_json(state["table"], "checkpoint")
            if table.provenance == self._table.provenance:
                self._table = table
        return ""

    def _mix(self) -> dict[str, float]:
        return self.adapter.expect(self.forecast.rates()) if self.adaptive else {}

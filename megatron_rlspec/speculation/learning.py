"""What rollouts teach about speculation. A run holds one `Learning`, whichever loop drives it.

    learning = Learning(Adapter(candidate_steps, cost_table, target_layers))
    learning.expect(prediction)          before a rollout: training's prediction of its acceptance, or None
    learning.rule()                      what engines take by `set_spec_rule`
    learning.observe(rounds, reports)    after it: the rounds and the `spec_rule_report` of all engines
    learning.state(), .restore(state)    what a checkpoint keeps

`expect` and `observe` return metrics: `spec/...` and `predict/...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rlspec.speculation.acceptance import Acceptance, expected_tokens
from megatron_rlspec.speculation.adapt import Adapter
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.forecast import Forecast, Prediction
from megatron_rlspec.speculation.prior import Prior
from megatron_rlspec.types import RoundStats, SpecConfig


class Learning:
    """Joins the forecast and its calibration, the prior that mixes it with what was seen, and the acceptance itself.

    adapter      acceptance so far, and the settings of the engines' rule
    depth        deepest draft that predictions speak of; the adapter's own depth if that is larger
    adaptive     whether engines decide by `rule()`; otherwise nothing of a forecast enters it
    scale_table  whether the times of the rounds scale the cost table that `rule()` carries
    """

    def __init__(self, adapter: Adapter, depth: int = 1, *, adaptive: bool = True, scale_table: bool = False) -> None:
        self.adapter = adapter
        self.adaptive = adaptive
        self.forecast = Forecast(max(depth, adapter.acceptance.depth))
        self._table: CostTable | None = None
        if scale_table and "table" in adapter.cost:
            self._table = CostTable.load(str(adapter.cost["table"]))

    def expect(self, prediction: Prediction | None) -> dict[str, float]:
        """Take training's prediction of the rollout that comes next; None if there is none."""
        return self.forecast.expect(prediction) | self._believe()

    def observe(self, rounds: Sequence[RoundStats], reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Learn from one rollout: `rounds` and `spec_rule_report`s of all engines together."""
        if self._table is not None:
            self._table = self._table.calibrated(rounds)
        return self.adapter.observe(rounds, reports) | self.forecast.score(rounds)

    def rule(self) -> dict[str, Any]:
        """Data of `SpecRule.from_json` without candidates: every engine adds its own."""
        rule = self.adapter.rule()
        if self._table is not None:
            rule["table"] = self._table.to_json()
        return rule

    @property
    def forecasts(self) -> bool:
        """Whether `rule()` holds a forecast, which is for the very next rollout."""
        return self.adapter.believed is not None

    def accept_lengths(self) -> dict[SpecConfig, float]:
        """Tokens per round of every chain whose depths were all seen often enough lately."""
        return self.adapter.expected()

    def accept_length(self, chain: SpecConfig) -> float | None:
        """Tokens per round of `chain` by the prediction of the next rollout, else as seen lately; None if unknown."""
        waiting = self.forecast.pending
        if waiting is not None and chain.num_steps in waiting.steps:
            return expected_tokens(chain, self.forecast.calibration.apply(waiting.rates(chain.num_steps)))
        return self.accept_lengths().get(chain)

    def state(self) -> dict[str, Any]:
        """JSON that a checkpoint keeps."""
        return {
            "acceptance": self.adapter.acceptance.to_json(),
            "prior": self.adapter.prior.to_json(),
            "forecast": self.forecast.to_json(),
            "probing": self.adapter.probing,
            "table": None if self._table is None else self._table.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> str:
        """Take up what `state` returned, parts of it that are missing left out; one line if some could not be taken.

        A run that drafted fewer steps knows too few depths: engines would refuse its acceptance. A scaled table is
        taken up only where this run decides by the same measurements.
        """
        known = state["acceptance"]["depth"] if state.get("acceptance") else 0
        needed = self.adapter.acceptance.depth
        if 0 < known < needed:
            return f"the checkpoint knows acceptance of {known} drafts, not of {needed}: it is learnt anew"
        if known:
            self.adapter.acceptance = Acceptance.from_json(state["acceptance"])
        if state.get("prior"):
            self.adapter.prior = Prior.from_json(state["prior"])
        if state.get("forecast"):
            self.forecast = Forecast.from_json(state["forecast"])
            self._believe()
        self.adapter.probing = state.get("probing")
        if self._table is not None and state.get("table"):
            table = CostTable.from_json(state["table"], "checkpoint")
            if table.provenance == self._table.provenance:
                self._table = table
        return ""

    def _believe(self) -> dict[str, float]:
        return self.adapter.expect(self.forecast.rates()) if self.adaptive else {}

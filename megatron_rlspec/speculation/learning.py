"""Learn from rollouts how to speculate. A run holds one `Learning`, in our own loop and inside slime.

    learning = Learning(candidate_steps, cost_table, Roofline.of_model(config))
    learning.expect(prediction)          before a rollout: the trainer's prediction of its acceptance, or None
    learning.rule()                      the argument of the engines' `set_spec_rule`
    learning.observe(rounds, reports)    after the rollout: the rounds and the `spec_rule_report`s of all engines
    learning.state(), .restore(state)    for checkpoints

`expect` and `observe` return metrics: `spec/...` and `predict/...`.

The expected acceptance of the next rollout is the one that engines observed lately. In recorded runs nothing predicted
it better (docs/measurements.md). The trainer's prediction counts where nothing was observed: before the first drafts,
and while the engines do not draft. It then makes them try the drafter again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rlspec.speculation.acceptance import (
    Acceptance,
    Prediction,
    accept_length,
    expected_tokens,
    pooled,
)
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.saved import Saved, saved
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

WEIGHT = 4  # timings that the mean of a rollout's rounds counts for, at most
# drafts of a depth that must be observed before its rate is used as an expectation
LEAST_DRAWS = 100
# drafts of a depth that count at most when a rollout begins: its texts and weights are new
START_DRAWS = 50.0
TIMED = 0.9  # of the time of drafting rounds: a plain round was timed near their batch sizes
_ADDED = ("predicted_ms", "predicted_tokens", "switches", "probes")


class Learning:
    """Follows acceptance over rollouts, and makes the data of the engines' rule.

    candidate_steps  of the engines' rule
    cost_table       path; empty: use `cost`
    cost             of the model, before rounds were measured
    learn            learn costs from the engines' rounds: without a table between rollouts, with one in the engines
    tp               tensor-parallel size of the engines, for a table of several
    adaptive         whether engines use `rule()`
    scale_table      whether observed round times scale the cost table in `rule()`

    Raises CostTableError.
    """

    def __init__(
        self,
        candidate_steps: Sequence[int],
        cost_table: str,
        cost: Roofline,
        *,
        learn: bool = True,
        tp: int = 1,
        adaptive: bool = True,
        scale_table: bool = False,
    ) -> None:
        self.table = CostTable.load(Path(cost_table)).of_engine(tp) if cost_table else None
        self.cost: dict[str, Any] = {"roofline": cost.to_json()}
        if self.table is not None:
            self.cost = {"table": cost_table, "tp": self.table.tps[0]}
        self.learnt = LearntCost(cost) if learn and self.table is None else None
        self.adaptive = adaptive
        self.correct = learn and self.table is not None
        self.scaled = self.table if scale_table else None
        self.acceptance = Acceptance(max(*candidate_steps, 1))  # as observed
        self.last: Acceptance | None = None  # as observed in the last rollout alone
        self.prediction: Prediction | None = None  # of the next rollout
        self.sharpness: float | None = None  # of coupled drafts, as last predicted to be the best
        self.probing: dict[str, Any] | None = None  # the engines' probe budget in the last reports

    def start_without(self) -> None:
        """Expect that a drafter that has not learnt yet is never right, until drafts or a prediction say otherwise."""
        self.acceptance.predict([0.0] * self.acceptance.depth, START_DRAWS)

    def saved(self, rounds: Sequence[RoundStats], delivered: float = math.nan) -> Saved | None:
        """Return the estimate of `saved`; None where nothing drafted, or too few plain rounds were timed for it.

        The costs are those of the table, or learnt from rounds. A roofline of the model's sizes is no measurement.
        """
        drafting = [stats for stats in rounds if stats.config.num_steps and any(stats.accepted)]
        cost = self.table or self.learnt
        if cost is None or not drafting:
            return None
        if isinstance(cost, LearntCost):
            timed = sum(stats.ms for stats in drafting if cost.near(OFF, stats.batch))
            if timed < TIMED * sum(stats.ms for stats in drafting):
                return None
        return saved(rounds, cost, delivered)

    def expect(self, prediction: Prediction | None) -> dict[str, float]:
        """Take the trainer's prediction of the next rollout's acceptance, or None. Returns metrics."""
        self.prediction = prediction
        if prediction is None:
            return {}
        values = {
            f"predict/next_tokens_k{k}": tokens for k, tokens in self._expected(prediction).items()
        }
        if prediction.sharpness is not None:
            self.sharpness = values["spec/sharpness"] = prediction.sharpness
        return values

    def observe(
        self,
        rounds: Sequence[RoundStats],
        reports: Sequence[Mapping[str, Any]],
        delivered: float = math.nan,
    ) -> dict[str, float]:
        """Learn from one rollout: the rounds and `spec_rule_report`s of all engines. Returns metrics.

        delivered  tokens that a round delivered to a sample, on average; NaN: not known
        """
        metrics = self._errors(rounds)
        self.prediction = None
        if self.scaled is not None:
            self.scaled = self.scaled.calibrated(rounds)
        if budgets := [report["probing"] for report in reports if report.get("probing")]:
            # for engines that are restarted
            self.probing = min(budgets, key=lambda budget: budget["left_ms"])
        drafting = [stats for stats in rounds if stats.config.num_steps and sum(stats.accepted)]
        if drafting:
            self.last = Acceptance(self.acceptance.depth)
            for stats in drafting:
                self.last.observe_histogram(stats.config.num_steps, stats.accepted, 0)
        for stats in rounds:
            if stats.config.num_steps:
                self.acceptance.observe_histogram(
                    stats.config.num_steps, stats.accepted, stats.rounds
                )
            else:
                self.acceptance.observe_histogram(0, [], stats.rounds)  # earlier observations fade
        if self.learnt is not None:
            for stats in rounds:
                if stats.rounds and stats.ms > 0:
                    for _ in range(min(stats.rounds, WEIGHT)):
                        self.learnt.add(
                            stats.config, stats.batch, stats.context_tokens, stats.ms / stats.rounds
                        )
            self.learnt.fit()
        return metrics | self._metrics(rounds, reports, delivered)

    def rule(self) -> dict[str, Any]:
        """Return the data of `SpecRule.from_json` without candidates; every engine adds its own."""
        rule: dict[str, Any] = {"learnt": self.learnt.to_json()} if self.learnt else dict(self.cost)
        rule["acceptance"] = self.acceptance.fresh(START_DRAWS).to_json()
        if self.adaptive and self.prediction is not None:
            rule["forecast"] = self.prediction.rates()
        if self.probing is not None:
            rule["probing"] = self.probing
        if self.scaled is not None:
            rule["table"] = self.scaled.to_json()
        if self.correct:
            rule["correct"] = True
        if self.sharpness is not None:
            rule["sharpness"] = self.sharpness
        return rule

    @property
    def renews(self) -> bool:
        """Return whether engines need what was learned since: a forecast, costs, or the sharpness of drafts."""
        return (
            self.sharpness is not None
            or self.adaptive
            and (self.prediction is not None or self.learnt is not None)
        )

    def accept_lengths(self) -> dict[SpecConfig, float]:
        """Return tokens per round of the chains with enough recent drafts at every depth."""
        known = [draws >= LEAST_DRAWS for draws in self.acceptance.draws]
        deepest = known.index(False) if False in known else len(known)
        return {SpecConfig(k): self.acceptance.totals[k] for k in range(1, deepest + 1)}

    def accept_length(self, chain: SpecConfig) -> float | None:
        """Return tokens per round of `chain` in the next rollout: as observed lately, else as predicted, else None."""
        seen = self.accept_lengths()
        if chain not in seen and self.prediction is not None:
            return self._expected(self.prediction).get(chain.num_steps)
        return seen.get(chain)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        pending = self.prediction
        return {
            "acceptance": self.acceptance.to_json(),
            "last": self.last and self.last.to_json(),
            "prediction": pending
            and [list(pending.steps), pending.reached.tolist(), pending.accepted.tolist()],
            "sharpness": self.sharpness,
            "probing": self.probing,
            "learnt": None if self.learnt is None else self.learnt.to_json(),
            "table": None if self.scaled is None else self.scaled.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> str:
        """Restore what `state` returned; missing parts stay as they are. Returns a line if acceptance was not restored.

        Acceptance of a run that drafted fewer steps has too few depths, and engines would refuse it. A scaled table is
        restored only if it comes from the same measurements as this run's table.
        """
        known = state["acceptance"]["depth"] if state.get("acceptance") else 0
        needed = self.acceptance.depth
        lost = ""
        if 0 < known < needed:
            lost = f"the checkpoint holds acceptance of {known} drafts, expected {needed}: it is learned again"
        elif known:
            self.acceptance = Acceptance.from_json(state["acceptance"])
        self.probing = state.get("probing")
        self.sharpness = state.get("sharpness")
        if self.learnt is not None and state.get("learnt"):
            self.learnt.take_up(LearntCost.from_json(state["learnt"]))
        if self.scaled is not None and state.get("table"):
            table = CostTable.from_json(state["table"], "checkpoint")
            if table.provenance == self.scaled.provenance:
                self.scaled = table
        if state.get("last"):
            self.last = Acceptance.from_json(state["last"])
        if state.get("prediction"):
            self.prediction = Prediction.of_sums(*state["prediction"])
        return lost

    def _expected(self, prediction: Prediction) -> dict[int, float]:
        """Return tokens per round of each predicted step count in the next rollout: as observed, else as predicted."""
        seen = self.accept_lengths()
        return {
            k: seen.get(SpecConfig(k), prediction.tokens_per_round(k)) for k in prediction.steps
        }

    def _errors(self, rounds: Sequence[RoundStats]) -> dict[str, float]:
        """Compare what was expected of this rollout with its rounds. Returns `predict/…` metrics.

        Only rounds of predicted step counts count. `predict/last_value_error` is the error of assuming the last
        rollout's rates.
        """
        if self.prediction is None:
            return {}
        observed: dict[int, list[tuple[int, ...]]] = {}
        for stats in rounds:
            if stats.config.num_steps in self.prediction.steps and any(stats.accepted):
                observed.setdefault(stats.config.num_steps, []).append(stats.accepted)
        if not observed:
            return {}
        histograms = {k: pooled(found) for k, found in observed.items()}
        requests = {k: float(histogram.sum()) for k, histogram in histograms.items()}
        seen = accept_length(pooled(histograms.values()))
        by_trainer = {k: self.prediction.tokens_per_round(k) for k in requests}
        expected = _mean(self._expected(self.prediction), requests)
        metrics = {
            "predict/predicted_tokens": expected,
            "predict/trainer_tokens": _mean(by_trainer, requests),
            "predict/observed_tokens": seen,
            "predict/error": expected - seen,
        }
        if self.last is not None:
            again = {k: expected_tokens(SpecConfig(k), self.last.rates) for k in requests}
            metrics["predict/last_value_error"] = _mean(again, requests) - seen
        return metrics

    def _metrics(
        self, rounds: Sequence[RoundStats], reports: Sequence[Mapping[str, Any]], delivered: float
    ) -> dict[str, float]:
        """Return `spec/…` metrics of one rollout."""
        counts: dict[SpecConfig, int] = {}
        for stats in rounds:
            counts[stats.config] = counts.get(stats.config, 0) + stats.rounds
        total = sum(counts.values())
        ms = sum(stats.ms for stats in rounds)
        # Engines do not report rounds right after a prefill, so `total` can be 0.
        values = {
            f"spec/share_{config}": n / total for config, n in sorted(counts.items()) if total
        }
        values |= {f"spec/accept_{d}": rate for d, rate in enumerate(self.acceptance.rates, 1)}
        values |= {
            "spec/rounds": float(total),
            "spec/ms_per_round": ms / total if total else math.nan,
        }
        drafting = pooled(stats.accepted for stats in rounds if stats.config.num_steps)
        if any(drafting):  # `rollout/accept_length` counts rounds that drafted nothing, too, as 1
            values["spec/verified_tokens"] = accept_length(drafting)
        if (found := self.saved(rounds, delivered)) is not None:
            values["spec/saved_seconds"] = (found.plain_ms - found.ms) / 1e3
        decided = [report for report in reports if report.get("predicted_ms")]
        if not decided:
            return values
        sums = {name: sum(report[name] for report in decided) for name in _ADDED}
        regret = sum(report["estimated_regret"] * report["predicted_ms"] for report in decided)
        values["spec/estimated_regret"] = regret / sums["predicted_ms"]
        values["spec/switches"] = float(sums["switches"])
        values["spec/probes"] = float(sums["probes"])
        if "table" in self.cost:  # without a table the rule counts in passes, not in ms
            values["spec/predicted_tokens_per_second"] = (
                1e3 * sums["predicted_tokens"] / sums["predicted_ms"]
            )
            # Of timed rounds alone, and of all ranks of a fleet: reports count other rounds, and of a fleet rank 0's.
            tokens = sum(
                stats.rounds
                * stats.batch
                * (accept_length(stats.accepted) if any(stats.accepted) else 1.0)
                for stats in rounds
            )
            values["spec/observed_tokens_per_second"] = 1e3 * tokens / ms if ms else math.nan
        return values


def _mean(tokens: Mapping[int, float], requests: Mapping[int, float]) -> float:
    """Return tokens per round over `requests` of several step counts."""
    return sum(tokens[k] * n for k, n in requests.items()) / sum(requests.values())

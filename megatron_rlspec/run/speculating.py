"""Speculation in a run: what its engines are told, and what their rounds teach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_rlspec import files
from megatron_rlspec.config import SpecSection
from megatron_rlspec.cotrainer.speculation import DraftRule, Reports, Rounds
from megatron_rlspec.speculation.acceptance import Prediction, accept_length, pooled
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.types import RoundStats, SpecSchedule


class RunDraftRule(DraftRule):
    """The rule or schedule of a run's engines.

    drafts  whether engines speculate
    chain   draft steps of a canary
    """

    def __init__(self, options: SpecSection, learning: Learning, rule_file: Path) -> None:
        """`rule_file`: where `learn` writes the present rule."""
        adaptive = options.mode == "adaptive"
        super().__init__(learning, None if adaptive else SpecSchedule.fixed(options.config()))
        self.chain = options.num_steps or (max(options.candidate_steps) if adaptive else 0)
        self.drafts = options.mode != "off" and self.chain > 0
        self._rule_file = rule_file

    def began(self, rounds: Sequence[RoundStats], delivered: float) -> str:
        """Return a line if most rounds of a rollout drafted and it is not known that they lost time, "" otherwise.

        Before drafts were timed the rule knows their cost from the model's sizes only, so a first rollout can draft in
        vain. Its rounds correct the costs. `delivered` as for `learn`.
        """
        drafting = [stats for stats in rounds if stats.config.num_steps]
        total = sum(stats.rounds for stats in rounds)
        share = sum(stats.rounds for stats in drafting) / max(total, 1)
        saved = self.learning.saved(rounds, delivered)
        if share <= 0.5 or (saved is not None and saved.gain <= 1):
            return ""
        length = accept_length(pooled(stats.accepted for stats in drafting))
        line = f"the engines draft now, in {share:.0%} of the rounds: accept length {length:.2f}"
        if saved is not None:
            line += f", {saved.gain:.2f} times as fast as without drafts, by the costs of rounds"
        return line

    def learn(
        self, rounds: Rounds, reports: Reports, prediction: Prediction | None, delivered: float
    ) -> dict[str, float]:
        """Learn from the rounds and rule reports of a rollout, and take the trainer's `prediction` of the next one.

        The rounds also score the prediction of the step before. `delivered` is the tokens that a round delivered to a
        sample, on average. Returns metrics.
        """
        metrics = self.observe(rounds, reports, delivered) | self.learning.expect(prediction)
        files.write(self._rule_file, json.dumps(self.learning.rule()))
        return metrics

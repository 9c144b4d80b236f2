"""Speculation in a run: what its engines are told, and what their rounds teach."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_rlspec import files
from megatron_rlspec.config import SpecSection
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.speculation.acceptance import Prediction, accept_length, pooled
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.types import RoundStats, SpecConfig, SpecSchedule

ROLLOUTS = 10  # whose accepted drafts a rollout is compared with
LEAST_ROUNDS = 100  # of a rollout, which show how many drafts it accepts


class Speculation:
    """Sets the run's rule or schedule on engines, and learns the rule from their rounds.

    drafts    whether engines speculate
    adaptive  whether they choose by a rule; if not, they have one configuration
    chain     draft steps of a canary
    fell      whether the newest rollout accepted first drafts at most half as often as those before
    """

    def __init__(self, options: SpecSection, learning: Learning, rule_file: Path) -> None:
        """`rule_file`: where `learn` writes the present rule."""
        self.learning = learning
        self.adaptive = options.mode == "adaptive"
        self.chain = options.num_steps or (max(options.candidate_steps) if self.adaptive else 0)
        self.drafts = options.mode != "off" and self.chain > 0
        self.fell = False
        self._accepted: deque[float] = deque(
            maxlen=ROLLOUTS
        )  # share of first drafts, of each rollout
        self._fixed = SpecSchedule.fixed(options.config())
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

    def set(self, engine: RolloutEngine) -> None:
        """Set the run's rule or schedule on an engine. Raises EngineError."""
        if self.adaptive:
            engine.set_spec_rule(self.learning.rule())
        elif self.learning.sharpness is None:
            engine.set_schedule(self._fixed)
        else:
            engine.set_spec_rule(
                {"schedule": self._fixed.to_json(), "sharpness": self.learning.sharpness}
            )

    def expected_of_canary(self) -> float | None:
        """Return the accept length that the trainer predicted, else the one that engines observed, else None."""
        return self.learning.accept_length(SpecConfig(self.chain))

    def learn(
        self,
        rounds: Sequence[RoundStats],
        reports: Sequence[Mapping[str, Any]],
        prediction: Prediction | None,
        delivered: float,
    ) -> dict[str, float]:
        """Learn from the rounds and rule reports of a rollout, and take the trainer's `prediction` of the next one.

        The rounds also score the prediction of the step before. `delivered` is the tokens that a round delivered to a
        sample, on average. Returns metrics.
        """
        self._compare(rounds)
        found = self.learning.observe(rounds, reports, delivered) | self.learning.expect(prediction)
        files.write(self._rule_file, json.dumps(self.learning.rule()))
        return found

    def _compare(self, rounds: Sequence[RoundStats]) -> None:
        """Set `fell` by the rounds of a rollout. First drafts are compared, since the number of drafts may change."""
        counts = pooled(stats.accepted for stats in rounds if stats.config.num_steps)
        total = int(sum(counts))
        self.fell = False
        if total < LEAST_ROUNDS:
            return
        share = 1 - float(counts[0]) / total
        if self._accepted:
            self.fell = share <= 0.5 * median(self._accepted)
        self._accepted.append(share)

"""Tell a run's engines how to draft, gather their rounds, and learn from them.

Engines choose drafts by `speculation/rule.py`; the estimates are in `speculation/learning.py`. `CoTrainer`, our own
loop (`run/engines.py`) and slime (`integrations/slime/speculation.py`) each use a `DraftRule`: after a rollout `gather`
and `observe`, then `push`. `set` is what `Health` calls for each engine after its checks (`Health.speculate`); inside
slime, which pushes by itself, `set` is called before a rollout.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from megatron_rlspec.engine import RolloutEngine, ask_all
from megatron_rlspec.push.health import Health, HealthReport
from megatron_rlspec.push.push import Source
from megatron_rlspec.speculation.acceptance import pooled
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.types import RoundStats, Scope, SpecConfig

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
# A function that calls its argument for every engine, and returns the answers by the engine's name, without those of
# engines that failed; such as `ask_logged` for given engines.
AskEngines = Callable[[Callable[[RolloutEngine], Any]], dict[str, Any]]
Rounds = list[tuple[str, list[RoundStats]]]  # (engine's name, its rounds)
Reports = list[dict[str, Any]]  # `SpecRule.report` of each engine

COMPARED_ROLLOUTS = 10  # earlier rollouts that a rollout's accepted drafts are compared with
# A rollout with fewer drafting rounds than this is not compared, and `fell` is then False. A round of 8 requests counts
# as 8.
LEAST_ROUNDS = 100


def ask_logged(
    engines: Mapping[str, RolloutEngine], call: Callable[[RolloutEngine], Answer]
) -> dict[str, Answer]:
    """Call all engines at once, and return the answers by name.

    An engine that fails with EngineError is logged, and the result lacks it. Other errors are raised.
    """
    answered, errors = ask_all(engines, call)
    for error in errors.values():
        logger.warning("rlspec: this engine is left out until it answers: %s", error)
    return answered


class DraftRule:
    """Tells engines how to draft, and learns from their rounds. A run has one, on rank 0.

    learning  follows acceptance and costs
    fixed     the configuration of engines that do not choose; None: they choose by the rule of `learning`
    fell      whether the newest rollout accepted first drafts at most half as often as the median of the rollouts
              before it; the next push then runs a canary even if none is due
    """

    def __init__(self, learning: Learning, fixed: SpecConfig | None = None) -> None:
        self.learning = learning
        self.fixed = fixed
        self.fell = False
        # share of first drafts that were accepted, in each of the latest rollouts that were compared
        self._accepted: deque[float] = deque(maxlen=COMPARED_ROLLOUTS)

    def set(self, engine: RolloutEngine) -> None:
        """Set the present rule, or the fixed configuration, on an engine. Raises EngineError."""
        if self.fixed is None:
            engine.set_spec_rule(self.learning.rule())
        else:
            engine.set_config(self.fixed, self.learning.sharpness)

    def gather(self, ask_engines: AskEngines) -> tuple[Rounds, Reports]:
        """Return each engine's rounds since the last call, and the reports of their rules.

        Engines forget both, so give the result to `observe`. An engine that fails is missing, with its rounds.
        """
        answered = ask_engines(lambda engine: (engine.stats(), engine.spec_rule_report()))
        rounds = [(name, stats) for name, (stats, _) in answered.items()]
        return rounds, [report for _, report in answered.values()]

    def observe(self, rounds: Rounds, reports: Reports, delivered: float) -> dict[str, float]:
        """Learn from the rounds of a rollout, all engines together. Returns `spec/*` and `predict/*` metrics.

        Call it once a rollout, before `learning.expect` takes the prediction of the next rollout. It also sets `fell`.

        delivered  tokens that a verify round delivered to a sample, on average; NaN: not known
        """
        all_rounds = [stats for _, of_engine in rounds for stats in of_engine]
        self._compare(all_rounds)
        return self.learning.observe(all_rounds, reports, delivered)

    def push(
        self, health: Health, version: int, source: Source, scope: Scope = "all"
    ) -> HealthReport:
        """Push to the engines of `health`: arguments, result and errors are those of `Health.push`.

        A canary, if one runs, expects `learning.accept_length` under `canary_steps` drafts (None: unknown).
        """
        chain = SpecConfig(health.settings.canary_steps)
        expected = self.learning.accept_length(chain)
        return health.push(version, source, scope, expected, suspicious=self.fell)

    def _compare(self, rounds: Sequence[RoundStats]) -> None:
        """Set `fell` by the rounds of a rollout.

        Only first drafts are compared, because every round with drafts has one, however many drafts the rule chooses.
        """
        counts = pooled(stats.accepted for stats in rounds if stats.config.num_steps)
        total = int(sum(counts))
        self.fell = False
        if total < LEAST_ROUNDS:
            return
        share = 1 - float(counts[0]) / total  # of rounds with at least one accepted draft
        if self._accepted:
            self.fell = share <= 0.5 * median(self._accepted)
        # Appended after a fall, too, so that a level that stays low stops counting as a fall.
        self._accepted.append(share)

"""What chooses the configuration of an embedded engine's next round: a schedule, a rule, or a hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.embedded.model import Decoder
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

PLAIN = SpecSchedule.fixed(OFF)


class ConfigChoice:
    """See `RolloutEngine.set_schedule`, `set_spec_rule`, `hold` and `release`.

    candidates        of a rule that names none
    max_draft_tokens  tokens of a sample that a round verifies, at most
    """

    def __init__(
        self,
        model: Decoder,
        candidates: Sequence[SpecConfig],
        max_draft_tokens: int,
    ) -> None:
        self.model = model
        self.candidates = tuple(candidates)
        self.max_draft_tokens = max_draft_tokens
        self.held = ""  # why speculation is held off
        self.chosen: SpecSchedule | SpecRule = PLAIN  # also while it is held off
        # the last rule set; a schedule may have replaced it since
        self.rule: SpecRule | None = None

    @property
    def present(self) -> SpecSchedule | SpecRule:
        """Return the schedule or rule of the next round."""
        return PLAIN if self.held else self.chosen

    def set_schedule(self, schedule: SpecSchedule) -> None:
        self.check(config for row in schedule.configs for config in row)
        self.chosen = schedule

    def set_rule(self, data: Mapping[str, Any]) -> None:
        """Set a rule of JSON, which chooses from the engine's own candidates if it names none.

        It takes over the probe budget of the rule before it, and the time of its next probe.
        """
        own = [list(config.numbers) for config in self.candidates]
        given = {"candidates": own, **data}
        given.pop("sharpness", None)  # of the drafts, and not a part of the choice
        rule = SpecRule.from_json(given)
        self.check(rule.candidates)
        if self.rule is not None:
            rule.inherit(self.rule)
        self.chosen = self.rule = rule

    def report(self) -> dict[str, Any]:
        """Return `SpecRule.report` since the last call; {} under a schedule."""
        return self.chosen.report() if isinstance(self.chosen, SpecRule) else {}

    @property
    def deciding(self) -> SpecRule | None:
        """Return the rule of the next round; None under a schedule."""
        chooser = self.present
        return chooser if isinstance(chooser, SpecRule) else None

    def choose(self, batch: int, context: int, missed: Callable[[], int]) -> SpecConfig:
        """Return the next round's configuration.

        missed  returns how many tokens the drafter must run on beyond those of a usual round
        """
        chooser = self.present
        if isinstance(chooser, SpecSchedule):
            return chooser.choose(batch, context)
        behind = missed()
        return chooser.choose(batch, context, lambda n: behind, apart=False)

    def check(self, configs: Iterable[SpecConfig]) -> None:
        """Raise EngineError for a configuration that cannot run."""
        for config in configs:
            if not config.off and not self.model.arch.draft_layers:
                raise EngineError(
                    f"embedded engine: {config} needs a drafter, and the model has none"
                )
            if config.num_steps >= self.max_draft_tokens:
                raise EngineError(
                    f"embedded engine: {config} needs max_draft_tokens >= {config.num_steps + 1}"
                )

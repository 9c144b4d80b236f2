"""What chooses the configuration of an embedded engine's next round: a fixed one, a rule, or a hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_rlspec.config.spec import MOST_DRAFTS
from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.embedded.model import Decoder
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig


class ConfigChoice:
    """See `RolloutEngine.set_config`, `set_spec_rule`, `hold` and `release`.

    candidates  of a rule that names none
    """

    def __init__(self, model: Decoder, candidates: Sequence[SpecConfig]) -> None:
        self.model = model
        self.candidates = tuple(candidates)
        self.held = ""  # why speculation is held off
        self.chosen: SpecConfig | SpecRule = OFF  # also while it is held off
        # the last rule set; a configuration may have replaced it since
        self.rule: SpecRule | None = None

    @property
    def present(self) -> SpecConfig | SpecRule:
        """Return the configuration or rule of the next round."""
        return OFF if self.held else self.chosen

    def set_config(self, config: SpecConfig) -> None:
        self.check([config])
        self.chosen = config

    def set_rule(self, data: Mapping[str, Any]) -> None:
        """Set a rule of JSON, which chooses from the engine's own candidates if it names none.

        It goes on from the rule before it (`SpecRule.inherit`).
        """
        own = [config.to_json() for config in self.candidates]
        given = {"candidates": own, **data}
        given.pop("sharpness", None)  # of the drafts, and not a part of the choice
        rule = SpecRule.from_json(given)
        self.check(rule.candidates)
        if self.rule is not None:
            rule.inherit(self.rule)
        self.chosen = self.rule = rule

    def report(self) -> dict[str, Any]:
        """Return `SpecRule.report` since the last call; {} without a rule."""
        return {} if isinstance(self.chosen, SpecConfig) else self.chosen.report()

    @property
    def deciding(self) -> SpecRule | None:
        """Return the rule of the next round; None without one."""
        chooser = self.present
        return None if isinstance(chooser, SpecConfig) else chooser

    def choose(self, batch: int, context: int, missed: Callable[[], int]) -> SpecConfig:
        """Return the next round's configuration.

        missed  returns how many tokens the drafter must run on beyond those of a usual round
        """
        chooser = self.present
        if isinstance(chooser, SpecConfig):
            return chooser
        behind = missed()
        return chooser.choose(batch, context, lambda n: behind, apart=False)

    def check(self, configs: Iterable[SpecConfig]) -> None:
        """Raise EngineError for a configuration that cannot run."""
        for config in configs:
            if not config.off and not self.model.arch.draft_layers:
                raise EngineError(
                    f"embedded engine: {config} needs a drafter, and the model has none"
                )
            if config.num_steps > MOST_DRAFTS:
                raise EngineError(
                    f"embedded engine: {config}: expected at most {MOST_DRAFTS} drafts"
                )

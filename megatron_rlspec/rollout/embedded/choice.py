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
    """What `RolloutEngine.set_config`, `set_spec_rule`, `hold` and `release` set. Callers hold the engine's lock.

    Under tensor parallelism all ranks must set the same: they choose a round each by itself, and run it together.

    candidates  what a rule chooses among if it names none
    held        the reason of `hold`; "" if speculation is not held
    chosen      what was set last. A hold hides it and does not change it
    rule        the last rule set; a configuration may have replaced it since
    """

    def __init__(self, model: Decoder, candidates: Sequence[SpecConfig]) -> None:
        self.model = model
        self.candidates = tuple(candidates)
        self.held = ""
        self.chosen: SpecConfig | SpecRule = OFF
        self.rule: SpecRule | None = None

    @property
    def present(self) -> SpecConfig | SpecRule:
        """Return the configuration or rule of the next round: `OFF` while speculation is held."""
        return OFF if self.held else self.chosen

    def set_config(self, config: SpecConfig) -> None:
        """Run this configuration in every later round. Raises EngineError."""
        self.check([config])
        self.chosen = config

    def set_rule(self, data: Mapping[str, Any]) -> None:
        """Set a rule, by the JSON of `RolloutEngine.set_spec_rule`. Raises EngineError, and ValueError as `from_json`.

        It takes over limits and times of rounds from the rule before it (`SpecRule.inherit`).
        """
        own_candidates = [config.to_json() for config in self.candidates]
        rule_data = {"candidates": own_candidates, **data}
        # `EmbeddedEngine.set_spec_rule` has taken it; `from_json` refuses fields that it does not know
        rule_data.pop("sharpness", None)
        rule = SpecRule.from_json(rule_data)
        self.check(rule.candidates)
        if self.rule is not None:
            rule.inherit(self.rule)
        self.chosen = self.rule = rule

    def report(self) -> dict[str, Any]:
        """Return and reset `SpecRule.report`; {} without a rule. A held rule still reports."""
        return {} if isinstance(self.chosen, SpecConfig) else self.chosen.report()

    @property
    def deciding_rule(self) -> SpecRule | None:
        """Return the rule that decides on the next round; None under a fixed configuration or a hold."""
        chooser = self.present
        return None if isinstance(chooser, SpecConfig) else chooser

    def choose(self, batch: int, context: int, missed: Callable[[], int]) -> SpecConfig:
        """Return the next round's configuration.

        batch    number of its samples
        context  tokens of all of them, prompts included
        missed   returns how many tokens the drafter must run on beyond those of a usual round. It is called only if a
                 rule chooses
        """
        chooser = self.present
        if isinstance(chooser, SpecConfig):
            return chooser
        behind = missed()
        # In this engine all samples catch up in one round, so the number n of them that could catch up is not used.
        return chooser.choose(batch, context, lambda n: behind, apart=False)

    def check(self, configs: Iterable[SpecConfig]) -> None:
        """Raise EngineError for a configuration that this engine cannot run."""
        for config in configs:
            if not config.off and not self.model.arch.draft_layers:
                raise EngineError(
                    f"embedded engine: {config} needs a drafter, and the model has none"
                )
            if config.num_steps > MOST_DRAFTS:
                raise EngineError(
                    f"embedded engine: {config}: expected at most {MOST_DRAFTS} drafts"
                )

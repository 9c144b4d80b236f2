"""Choose the configuration of an embedded engine's next round: a fixed one, a rule's, or `OFF` while held.

`embedded/engine.py` calls this, and sets `held`. `extensions/migration/embedded/engine.py` also sets `chosen` and
`rule`.
"""

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

    Under tensor parallelism all ranks must set the same: each rank chooses the next round by itself, and all ranks run
    it together. With different configurations their collectives would not match.

    candidates  configurations that a rule chooses among if it names none
    held        the reason given to `RolloutEngine.hold`; "" if speculation is not held
    chosen      the configuration or rule that was set last, also while it is held
    rule        the rule that was set last, from which the next rule inherits; None: no rule was set yet. Not in use
                while `chosen` is a configuration
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
        """Run this configuration in every later round. Raises EngineError, as `check`, and then changes nothing."""
        self.check([config])
        self.chosen = config

    def set_rule(self, data: Mapping[str, Any]) -> None:
        """Set a rule, by the JSON of `RolloutEngine.set_spec_rule`. Raises EngineError, and ValueError as `from_json`.

        The new rule takes over limits and times of rounds from the last one (`SpecRule.inherit`). After an error
        nothing has changed.
        """
        own_candidates = [config.to_json() for config in self.candidates]
        rule_data = {"candidates": own_candidates, **data}
        # `EmbeddedEngine.set_spec_rule` reads the sharpness. `from_json` refuses it, as every field it does not know.
        rule_data.pop("sharpness", None)
        rule = SpecRule.from_json(rule_data)
        self.check(rule.candidates)
        if self.rule is not None:
            rule.inherit(self.rule)
        self.chosen = self.rule = rule

    def report(self) -> dict[str, Any]:
        """Return and reset `SpecRule.report`; {} if a fixed configuration is set. A held rule still reports."""
        return {} if isinstance(self.chosen, SpecConfig) else self.chosen.report()

    @property
    def deciding_rule(self) -> SpecRule | None:
        """Return the rule that decides on the next round; None under a fixed configuration or a hold."""
        chooser = self.present
        return None if isinstance(chooser, SpecConfig) else chooser

    def choose(self, batch: int, context: int, missed: Callable[[], int]) -> SpecConfig:
        """Return the next round's configuration. A rule counts the call as a round: call it once for each.

        batch    number of the round's samples
        context  tokens of all these samples together, prompts included
        missed   returns how many tokens the drafter must run on beyond those of a usual round (`RoundRunner.missed`).
                 It is called only if a rule chooses
        """
        chooser = self.present
        if isinstance(chooser, SpecConfig):
            return chooser
        behind = missed()
        # A rule asks what the n samples that missed least have missed. In this engine all samples catch up in the same
        # round (`apart=False`), so the answer is that of all samples for every n.
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

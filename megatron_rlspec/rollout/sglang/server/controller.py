"""Chooses the speculative configuration of every decode round inside SGLang's scheduler process.

Every tensor parallel rank decides for itself, so a decision may depend only on what all ranks share: batch, context
lengths and accepted counts, never on a local clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_rlspec.rollout.sglang.server import plain_round
from megatron_rlspec.rollout.sglang.server.drafter_gap import DrafterGap
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule


class Decider:
    """The rule in force, limited to the configurations for which the engine holds runtime state."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.spec_rule
        self.candidates: list[SpecConfig] = []
        self.rule: SpecRule | None = None
        self.stock: Any = None  # SGLang's own rule, while it decides
        self._stock: Any = None  # the same, with what it has learnt

    def start(self, candidate_steps: Sequence[int], start: int) -> None:
        """Step 0 stands for two configurations: with the drafter kept up to date, and off."""
        self.candidates = [OFF] * (0 in candidate_steps) + [SpecConfig(n) for n in candidate_steps]
        if self._settings:
            self.replace(self._settings)
        else:
            self.rule = SpecRule(self.candidates, schedule=SpecSchedule.fixed(SpecConfig(start)))

    def replace(self, data: Mapping[str, Any]) -> None:
        """`SpecRule.from_json` data; without `candidates` it may choose from all that the engine has.

        `{"stock": true}` lets SGLang's own adaptive rule decide instead, to compare with.
        """
        if data.get("stock"):
            self.stock = self._stock = self._stock or self._stock_rule()
            return
        candidates = [[c.num_steps, c.topk, c.num_draft_tokens] for c in self._priced(data.get("table"))]
        rule = SpecRule.from_json({"candidates": candidates, **data})
        self._check(rule.candidates)
        if rule.schedule is not None:
            self._check({config for row in rule.schedule.configs for config in row})
        if self.rule is not None:
            rule.inherit(self.rule)
        self.rule, self.stock = rule, None

    def choose(self, batch: int, context_tokens: int, missed: Callable[[int], int] | None) -> tuple[SpecConfig, int]:
        """The next round's configuration, and how many requests' drafters have to catch up before it."""
        if self.stock:
            return SpecConfig(self.stock.get_steps_for_batch(batch)), batch
        return self.rule.choose(batch, context_tokens, missed), self.rule.catch_up

    def set_schedule(self, schedule: SpecSchedule) -> None:
        self._check({config for row in schedule.configs for config in row})
        if self.rule is not None:
            self.rule.update(schedule=schedule)
            self.stock = None

    def _priced(self, table: str | Mapping[str, Any] | None) -> list[SpecConfig]:
        """All candidates, but step 0 only if its cost is known: `OFF` does the same for less."""
        if table is None:
            return self.candidates
        measured = CostTable.load(table) if isinstance(table, str) else CostTable.from_json(table)
        known = measured.configs()
        return [c for c in self.candidates if c != SpecConfig(0) or c in known]

    def _stock_rule(self) -> Any:
        """With the steps per batch size that SGLang has built in."""
        from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

        rule = AdaptiveSpeculativeParams(initial_steps=max(c.num_steps for c in self.candidates or [OFF]))
        self._check({SpecConfig(steps) for steps in rule.candidate_steps})
        return rule

    def _check(self, wanted: Sequence[SpecConfig] | set[SpecConfig]) -> None:
        allowed = self.candidates or [OFF]
        refused = [str(config) for config in sorted(wanted) if config not in allowed]
        if refused:
            has = ", ".join(str(config) for config in allowed)
            raise ValueError(f"this engine cannot run {', '.join(refused)}; it was launched with {has}")


@dataclass(frozen=True)
class Round:
    """What one decode round ran; `drafting` lists the requests whose drafter had caught up, None: all of them."""

    config: SpecConfig
    context_tokens: int
    drafting: list[int] | None


decider: Decider | None = None
_STUBBED = ("topk_p", "topk_index", "hidden_states")  # what SGLang hands on between rounds, and nobody reads when off


def _nothing(_: int) -> int:
    return 0


def controller_class(settings: Settings) -> type:
    """SGLang's AdaptiveController with our decision; its own rule keeps listing candidates and graph sizes."""
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController

    global decider
    decider = Decider(settings)

    class ScheduleController(AdaptiveController):
        def __init__(self, worker: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(worker, *args, **kwargs)  # SGLang's own rule, or where it is configured, by version
            decider.start(self.candidate_steps, worker.speculative_num_steps)
            self._config = SpecConfig(worker.speculative_num_steps)
            self._gap = DrafterGap(worker)
            self._drafting: list[int] | None = None  # whose drafter has caught up; None: everybody's
            self._batch: Any = None
            self._context = 0
            self._decided = False  # this round's configuration, before SGLang asked for it
            self._stub: tuple[torch.Tensor, ...] | None = None
            self._forward = worker.forward_batch_generation
            worker.forward_batch_generation = self._round
            self._extend = worker.draft_worker._draft_extend_for_decode
            worker.draft_worker._draft_extend_for_decode = self._extend_unless_off

        def activate_step_by_batch(self, batch_size: int) -> None:
            if not self._decided:
                self._decide(batch_size)
            self._decided = False

        def _decide(self, batch_size: int) -> None:
            reqs, gap = self._batch.reqs, self._gap
            if reqs:
                self._context = sum(r.seqlen for r in reqs)
                missed = partial(gap.missed, reqs) if gap.open else _nothing
                self._config, n = decider.choose(batch_size, self._context, missed)
                self._drafting = gap.close(self._batch, n) if gap.open and not self._config.off else None
            if self._config.num_steps != self.worker.speculative_num_steps:
                self._activate(self._config.num_steps)

        def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
            """Ours decides nothing here: under overlap the worker may already run another configuration."""
            if decider.stock:
                decider.stock.on_verify_complete(num_correct_drafts_per_req, batch_size)

        def _round(self, batch: Any, on_publish: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._batch = batch
            if batch.forward_mode.is_extend() or batch.is_extend_in_batch or not batch.reqs:
                if self._gap.open:
                    self._gap.forget(batch.reqs)
                return self._forward(batch, on_publish, *args, **kwargs)
            self._decide(len(batch.reqs))
            if self._config.off and plain_round.possible(self.worker, batch):
                result, hidden, tokens = plain_round.run(self.worker, batch, on_publish)
                self._leave_out(batch, result, hidden, tokens)
            else:
                self._decided = True
                result = self._forward(batch, on_publish, *args, **kwargs)
            result.rlspec_round = Round(self._config, self._context, self._drafting)
            return result

        def _extend_unless_off(self, batch: Any, result: Any, **kwargs: Any) -> None:
            if batch.reqs and (self._config.off or self._drafting is not None):
                # CUDA graphs write into the same buffers every round.
                hidden, tokens = result.logits_output.hidden_states.clone(), batch.spec_info.draft_token.clone()
                if self._config.off:
                    self._leave_out(batch, result, hidden, tokens)
                    return
                self._gap.record(batch.reqs, hidden, tokens, result.accept_lens.clone(), self._drafting)
            self._extend(batch, result, **kwargs)

        def _leave_out(self, batch: Any, result: Any, hidden: Any, tokens: Any) -> None:
            """The drafter skips this round; what it would have read is kept."""
            self._gap.record(batch.reqs, hidden, tokens)
            if self._stub is None or len(self._stub[0]) != len(batch.reqs):
                self.worker._stub_skipped_draft_extend(batch, result)
                self._stub = tuple(getattr(result.next_draft_input, name) for name in _STUBBED)
            for name, value in zip(_STUBBED, self._stub, strict=True):
                setattr(result.next_draft_input, name, value)

    return ScheduleController

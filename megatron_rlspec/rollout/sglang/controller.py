"""Chooses the speculative configuration of every decode round inside SGLang's scheduler process.

Every tensor parallel rank decides for itself, so a decision may depend only on what all ranks share: batch, context
lengths and accepted counts, never on a local clock.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from megatron_rlspec.rollout.sglang.plugin import Settings
from megatron_rlspec.types import SpecConfig, SpecSchedule

logger = logging.getLogger(__name__)


class Policy(Protocol):
    def choose(self, batch: int, context: int) -> SpecConfig: ...


class Switch:
    """The policy in force, and the configurations for which the engine holds runtime state."""

    def __init__(self, settings: Settings) -> None:
        self.policy: Policy | None = settings.schedule
        self.candidates: list[int] | None = None

    def set_schedule(self, schedule: SpecSchedule) -> None:
        wanted = {config for row in schedule.configs for config in row}
        if self.candidates is None:
            refused = [config for config in wanted if not config.off]
            known = "off: it was launched without adaptive speculation"
        else:
            refused = [c for c in wanted if not c.off and (c.topk != 1 or c.num_steps not in self.candidates)]
            known = f"candidate_steps {self.candidates}"
        if refused:
            raise ValueError(f"schedule asks for {refused[0]}, but this engine only has {known}")
        self.policy = schedule


switch: Switch | None = None


def controller_class(settings: Settings) -> type:
    """SGLang's AdaptiveController with our decision; its own policy keeps listing candidates and graph sizes."""
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController

    global switch
    switch = Switch(settings)

    class ScheduleController(AdaptiveController):
        def __init__(self, worker: Any, policy: Any) -> None:
            super().__init__(worker, policy)
            switch.candidates = list(policy.candidate_steps)
            if switch.policy is None:
                switch.policy = SpecSchedule.fixed(SpecConfig(worker.speculative_num_steps))
            switch.set_schedule(switch.policy)
            self._batch: Any = None
            inner = worker.forward_batch_generation

            def remember_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
                self._batch = batch
                return inner(batch, *args, **kwargs)

            worker.forward_batch_generation = remember_batch

        def activate_step_by_batch(self, batch_size: int) -> None:
            reqs = self._batch.reqs
            config = switch.policy.choose(batch_size, sum(r.seqlen for r in reqs))
            if config.num_steps != self.worker.speculative_num_steps:
                self._activate(config.num_steps)

        def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
            """Nothing is decided here: under overlap the worker may already run another configuration."""

    return ScheduleController

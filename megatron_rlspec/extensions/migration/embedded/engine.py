"""An embedded engine that a fleet drives step by step, and whose samples come from other engines and leave for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import Load, Request, RunningSample, Sampling


class MigratableEmbeddedEngine(EmbeddedEngine):
    """See `EmbeddedEngine`."""

    def submit(self, requests: Sequence[tuple[Request, Sampling]]) -> list[ActiveRequest]:
        """Queue requests for `step`. Raises EngineError, and queues none, if one of them is wrong."""
        with self._lock:
            return self.scheduler.submit(requests)

    def step(self) -> None:
        """Admit, prefill and run one round. Raises EngineError."""
        with self._lock:
            self._serve()

    def drop(self, ids: Sequence[str]) -> list[ActiveRequest]:
        """Take these samples out, without an end. Returns those that were here."""
        with self._lock:
            dropped = [run for run in self.scheduler.every if run.request.id in ids]
            for run in dropped:
                self.scheduler.remove(run)
            return dropped

    def seat(
        self,
        requests: Sequence[tuple[Request, Sampling]],
        rows: Mapping[str, int],
        rule: SpecRule | None,
    ) -> list[ActiveRequest]:
        """Replace all requests by these. Those whose id is in `rows` have that row of the cache; the others wait.

        rule  replaces the engine's own, if given
        """
        with self._lock:
            runs = self.scheduler.made(requests)
            self.scheduler.running = []
            self.scheduler.waiting = []
            for run in runs:
                row = rows.get(run.request.id)
                if row is None:
                    self.waiting.append(run)
                else:
                    self.scheduler.seat(run, row)
                    self.running.append(run)
            if rule is not None:
                self.choice.chosen = self.choice.rule = rule
            return runs

    def load(self, name: str) -> Load:
        """Describe what this engine has to do."""
        with self._lock:
            running = []
            for run in self.running:
                if run.response and self.rounds.ready(run.row):
                    prompt = len(run.request.prompt.tokens)
                    length = len(run.response)
                    # the round that generated the first token counts here
                    accept = length / (run.rounds + 1)
                    running.append(RunningSample(run.request.id, prompt, prompt + length, accept))
            waiting = len(self.waiting) + len(self.running) - len(running)
            return Load(name, tuple(running), waiting, self.cache.left, self.version)

"""An embedded engine of a fleet: `member.py` runs its rounds one by one, and moves samples into it and out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import Load, Request, RunningSample, Sampling


class MigratableEmbeddedEngine(EmbeddedEngine):
    """An `EmbeddedEngine` whose steps its `Member` runs, by `submit` and `step`, and not by `generate`."""

    def submit(self, requests: Sequence[tuple[Request, Sampling]]) -> list[ActiveRequest]:
        """Queue requests for `step`. Raises EngineError, and queues none, if one of them is wrong."""
        with self._lock:
            return self.scheduler.submit(requests)

    def step(self) -> None:
        """End aborted requests, admit, prefill and run one round. Raises EngineError, and errors of torch.

        Under tensor parallelism all ranks of the engine must call it together.
        """
        with self._lock:
            self._serve()

    def drop(self, ids: Sequence[str]) -> list[ActiveRequest]:
        """Remove the requests with these ids, without making samples of them. Returns those that this engine had."""
        with self._lock:
            dropped = [run for run in self.scheduler.every if run.request.id in ids]
            for run in dropped:
                self.scheduler.remove(run)
            return dropped

    def replace_requests(
        self,
        requests: Sequence[tuple[Request, Sampling]],
        rows: Mapping[str, int],
        rule: SpecRule | None,
    ) -> list[ActiveRequest]:
        """Replace all requests by `requests`. Returns the new runs, in the order of `requests`.

        `regroup` calls it right after `retile`, which has filled the cache anew.

        rows  by id: the row of the new cache that holds a request's tokens. A request without one waits and is
              prefilled
        rule  replaces the engine's own; None: the engine keeps its own
        """
        with self._lock:
            runs = self.scheduler.make_runs(requests)
            # Not by `Scheduler.remove`, which frees the row of a run: `retile` has reset the cache, and the row of that
            # number may be another sample's now.
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
                # Not by `set_rule`, which lets a rule inherit from the one before, and those differ between ranks: all
                # ranks of a group must have the same rule, or they would choose different drafts.
                self.choice.chosen = self.choice.rule = rule
            return runs

    def load(self, name: str) -> Load:
        """Describe what this engine, called `name`, has to do. A sample that is not prefilled yet counts as waiting."""
        with self._lock:
            running = []
            for run in self.running:
                if run.response and self.rounds.ready(run.row):
                    prompt = len(run.request.prompt.tokens)
                    length = len(run.response)
                    # `run.rounds` leaves out the round that sampled the first token; `length` counts that token.
                    accept = length / (run.rounds + 1)
                    running.append(RunningSample(run.request.id, prompt, prompt + length, accept))
            waiting = len(self.waiting) + len(self.running) - len(running)
            return Load(name, tuple(running), waiting, self.cache.left, self.version)

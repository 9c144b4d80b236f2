"""An embedded engine that a fleet drives step by step, and whose samples come from other engines and leave for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import Load, Request, RunningSample, Sampling

Land = Callable[[], list[ActiveRequest]]


class MigratableEmbeddedEngine(EmbeddedEngine):
    """See `EmbeddedEngine`.

    reserved  rows of the cache for samples that another engine hands over, by id
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.reserved: dict[str, int] = {}
        # arguments of the `step` that runs
        self._newcomers: Sequence[ActiveRequest] = ()
        self._land: Land | None = None
        super().__init__(*arguments, **options)

    def submit(self, requests: Sequence[tuple[Request, Sampling]]) -> list[ActiveRequest]:
        """Queue requests for `step`. Raises EngineError, and queues none, if one of them is wrong."""
        with self._lock:
            return self.scheduler.submit(requests)

    def step(self, newcomers: Sequence[ActiveRequest] = (), land: Land | None = None) -> None:
        """Admit, prefill and run one round. Raises EngineError.

        newcomers  samples of another engine whose drafter's keys are here, while those of the target still travel. They
                   draft in the round during which the target's keys arrive, and are verified in it
        land       waits for the target's keys, and returns the samples that are whole then
        """
        with self._lock:
            self._newcomers = newcomers
            self._land = land
            try:
                self._serve()
            finally:
                self._newcomers = ()
                self._land = None

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
        """Replace all requests by these: those that have a row of the cache already, by id, and others that wait.

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

    def _round(self, runs: list[ActiveRequest], drafts: bool = True) -> None:
        """Run one round. Samples that land draft while their target's keys still travel, and are verified with all."""
        if self._land is None or not drafts:
            super()._round(runs, drafts)
            return
        newcomers = self._newcomers
        if not runs and not newcomers:
            return
        began = time.perf_counter()
        rows = np.array([run.row for run in (*runs, *newcomers)])
        context = int(self.cache.length[rows].sum())
        config = self.choice.choose(len(rows), context, lambda: self.rounds.missed(rows))
        columns = self.rounds.columns(rows, config)
        rows_here = len(runs)
        room = True
        for run, needed in zip(newcomers, columns[rows_here:].tolist(), strict=True):
            room = room and self.cache.back(run.row, needed)
        ahead = None
        if newcomers and room and not config.off:
            ahead = self.rounds.draft_only(rows[rows_here:], config)
        runs = self.scheduler.make_room(runs, columns[:rows_here])
        landed = self._land()
        self.scheduler.running += landed
        if room:
            runs += landed
        if not landed:
            ahead = None
        if runs:
            self._run_round(runs, config, context, began, ahead, timed=False)

    def _retract(self) -> None:
        """Put every running sample back into the queue, and give up reserved rows.

        What has arrived in those may be of other weights.
        """
        for row in self.reserved.values():
            self.cache.close(row)
        self.reserved.clear()
        super()._retract()

"""An embedded engine that a fleet drives step by step, and whose samples come from other engines and leave for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import Held, Load, Request, Sampling


class Landing(Protocol):
    """Samples of another engine whose drafter's keys are here; those of the target still travel.

    They draft in the round during which the target's keys arrive, and are verified in it.
    """

    runs: list[ActiveRequest]

    def land(self) -> list[ActiveRequest]:
        """Wait for the target's keys. Returns the samples, which are whole now."""


class MigratableEmbeddedEngine(EmbeddedEngine):
    """See `EmbeddedEngine`.

    reserved  rows of the cache for samples that another engine hands over, by id
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.reserved: dict[str, int] = {}
        self._landing: Landing | None = None  # of the step that runs
        super().__init__(*arguments, **options)

    def submit(self, requests: Sequence[tuple[Request, Sampling]]) -> list[ActiveRequest]:
        """Queue requests for `step`. Raises EngineError, and queues none, if one of them is wrong."""
        with self._lock:
            return self.scheduler.submit(requests)

    def step(self, landing: Landing | None = None) -> None:
        """Admit, prefill and run one round, in which the samples of `landing` take part. Raises EngineError."""
        with self._lock:
            self._landing = landing
            try:
                self._serve()
            finally:
                self._landing = None

    def drop(self, ids: Sequence[str]) -> list[ActiveRequest]:
        """Take these samples out, without an end. Returns those that were here."""
        with self._lock:
            found = [run for run in self.scheduler.every if run.request.id in ids]
            for run in found:
                self.scheduler.remove(run)
            return found

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
                run.row = rows.get(run.request.id, -1)
                if run.row >= 0:
                    self.rounds.seat(run.row, run.sampling, run.request.seed, run.draws)
                    run.seats += 1
                    self.running.append(run)
                else:
                    self.waiting.append(run)
            if rule is not None:
                self.choice.chosen = self.choice.rule = rule
            return runs

    def load(self, name: str) -> Load:
        """Describe what this engine has to do."""
        with self._lock:
            ready = [run for run in self.running if self.rounds.ready(run.row) and run.response]
            held = tuple(Held(*run.progress(), run.request.prompt.id) for run in ready)
            waiting = len(self.waiting) + len(self.running) - len(ready)
            return Load(name, held, waiting, self.cache.left, self.version)

    def _round(self, runs: list[ActiveRequest]) -> None:
        """Run one round. Samples that land draft while their target's keys still travel, and are verified with all."""
        landing = self._landing
        if landing is None:
            super()._round(runs)
            return
        newcomers = landing.runs
        if not runs and not newcomers:
            return
        began = time.perf_counter()
        rows = np.array([run.row for run in (*runs, *newcomers)])
        context = int(self.cache.length[rows].sum())
        chooser, config = self._choose(rows, context)
        columns = self.rounds.columns(rows, config)
        room = all(
            self.cache.back(run.row, n)
            for run, n in zip(newcomers, columns[len(runs) :].tolist(), strict=True)
        )
        ahead = (
            self.rounds.draft_only(rows[len(runs) :], config)
            if newcomers and room and not config.off
            else None
        )
        runs = self.scheduler.make_room(runs, columns[: len(runs)])
        landed = landing.land()
        self.scheduler.running += landed
        runs += landed if room else []
        if runs:
            self._run_round(
                runs, chooser, config, context, began, ahead if landed else None, timed=False
            )

    def _retract(self) -> None:
        """Put every running sample back into the queue, and give up reserved rows.

        What has arrived in those may be of other weights.
        """
        for row in self.reserved.values():
            self.cache.close(row)
        self.reserved.clear()
        super()._retract()

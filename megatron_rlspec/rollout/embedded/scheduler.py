"""The requests of an embedded engine: which wait, and which run in rows of its KV cache.

A request that the engine works on is an `ActiveRequest`, here called a run. It is in `running` (with a row), in
`waiting` (without one), or in neither once its sample is made.

`embedded/engine.py` calls this file between two rounds. `extensions/migration/embedded/` calls `submit`,
`make_runs`, `check`, `seat` and `remove`, and changes `running` and `waiting` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megatron_rlspec.engine import EngineError, RequestError
from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.rollout.embedded.rounds import RoundRunner
from megatron_rlspec.texts import StopStrings
from megatron_rlspec.types import Request, Sampling, Status, ended


class Scheduler:
    """Admits requests into the cache while it has room. Its caller holds the engine's lock.

    max_length  tokens of a sample, the prompt included
    ends        token ids that end a response, unless a request ignores them (`Sampling.ignore_eos`)
    tokenizer   a function that loads the model's tokenizer; called once, at the first request with stop strings. None:
                requests with stop strings are refused
    running     the runs with a row, in the order in which they got it: `make_room` takes the last one's row first
    waiting     the runs without a row, the next first
    """

    def __init__(
        self,
        cache: Cache,
        rounds: RoundRunner,
        max_length: int,
        ends: Collection[int],
        tokenizer: Callable[[], Any] | None = None,
    ) -> None:
        self.cache = cache
        self.rounds = rounds
        self.max_length = max_length
        self.ends = frozenset(ends)
        self._tokenizer = tokenizer
        self.running: list[ActiveRequest] = []
        self.waiting: list[ActiveRequest] = []

    @property
    def every(self) -> list[ActiveRequest]:
        """Return a new list of the runs whose sample is not made yet: the running ones, then the waiting ones."""
        return [*self.running, *self.waiting]

    # ---- requests that come -----------------------------------------------------------------------------------------

    def make_runs(self, requests: Sequence[tuple[Request, Sampling]]) -> list[ActiveRequest]:
        """Make runs of requests, in their order. They are not in `waiting` yet.

        Nothing but stop strings is checked: `limit` can be below 1 until `check` refuses such a prompt, and runs whose
        partial sample has ended have no `sample` yet. Raises EngineError for stop strings without a tokenizer.
        """
        runs = []
        for request, sampling in requests:
            stops = frozenset(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                stops |= self.ends
            strings = StopStrings(sampling.stop, self._decode) if sampling.stop else None
            limit = min(sampling.max_new_tokens, self.max_length - len(request.prompt.tokens))
            runs.append(ActiveRequest(request, sampling, stops, limit, strings))
        return runs

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        """Return the tokenizer's `decode`. The tokenizer is loaded at the first request with stop strings."""
        if self._tokenizer is None:
            raise EngineError(
                "embedded engine: stop strings need a tokenizer, and this engine was given none"
            )
        return self._tokenizer().decode

    def check(self, run: ActiveRequest, used_ids: set[str]) -> None:
        """Check a run, and add its id to `used_ids`. Raises RequestError for a wrong request.

        If its partial sample has ended already, the run gets its `sample` here, and must not be queued.

        used_ids  ids of the requests in the engine, and of those checked before in the same call
        """
        request = run.request
        length = len(request.prompt.tokens)
        if not 0 < length < self.max_length:
            raise RequestError(
                f"request {request.id}: {length} prompt tokens; expected 1 to {self.max_length - 1}"
            )
        if request.id in used_ids:
            raise RequestError(f"request {request.id}: the id is already in use")
        used_ids.add(request.id)
        if request.partial is not None:
            try:
                # called for its ValueError only; `run.status` also knows stop strings
                ended(run.response, run.stop_ids, run.limit)
            except ValueError as error:
                raise RequestError(f"request {request.id}: {error}") from None
            status = run.status()
            if status is not None:
                run.sample = run.so_far(status)

    def submit(self, requests: Sequence[tuple[Request, Sampling]]) -> list[ActiveRequest]:
        """Queue requests, and return their runs in order. Raises EngineError, and queues none, if one is wrong.

        A run whose partial sample has ended already has its `sample` at once, and is not queued.
        """
        used_ids = {run.request.id for run in self.every}
        runs = self.make_runs(requests)
        for run in runs:
            self.check(run, used_ids)
        self.waiting += [run for run in runs if run.sample is None]
        return runs

    # ---- rows of the cache ------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give rows to waiting requests, in their order, while there is room."""
        while self.waiting:
            # With less than a sixteenth of the slots free nothing is admitted: what runs needs these slots in its next
            # rounds, and `make_room` would soon send the sample that came last back into the queue. While nothing runs,
            # nothing would free slots: admit.
            if self.running and self.cache.left < self.cache.total // 16:
                return
            run = self.waiting[0]
            tokens = run.tokens
            row = self.cache.open(tokens, len(run.request.prompt.tokens), len(tokens))
            if row is None:
                return  # a shorter sample behind it does not overtake it: a long one could wait for ever
            self.seat(run, row)
            self.running.append(self.waiting.pop(0))

    def seat(self, run: ActiveRequest, row: int) -> None:
        """Give a run a row that `Cache.open` has opened for its tokens. The caller moves the run to `running`."""
        self.rounds.seat(row, run.sampling, run.request.seed, run.draws)
        run.row = row

    def make_room(self, runs: list[ActiveRequest], columns: np.ndarray) -> list[ActiveRequest]:
        """Give `runs[i]` slots for its columns [0, columns[i]). Returns those of `runs` that still have a row.

        All of `runs` must be in `running`. While slots lack, the run that got its row last goes back to the head of the
        queue. It may be one of `runs`, and may have got slots here before.

        columns  [B] int64, from `RoundRunner.columns`
        """
        for run, count in zip(runs, columns.tolist(), strict=True):
            while run.row >= 0 and not self.cache.ensure_slots(run.row, count):
                youngest = self.running.pop()
                self.vacate(youngest)
                self.waiting.insert(0, youngest)
        return [run for run in runs if run.row >= 0]

    def retract(self) -> None:
        """Put every running sample back to the head of the queue, in order. Its KV cache is recomputed later."""
        for run in self.running:
            self.vacate(run)
        self.waiting[:0] = self.running
        self.running = []

    def vacate(self, run: ActiveRequest) -> None:
        """Take a running sample's row from it. The caller removes the sample from `running`."""
        # while the sample has a row, `RoundRunner.draws` counts its draws, and `run.draws` is out of date
        run.draws = int(self.rounds.draws[run.row])
        self.cache.close(run.row)
        run.row = -1

    # ---- requests that go -------------------------------------------------------------------------------------------

    def remove(self, run: ActiveRequest) -> None:
        """Take a run out of the engine, without making its sample. Does nothing for a run that is not in the engine."""
        if run.row >= 0:
            self.vacate(run)
            self.running.remove(run)
        elif run in self.waiting:
            self.waiting.remove(run)

    def end(self, run: ActiveRequest, status: Status) -> None:
        """Take a run out of the engine, and make its sample with this status."""
        # first: `remove` stores the number of draws in the run, and the sample states that number
        self.remove(run)
        run.sample = run.so_far(status)

"""Several engines as one: distribute requests, collect samples, and continue when engines fail."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.types import Partial, Request, RoundStats, Sample, Sampling, Scope, SpecSchedule

if TYPE_CHECKING:
    import torch

ABORT_AGAIN = 0.2  # seconds
logger = logging.getLogger(__name__)
Returned = Callable[[str, Request | None], None]  # (id, the request to continue); see `Owner.lend`


@dataclass(frozen=True)
class Stay:
    """The time that a sample spent on one engine, in seconds of `time.perf_counter`."""

    id: str
    engine: RolloutEngine
    began: float
    ended: float


class Owner(Protocol):
    """The requests of a running `generate`, for what moves them between engines (`EnginePool.balance`).

    waiting  groups of requests that no engine has
    samples  those that have ended, by id
    stays    of samples on engines that they have left
    """

    waiting: deque[list[Request]]
    samples: dict[str, Sample]
    stays: list[Stay]

    def drawn_by(self, engine: RolloutEngine) -> Mapping[str, Request]:
        """Return the unfinished requests of an engine."""

    def lend(self, engine: RolloutEngine, ids: Iterable[str], returned: Returned) -> list[str]:
        """Give samples away: when the engine returns one aborted, it goes to `returned` and is not finished.

        `returned` is called once for each, with the request to continue, or with None if the sample has ended or the
        engine is lost. Returns the ids that are lent; the others are elsewhere, or lent already.
        """

    def take_back(self, ids: Iterable[str]) -> None:
        """End `lend` for samples that the engine still draws."""

    def resume(self, requests: Sequence[Request], engine: RolloutEngine) -> None:
        """Continue samples on an engine, or on another one if it is lost."""


class EnginePool:
    """Generates on several engines. Requests of one prompt go to one engine, whose prefix cache they share.

    Groups are dealt by their predicted lengths, the longest first, each to the engine with the fewest predicted tokens.
    When an engine has less than half as many requests as another, it takes over some that the other has not begun.

    in_flight  requests that one engine holds at a time; further groups go to the first engine that has room. 0: all
               groups are distributed at the start
    lost       is called with each engine that failed, from the thread that saw the failure
    continues  whether the engines take samples that have begun; otherwise such samples begin anew
    lanes      engines that are given no request while another is left: samples only move to them

    `balance`, if it is set, is entered around every `generate`, and may move its samples through `Owner`.

    An engine that fails is closed and left out from then on; `failures` gives the reason by the engine's `id`. Its
    unfinished requests go on on the others, from what is known of them. When no engine is left, every method raises
    EngineError.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        in_flight: int = 0,
        lost: Callable[[RolloutEngine], None] = lambda engine: None,
        continues: bool = True,
        lanes: Collection[RolloutEngine] = (),
    ) -> None:
        if not engines:
            raise ValueError("an EnginePool needs at least one engine")
        self._engines = list(engines)
        self._lanes = list(lanes)
        self._in_flight = in_flight
        self._lost = lost
        self.continues = continues
        self._runs: list[_Run] = []
        self.balance: Callable[[Owner], AbstractContextManager] | None = None
        self.stolen = 0  # requests that moved before they had begun
        self.continued = 0  # tokens of lost engines' samples that other engines went on from
        self.failures: dict[int, str] = {}
        self._dropping = threading.Lock()

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        """Return the engines that have not failed."""
        return tuple(self._engines)

    @property
    def dealt(self) -> tuple[RolloutEngine, ...]:
        """Return the engines that are given requests."""
        return tuple(engine for engine in self._engines if engine not in self._lanes) or self.engines

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None = None,
        lengths: Mapping[int, float] = MappingProxyType({}),
    ) -> list[Sample]:
        """Draw one sample per request, in their order. `on_sample` is called once per request, from any thread.

        lengths  predicted tokens of a response, by the prompt's id. Prompts without one count as the mean of the
                 others; without any, groups are dealt in their order, by their number of requests

        Raises EngineError if no engine is left, and ValueError if two requests have one id.
        """
        self.check()
        if len({r.id for r in requests}) != len(requests):
            raise ValueError("two requests have the same id")
        run = _Run(self, requests, sampling, on_sample, lengths)
        self._runs.append(run)
        try:
            with self.balance(run) if self.balance else nullcontext():
                return run.finish()
        finally:
            self._runs.remove(run)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], scope: Scope = "all") -> None:
        tensors = list(tensors) if len(self._engines) > 1 else tensors
        self.everywhere(lambda engine: engine.update_weights(version, tensors, scope))

    def set_schedule(self, schedule: SpecSchedule) -> None:
        self.everywhere(lambda engine: engine.set_schedule(schedule))

    def pause(self) -> None:
        self.everywhere(lambda engine: engine.pause())

    def resume(self) -> None:
        self.everywhere(lambda engine: engine.resume())

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all. A lost engine is left to the `generate` that runs on it."""
        for run in list(self._runs):
            run.abort(request_ids)
        for engine in self.engines:
            with suppress(EngineError):
                engine.abort(request_ids)

    def stats(self) -> list[RoundStats]:
        by_engine = self.everywhere(lambda engine: engine.stats())
        return [stats for of_one in by_engine for stats in of_one]

    def fingerprints(self) -> dict[str, int]:
        """Return those of the first engine. Raises EngineError if another engine holds other weights."""
        first, *others = self.everywhere(lambda engine: engine.fingerprints())
        for engine, other in zip(self._engines[1:], others, strict=True):
            different = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
            if different:
                raise EngineError(f"{engine}: {len(different)} tensors differ from {self._engines[0]}: {different[0]}")
        return first

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def drop(self, engine: RolloutEngine, error: EngineError) -> None:
        """Close a failed engine and leave it out from now on. Raises EngineError if none is left."""
        with self._dropping:
            known = engine in self._engines
            if known:
                self._engines.remove(engine)
                self.failures[id(engine)] = str(error)
        if known:
            logger.warning("engine left out, %d remain: %s", len(self._engines), error)
            engine.close()
            self._lost(engine)
        self.check()

    def check(self) -> None:
        """Raise EngineError if no engine is left."""
        if not self._engines:
            raise EngineError(f"no engine is left; the last one failed with: {[*self.failures.values()][-1]}")

    def serve(self, engines: Collection[RolloutEngine]) -> None:
        """Give requests to these engines from now on, and none to the others while one of these is left."""
        self._lanes = [engine for engine in self._engines if engine not in engines]

    def add(self, engine: RolloutEngine, lane: bool = False) -> None:
        """Add an engine that holds the same weights as the others; a lane also during `generate`."""
        self._engines.append(engine)
        if lane:
            self._lanes.append(engine)

    def remove(self, engine: RolloutEngine) -> None:
        """Forget an engine that draws nothing, without closing it."""
        self._engines.remove(engine)
        self._lanes = [other for other in self._lanes if other is not engine]

    def everywhere(self, call: Callable[[RolloutEngine], Any]) -> list[Any]:
        """Call every engine at once; return the results of those that did not fail, in order."""
        engines = list(self._engines)
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            futures = [threads.submit(call, engine) for engine in engines]
        results = []
        for engine, future in zip(engines, futures, strict=True):
            try:
                results.append(future.result())
            except EngineError as error:
                self.drop(engine, error)
        return results


class _Run:
    """One `generate`. The calling thread distributes groups; worker threads wait for engines.

    A request is in exactly one place: in `waiting`, with the call in `where` that draws it, in the hands of the mover
    that `lend` gave it to, or in `samples`.

    load, tokens  of each engine's requests: their number, and how many tokens they will take
    queueing      engines that may hold requests that they have not begun
    aborted       requests that come back as they are
    """

    def __init__(
        self,
        pool: EnginePool,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None,
        lengths: Mapping[int, float],
    ) -> None:
        self.pool = pool
        self.requests = requests
        self.sampling = sampling
        self.on_sample = on_sample
        self.lengths = lengths
        known = [lengths[r.prompt.id] for r in requests if r.prompt.id in lengths]
        self.unknown = sum(known) / len(known) if known else 1.0
        self.waiting: deque[list[Request]] = deque()
        self._enqueue(sorted(requests, key=self._predicted, reverse=True))
        self.samples: dict[str, Sample] = {}
        self.aborted: set[str] = set()
        self.abort_at = 0.0  # when the aborts are repeated
        self.load: dict[int, int] = defaultdict(int)
        self.tokens: dict[int, float] = defaultdict(float)
        self.queueing: set[int] = set()
        self.running: dict[Future, tuple[RolloutEngine, list[Request]]] = {}
        self.where: dict[str, tuple[RolloutEngine, Request]] = {}
        self.since: dict[str, float] = {}  # when the call in `where` began
        self.stays: list[Stay] = []
        self.lent: dict[str, Returned] = {}
        self.coming: deque[tuple[RolloutEngine, list[Request]]] = deque()  # continued by `resume`
        self.over = False  # whether `finish` has failed: nothing is lent then, as calls that failed return no samples
        self.freed = False  # whether a sample has ended, or an abort has come, since the last look at stealing
        self.ran_dry = False  # whether an engine has taken over requests; then they go where the fewest are
        self.changed = threading.Condition()

    def _enqueue(self, requests: Sequence[Request]) -> None:
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.prompt.id, []).append(request)
        self.waiting.extendleft(reversed(groups.values()))

    def _predicted(self, request: Request) -> float:
        """Return how many tokens a request will still take."""
        begun = 0 if request.partial is None else len(request.partial.response)
        return max(1.0, self.lengths.get(request.prompt.id, self.unknown) - begun)

    def finish(self) -> list[Sample]:
        with ThreadPoolExecutor(max(1, len(self.requests))) as threads:  # a call draws at least one sample
            try:
                while len(self.samples) < len(self.requests) or self.running:
                    self._continue(threads)
                    self._distribute(threads)
                    self._steal()
                    with self.changed:
                        self.changed.wait_for(self._busy, ABORT_AGAIN if self.aborted else None)
                    self._abort_again()
                    self._collect()
            except BaseException:
                self.waiting.clear()
                self._abandon()
                with self.changed:
                    self.over = True
                self._end_lending(list(self.lent))
                raise
        return [self.samples[r.id] for r in self.requests]

    def _busy(self) -> bool:
        ended = len(self.samples) == len(self.requests) and not self.running
        return ended or self.freed or any(future.done() for future in self.running) or bool(self.coming) or self._room()

    def _room(self) -> bool:
        return bool(self.waiting) and self._least_loaded() is not None

    def _least_loaded(self) -> RolloutEngine | None:
        limit = self.pool._in_flight
        free = [e for e in self.pool.dealt if not limit or self.load[id(e)] < limit]
        if self.ran_dry:
            return min(free, key=lambda e: self.load[id(e)], default=None)
        return min(free, key=lambda e: (self.tokens[id(e)], self.load[id(e)]), default=None)

    def _distribute(self, threads: ThreadPoolExecutor) -> None:
        if self.waiting and not self.running:
            self.pool.check()
        parts: dict[int, list[Request]] = {}
        with self.changed:
            while self.waiting and (engine := self._least_loaded()) is not None:
                group = self.waiting.popleft()
                self._count(engine, group, 1)
                parts.setdefault(id(engine), []).extend(group)
            for engine in self.pool.engines:
                if id(engine) in parts:
                    self._start(threads, engine, parts[id(engine)])

    def _count(self, engine: RolloutEngine, requests: Sequence[Request], sign: int) -> None:
        self.load[id(engine)] += sign * len(requests)
        self.tokens[id(engine)] += sign * sum(map(self._predicted, requests))

    def _start(self, threads: ThreadPoolExecutor, engine: RolloutEngine, requests: list[Request]) -> None:
        call = {request.id: (engine, request) for request in requests}
        with self.changed:
            self.where.update(call)
            self.since.update(dict.fromkeys(call, time.perf_counter()))
            self.queueing.add(id(engine))

        def finished(sample: Sample) -> None:
            name = sample.request_id
            with self.changed:
                if self.where.get(name) is not call[name]:
                    return
                self._leave(name)
                self._count(engine, [call[name][1]], -1)
                returned = self.lent.pop(name, None)
                leaves = returned is not None and sample.status == "aborted" and name not in self.aborted
                if not leaves:
                    self.samples[name] = sample
                self.freed = True
                self.changed.notify()
            if returned is not None:
                returned(name, self._continued(call[name][1], sample) if leaves else None)
            if self.on_sample and not leaves:
                self.on_sample(sample)

        future = threads.submit(engine.generate, requests, self.sampling, finished)
        self.running[future] = (engine, requests)
        future.add_done_callback(self._wake)

    def _leave(self, name: str) -> None:
        engine, _ = self.where.pop(name)
        self.stays.append(Stay(name, engine, self.since.pop(name), time.perf_counter()))

    def _wake(self, future: Future) -> None:
        with self.changed:
            self.changed.notify()

    def _collect(self) -> None:
        for future in [f for f in self.running if f.done()]:
            engine, requests = self.running.pop(future)
            try:
                future.result()
            except EngineError as error:
                self.pool.drop(engine, error)
                self._give_back(self._lost(engine, requests, error))

    def _steal(self) -> None:
        """Have requests that an engine has not begun come back, if another one has less than half as many."""
        freed = self.freed
        self.freed = False
        if not freed or self.waiting or self.aborted:
            return
        engines = self.pool.dealt
        least = min(self.load[id(engine)] for engine in engines)
        for engine in sorted(engines, key=lambda e: self.load[id(e)], reverse=True):
            surplus = (self.load[id(engine)] - least) // 2
            if id(engine) not in self.queueing or surplus <= least / 2:
                continue
            try:
                names = [name for name in engine.not_begun() if name not in self.lent]
                if not names:
                    self.queueing.discard(id(engine))
                    continue
                names = names[-surplus:]
                self.ran_dry = True
                engine.abort(self.lend(engine, names, self._stolen))
            except EngineError as error:  # its `generate` fails, too
                logger.warning("no requests taken from %s: %s", engine, error)
            return

    def _stolen(self, name: str, request: Request | None) -> None:
        if request is not None:
            with self.changed:
                self.pool.stolen += 1
                self.waiting.append([request])
                self.changed.notify()

    def abort(self, request_ids: Collection[str] | None) -> None:
        """End what waits here, and whatever comes back of these requests later."""
        with self.changed:
            names = {r.id for r in self.requests if request_ids is None or r.id in request_ids}
            self.aborted |= names - self.samples.keys()
            self.abort_at = time.monotonic() + ABORT_AGAIN
            self.freed = True
            self.changed.notify()  # `finish` repeats the abort for requests that have not reached their engine yet
            groups = list(self.waiting)
            self.waiting = deque(left for group in groups if (left := [r for r in group if r.id not in names]))
        self._end([request for group in groups for request in group if request.id in names])

    def _end(self, requests: Iterable[Request]) -> None:
        """Finish aborted requests that no engine holds."""
        for request in requests:
            sample = request.aborted()
            with self.changed:
                self.samples[request.id] = sample
                self.changed.notify()
            if self.on_sample:
                self.on_sample(sample)

    def _abort_again(self) -> None:
        """Repeat the aborts of requests that may have reached their engine after the first one."""
        if not self.aborted or time.monotonic() < self.abort_at:
            return
        self.abort_at = time.monotonic() + ABORT_AGAIN
        engines = self.pool.engines
        with self.changed:
            still = {id(e): [n for n, (where, _) in self.where.items() if where is e] for e in engines}
        for engine in engines:
            if names := self.aborted.intersection(still[id(engine)]):
                with suppress(EngineError):
                    engine.abort(sorted(names))

    def _lost(self, engine: RolloutEngine, requests: list[Request], error: EngineError) -> list[Request]:
        """Take what a failed call has not finished away from its engine, with what is known of it."""
        with self.changed:
            left = [r for r in requests if self.where.get(r.id, (None, None)) == (engine, r)]
            for request in left:
                self._leave(request.id)
        self._end_lending([request.id for request in left])
        self.pool.continued += sum(len(begun.response) for name, begun in error.begun.items())
        return [replace(r, partial=error.begun.get(r.id, r.partial)) for r in left]

    def _end_lending(self, ids: Iterable[str]) -> None:
        with self.changed:
            ended = [(name, self.lent.pop(name)) for name in ids if name in self.lent]
        for name, returned in ended:
            returned(name, None)

    # ---- Owner ------------------------------------------------------------------------------------------------------

    def drawn_by(self, engine: RolloutEngine) -> dict[str, Request]:
        with self.changed:
            found = {name: request for name, (where, request) in self.where.items() if where is engine}
            for target, requests in list(self.coming):
                found |= {request.id: request for request in requests if target is engine}
            return found

    def lend(self, engine: RolloutEngine, ids: Iterable[str], returned: Returned) -> list[str]:
        with self.changed:
            ids = [] if self.over else ids
            free = [name for name in ids if name not in self.lent and self.where.get(name, (None,))[0] is engine]
            self.lent.update(dict.fromkeys(free, returned))
        return free

    def take_back(self, ids: Iterable[str]) -> None:
        with self.changed:
            for name in ids:
                self.lent.pop(name, None)

    def resume(self, requests: Sequence[Request], engine: RolloutEngine) -> None:
        with self.changed:
            if requests:
                self.coming.append((engine, list(requests)))
                self.changed.notify()

    def _continue(self, threads: ThreadPoolExecutor) -> None:
        while self.coming:
            engine, requests = self.coming.popleft()
            if engine in self.pool.engines and not self.aborted.intersection(r.id for r in requests):
                with self.changed:
                    self._count(engine, requests, 1)
                    self._start(threads, engine, requests)
            else:
                self._give_back(requests)

    def _give_back(self, requests: Sequence[Request]) -> None:
        """Put requests to the head of the queue; aborted ones end."""
        with self.changed:
            ended = [r for r in requests if r.id in self.aborted]
            self._enqueue([r for r in requests if r.id not in self.aborted])
        self._end(ended)

    def _abandon(self) -> None:
        """Abort the requests that still run: this `generate` has failed."""
        for engine, requests in self.running.values():
            if engine not in self.pool.engines:
                continue
            try:
                engine.abort([r.id for r in requests])
            except EngineError as error:
                logger.warning("abort after a failure: %s", error)

    def _continued(self, request: Request, sample: Sample) -> Request:
        goes_on = len(sample.response) and self.pool.continues
        return replace(request, partial=Partial.of(sample)) if goes_on else request

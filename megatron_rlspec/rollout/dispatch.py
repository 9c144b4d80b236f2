"""One `generate` of an `EnginePool`: which engine gets which requests, and what becomes of those it gives back."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from megatron_rlspec.engine import EngineError, RequestError, RolloutEngine
from megatron_rlspec.types import Partial, Request, Sample, Sampling

ABORT_AGAIN = 0.2  # seconds
logger = logging.getLogger(__name__)
# (id, the request to continue); see `RunningRequests.claim`
Returned = Callable[[str, Request | None], None]


class RunningRequests(Protocol):
    """The requests of a running `generate`, for what moves them between engines (`EnginePool.balance`).

    waiting  groups of requests that no engine has
    samples  those that have ended, by id
    """

    waiting: deque[list[Request]]
    samples: dict[str, Sample]

    def on_engine(self, engine: str) -> Mapping[str, Request]:
        """Return the unfinished requests of an engine, by id."""

    def claim(self, engine: str, ids: Iterable[str], returned: Returned) -> list[str]:
        """Claim samples: when the engine returns one aborted, it goes to `returned` and is not finished.

        `returned` is called once for each, with the request to continue, or with None if the sample has ended or the
        engine is lost. Returns the claimed ids; the others are elsewhere, or claimed already.
        """

    def unclaim(self, ids: Iterable[str]) -> None:
        """End `claim` for samples that stay on their engine."""

    def resume(self, requests: Sequence[Request], engine: str) -> None:
        """Continue samples on an engine, or on another one if it is lost."""


class Engines(Protocol):
    """What a `Dispatch` needs of the pool; `EnginePool` says what each means."""

    in_flight: int
    continues: bool
    stolen: int
    continued: int

    @property
    def engines(self) -> Mapping[str, RolloutEngine]: ...

    @property
    def serving(self) -> list[str]: ...

    def check(self) -> None: ...

    def drop(self, name: str, error: EngineError) -> None: ...


class Dispatch:
    """One `generate`. The calling thread distributes groups; worker threads wait for engines.

    A request is in exactly one place: in `waiting`, with the call in `where` that generates it, in transfer after
    `claim`, or in `samples`. Engines are known by their names.

    load, tokens  of each engine's requests: their number, and how many tokens they will take
    queueing      engines that may hold requests that they have not begun
    aborted       requests that come back as they are
    """

    def __init__(
        self,
        pool: Engines,
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
        self.load: dict[str, int] = defaultdict(int)
        self.tokens: dict[str, float] = defaultdict(float)
        self.queueing: set[str] = set()
        self.running: dict[Future, tuple[str, list[Request]]] = {}
        self.where: dict[str, tuple[str, Request]] = {}  # by the request's id
        self.claimed: dict[str, Returned] = {}
        self.coming: deque[tuple[str, list[Request]]] = deque()  # continued by `resume`
        # whether `finish` has failed: calls that failed return no samples, so nothing is claimed
        self.over = False
        # whether a sample has ended, or an abort has come, since the last look at stealing
        self.freed = False
        # whether an engine has taken over requests; then they go where the fewest are
        self.ran_dry = False
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
        # a call generates at least one sample
        with ThreadPoolExecutor(max(1, len(self.requests))) as threads:
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
                with self.changed:
                    self.over = True
                self._end_claims(list(self.claimed))
                self._abandon()
                raise
        return [self.samples[r.id] for r in self.requests]

    def _busy(self) -> bool:
        ended = len(self.samples) == len(self.requests) and not self.running
        return (
            ended
            or self.freed
            or any(future.done() for future in self.running)
            or bool(self.coming)
            or self._room()
        )

    def _room(self) -> bool:
        return bool(self.waiting) and self._least_loaded() is not None

    def _least_loaded(self) -> str | None:
        limit = self.pool.in_flight
        free = [name for name in self.pool.serving if not limit or self.load[name] < limit]
        if self.ran_dry:
            return min(free, key=lambda name: self.load[name], default=None)
        return min(free, key=lambda name: (self.tokens[name], self.load[name]), default=None)

    def _distribute(self, threads: ThreadPoolExecutor) -> None:
        if self.waiting and not self.running:
            self.pool.check()
        parts: dict[str, list[Request]] = {}
        with self.changed:
            while self.waiting and (engine := self._least_loaded()) is not None:
                group = self.waiting.popleft()
                self._count(engine, group, 1)
                parts.setdefault(engine, []).extend(group)
            for engine, requests in parts.items():
                self._start(threads, engine, requests)

    def _count(self, engine: str, requests: Sequence[Request], sign: int) -> None:
        self.load[engine] += sign * len(requests)
        self.tokens[engine] += sign * sum(map(self._predicted, requests))

    def _start(self, threads: ThreadPoolExecutor, engine: str, requests: list[Request]) -> None:
        """Have an engine generate these requests, in a thread. One that the pool has just dropped gives them back."""
        call = {request.id: (engine, request) for request in requests}
        with self.changed:
            self.where.update(call)
            self.queueing.add(engine)

        def finished(sample: Sample) -> None:
            name = sample.request_id
            with self.changed:
                if self.where.get(name) is not call[name]:
                    return
                del self.where[name]
                self._count(engine, [call[name][1]], -1)
                returned = self.claimed.pop(name, None)
                leaves = (
                    returned is not None and sample.status == "aborted" and name not in self.aborted
                )
                if not leaves:
                    self.samples[name] = sample
                self.freed = True
                self.changed.notify()
            if returned is not None:
                returned(name, self._continued(call[name][1], sample) if leaves else None)
            if self.on_sample and not leaves:
                self.on_sample(sample)

        found = self.pool.engines.get(engine)

        def generate() -> list[Sample]:
            if found is None:
                raise EngineError(f"{engine}: it was left out before it got its requests")
            return found.generate(requests, self.sampling, finished)

        future = threads.submit(generate)
        self.running[future] = (engine, requests)
        future.add_done_callback(self.wake)

    def wake(self, *_: object) -> None:
        """Look again for engines that have room."""
        with self.changed:
            self.changed.notify()

    def _collect(self) -> None:
        for future in [f for f in self.running if f.done()]:
            engine, requests = self.running.pop(future)
            try:
                future.result()
            except RequestError:  # the next engine would refuse it, too
                raise
            except EngineError as error:
                self.pool.drop(engine, error)
                self._give_back(self._lost(engine, requests, error))

    def _steal(self) -> None:
        """Have requests that an engine has not begun come back, if another one has less than half as many."""
        freed = self.freed
        self.freed = False
        if not freed or self.waiting or self.aborted:
            return
        engines = dict(self.pool.engines)
        serving = [name for name in self.pool.serving if name in engines]
        least = min((self.load[name] for name in serving), default=0)
        for name in sorted(serving, key=lambda name: self.load[name], reverse=True):
            surplus = (self.load[name] - least) // 2
            if name not in self.queueing or surplus <= least / 2:
                continue
            try:
                ids = [id for id in engines[name].not_begun() if id not in self.claimed]
                if not ids:
                    self.queueing.discard(name)
                    continue
                ids = ids[-surplus:]
                self.ran_dry = True
                engines[name].abort(self.claim(name, ids, self._stolen))
            except EngineError as error:  # its `generate` fails, too
                logger.warning("no requests taken from %s: %s", name, error)
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
            # `finish` repeats the abort for requests that have not reached their engine yet
            self.changed.notify()
            groups = list(self.waiting)
            self.waiting = deque(
                left for group in groups if (left := [r for r in group if r.id not in names])
            )
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
        still: dict[str, list[str]] = {}
        with self.changed:
            for id, (name, _) in self.where.items():
                if id in self.aborted:
                    still.setdefault(name, []).append(id)
        for name, engine in list(self.pool.engines.items()):
            if name in still:
                with suppress(EngineError):
                    engine.abort(sorted(still[name]))

    def _lost(self, engine: str, requests: list[Request], error: EngineError) -> list[Request]:
        """Take what a failed call has not finished away from its engine, with what is known of it."""
        with self.changed:
            left = [r for r in requests if self.where.get(r.id, (None, None)) == (engine, r)]
            for request in left:
                del self.where[request.id]
        self._end_claims([request.id for request in left])
        self.pool.continued += sum(len(begun.response) for name, begun in error.begun.items())
        return [replace(r, partial=error.begun.get(r.id, r.partial)) for r in left]

    def _end_claims(self, ids: Iterable[str]) -> None:
        with self.changed:
            ended = [(name, self.claimed.pop(name)) for name in ids if name in self.claimed]
        for name, returned in ended:
            returned(name, None)

    # ---- RunningRequests --------------------------------------------------------------------------------------------

    def on_engine(self, engine: str) -> dict[str, Request]:
        with self.changed:
            found = {id: request for id, (name, request) in self.where.items() if name == engine}
            for target, requests in list(self.coming):
                if target == engine:
                    found |= {request.id: request for request in requests}
            return found

    def claim(self, engine: str, ids: Iterable[str], returned: Returned) -> list[str]:
        with self.changed:
            ids = [] if self.over else ids
            free = [
                id
                for id in ids
                if id not in self.claimed and self.where.get(id, ("",))[0] == engine
            ]
            self.claimed.update(dict.fromkeys(free, returned))
        return free

    def unclaim(self, ids: Iterable[str]) -> None:
        with self.changed:
            for id in ids:
                self.claimed.pop(id, None)

    def resume(self, requests: Sequence[Request], engine: str) -> None:
        with self.changed:
            if requests:
                self.coming.append((engine, list(requests)))
                self.changed.notify()

    def _continue(self, threads: ThreadPoolExecutor) -> None:
        while self.coming:
            engine, requests = self.coming.popleft()
            if engine in self.pool.engines and not self.aborted.intersection(
                r.id for r in requests
            ):
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
        """Abort the requests that still run, until their calls have ended: this `generate` has failed."""
        while left := [call for future, call in self.running.items() if not future.done()]:
            for name, requests in left:
                engine = self.pool.engines.get(name)
                if engine is None:
                    continue
                try:
                    engine.abort([r.id for r in requests])
                except EngineError as error:
                    logger.warning("abort after a failure: %s", error)
            wait(self.running, ABORT_AGAIN)  # again: some may not have reached their engine

    def _continued(self, request: Request, sample: Sample) -> Request:
        goes_on = len(sample.response) and self.pool.continues
        return replace(request, partial=Partial.of(sample)) if goes_on else request

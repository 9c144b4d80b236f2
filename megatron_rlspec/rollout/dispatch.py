"""One `generate` of an `EnginePool`: which engine gets which requests, and what becomes of requests that come back.

`rollout/pool.py` has a picture of it. Which engines there are, and what follows when one fails, is the pool's matter.
"""

from __future__ import annotations

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

# Seconds between two aborts of the same requests: some may not have reached their engine at the first one.
ABORT_AGAIN = 0.2
# A mover's callback, called with an id and the request to continue, or None: see `Dispatch.claim`.
Returned = Callable[[str, Request | None], None]


class Pool(Protocol):
    """What a `Dispatch` needs of the pool, as a Protocol: `pool.py` imports this file. `EnginePool` explains each."""

    max_in_flight: int
    can_continue: bool
    continued_tokens: int

    @property
    def engines(self) -> Mapping[str, RolloutEngine]: ...

    def check(self) -> None: ...

    def drop(self, name: str, error: EngineError) -> None: ...


class Dispatch:
    """One `generate`. The calling thread distributes groups; worker threads wait for engines.

    A call is one `RolloutEngine.generate` of several requests, in a worker thread. A request is in exactly one place:
    in `waiting`, in `assigned` while a call generates it, in the hands of a mover that has claimed it and aborted its
    sample, in `resumed`, or in `samples`. Engines are named as in the pool.

    `lock` guards the fields that engines' threads and other callers also use: all but `running` and `failure`.
    `finish` is called once, and `running` belongs to its thread. Callbacks (`on_sample`, and `Returned`) are called
    without the lock, because they may take locks of their own.

    waiting     groups of requests that no engine has, the next first
    samples     the samples that have ended, by id
    load        by engine, how many unfinished requests of this `generate` it has; for a lost engine the number is not
                kept up, and nothing reads it
    running     the engine and the requests of each call that has not been collected
    assigned    by id, the engine that generates a request, and the request as it was sent
    claimed     by id, the callback of the mover that has claimed a request
    resumed     requests that `resume` continues, with the engine to continue on
    aborted     ids of requests that the caller of `generate` aborted before they had ended. After a failure of
                `finish`: all ids
    has_failed  whether `finish` has failed: failed calls return no samples, so nothing can be claimed any more
    wake_up     is set after every change that `finish` must react to
    """

    def __init__(
        self,
        pool: Pool,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None,
    ) -> None:
        self.pool = pool
        self.requests = requests
        self.sampling = sampling
        self.on_sample = on_sample
        self.waiting: deque[list[Request]] = deque()
        self._enqueue(requests)
        self.samples: dict[str, Sample] = {}
        self.aborted: set[str] = set()
        self.abort_at = 0.0  # when the aborts are repeated, by time.monotonic()
        self.load: dict[str, int] = defaultdict(int)
        self.running: dict[Future, tuple[str, list[Request]]] = {}
        self.assigned: dict[str, tuple[str, Request]] = {}
        self.claimed: dict[str, Returned] = {}
        self.resumed: deque[tuple[str, list[Request]]] = deque()
        self.has_failed = False
        self.failure: BaseException | None = None  # see `fail`
        self.lock = threading.RLock()  # reentrant: `_start` takes it, and its callers hold it
        self.wake_up = threading.Event()
        self.wake_up.set()  # the first turn of `finish` distributes

    def finish(self) -> list[Sample]:
        """Generate all samples, and return them in the order of their requests. Call it once.

        Raises EngineError if no engine is left, RequestError if an engine refuses a request, what `fail` was given, and
        any other error of an engine's `generate`. When it raises, all calls have ended.
        """
        # Each call blocks one thread, and has at least one request.
        with ThreadPoolExecutor(max(1, len(self.requests))) as threads:
            try:
                while not self._ended():
                    # with a limit while aborts may have to be repeated
                    self.wake_up.wait(ABORT_AGAIN if self.aborted else None)
                    # before the work: a change during the work sets the event again, and gets another turn
                    self.wake_up.clear()
                    if self.failure is not None:
                        raise self.failure
                    self._abort_again()
                    # in this order: what failed calls give back, and what movers bring, is distributed in this turn
                    self._collect()
                    self._start_resumed(threads)
                    self._distribute(threads)
            except BaseException:
                self.waiting.clear()
                with self.lock:
                    self.has_failed = True  # before the claims end, so that no new one is made
                self._end_claims(list(self.claimed))
                # Without this, leaving `threads` would wait until the engines have generated everything.
                self._abort_all()
                raise
        return [self.samples[r.id] for r in self.requests]

    def _ended(self) -> bool:
        """Return whether all samples are there and all calls have returned, with their errors collected."""
        return len(self.samples) == len(self.requests) and not self.running

    def fail(self, error: BaseException) -> None:
        """Have `finish` raise this error. A mover calls it, from its thread, when it has lost claimed samples.

        Without it `finish` would wait for those samples forever.
        """
        self.failure = error
        self.wake_up.set()

    # ---- to the engines ---------------------------------------------------------------------------------------------

    def _enqueue(self, requests: Sequence[Request]) -> None:
        """Put requests to the head of the queue, in their order and in groups of one prompt."""
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.prompt.id, []).append(request)
        # at the head: these requests may have begun, and are older than what waits. `extendleft` reverses the order
        self.waiting.extendleft(reversed(groups.values()))

    def _least_loaded(self) -> str | None:
        """Return the engine that gets the next group; None if there is none, or all have `max_in_flight` or more.

        The caller holds the lock, which guards `load`.
        """
        limit = self.pool.max_in_flight
        engines = list(self.pool.engines)  # another thread may drop one
        free = [name for name in engines if not limit or self.load[name] < limit]
        if not free:
            return None
        return min(free, key=self.load.__getitem__)

    def _distribute(self, threads: ThreadPoolExecutor) -> None:
        """Give waiting groups to the engines that have room, in one call for each engine."""
        # Without an engine nothing would ever wake `finish`. While calls run, their failures raise in `_collect`.
        if self.waiting and not self.running:
            self.pool.check()
        parts: dict[str, list[Request]] = {}
        with self.lock:
            while self.waiting:
                engine = self._least_loaded()
                if engine is None:
                    break
                group = self.waiting.popleft()
                self.load[engine] += len(group)
                parts.setdefault(engine, []).extend(group)
            for engine, requests in parts.items():
                self._start(threads, engine, requests)

    def _start_resumed(self, threads: ThreadPoolExecutor) -> None:
        """Start the requests that `resume` has brought.

        If their engine is lost, or one of them is aborted, they go to the head of the queue instead, where aborted ones
        end.
        """
        while self.resumed:
            # Under one lock, so that `on_engine` sees these requests at any time: in `resumed`, then in `assigned`.
            with self.lock:
                engine, requests = self.resumed.popleft()
                aborted = any(request.id in self.aborted for request in requests)
                starts = not aborted and engine in self.pool.engines
                if starts:
                    self.load[engine] += len(requests)
                    self._start(threads, engine, requests)
            if not starts:
                self._requeue(requests)

    def _start(self, threads: ThreadPoolExecutor, name: str, requests: list[Request]) -> None:
        """Have an engine generate these requests, in a thread. The caller has counted them in `load`.

        If the pool has just dropped the engine, the call fails, and `_collect` gives the requests back.
        """
        assignments = {request.id: (name, request) for request in requests}
        with self.lock:
            self.assigned.update(assignments)
        engine = self.pool.engines.get(name)  # None: dropped since the caller looked

        def generate() -> list[Sample]:
            if engine is None:
                raise EngineError(f"{name}: it was left out before it got its requests")
            return engine.generate(requests, self.sampling, self._on_sample_of(assignments))

        future = threads.submit(generate)
        self.running[future] = (name, requests)
        future.add_done_callback(lambda _: self.wake_up.set())

    # ---- back from the engines --------------------------------------------------------------------------------------

    def _on_sample_of(
        self, assignments: Mapping[str, tuple[str, Request]]
    ) -> Callable[[Sample], None]:
        """Return the `on_sample` of one call. The engine calls it from its own threads.

        assignments  by id, the engine and the request: the same tuple objects as in `assigned`, by which a late sample
                     of an earlier call is told from one of this call
        """

        def end(sample: Sample) -> None:
            id = sample.request_id
            engine, request = assignments[id]
            with self.lock:
                # The sample is late: its call has failed before, and the request was requeued, or another call has it.
                if self.assigned.get(id) is not assignments[id]:
                    return
                del self.assigned[id]
                self.load[engine] -= 1
                returned = self.claimed.pop(id, None)
                # A mover aborts what it has claimed. A sample that ended by itself is not moved, nor is one that the
                # caller of `generate` aborted.
                aborted_to_move = sample.status == "aborted" and id not in self.aborted
                leaves = returned is not None and aborted_to_move
                if not leaves:
                    self.samples[id] = sample
                self.wake_up.set()
            if returned is not None:
                returned(id, self._continued(request, sample) if leaves else None)
            if self.on_sample and not leaves:
                self.on_sample(sample)

        return end

    def _continued(self, request: Request, sample: Sample) -> Request:
        """Return the request with which another engine goes on after an aborted sample."""
        if not len(sample.response) or not self.pool.can_continue:
            return request
        return replace(request, partial=Partial.of(sample))

    def _collect(self) -> None:
        """Take the calls that have returned. The requests of a failed one go back to the queue.

        Raises RequestError, and EngineError if no engine is left.
        """
        done = [future for future in self.running if future.done()]
        for future in done:
            engine, requests = self.running.pop(future)
            try:
                future.result()
            except RequestError:  # the next engine would refuse the request, too
                raise
            except EngineError as error:
                self.pool.drop(engine, error)
                self._requeue(self._lost(engine, requests, error))

    def _lost(self, engine: str, requests: list[Request], error: EngineError) -> list[Request]:
        """Take the unfinished requests of a failed call out of `assigned`, and end the claims on them.

        Returns them with what the engine's error knows of their samples (`EngineError.begun`).
        """
        unfinished = []
        with self.lock:
            for request in requests:
                if self.assigned.get(request.id) == (engine, request):
                    del self.assigned[request.id]
                    # Not asked here: `can_continue`. Where it is False, errors of engines have no `begun`.
                    begun = error.begun.get(request.id, request.partial)
                    unfinished.append(replace(request, partial=begun))
        self._end_claims([request.id for request in unfinished])
        for begun in error.begun.values():
            self.pool.continued_tokens += len(begun.response)
        return unfinished

    def _requeue(self, requests: Sequence[Request]) -> None:
        """Put requests to the head of the queue. Aborted ones end instead, with the tokens of their `partial`."""
        with self.lock:
            aborted = [request for request in requests if request.id in self.aborted]
            self._enqueue([request for request in requests if request.id not in self.aborted])
            for request in aborted:
                self.samples[request.id] = request.aborted()
            self.wake_up.set()
        for request in aborted:
            if self.on_sample:
                self.on_sample(self.samples[request.id])

    # ---- aborts -----------------------------------------------------------------------------------------------------

    def abort(self, request_ids: Collection[str] | None) -> None:
        """End these requests where they wait, or when their engine gives them back. None: all of them.

        It is called from any thread. `EnginePool.abort` then tells the engines.
        """
        ids = {request.id for request in self.requests}
        if request_ids is not None:
            ids &= set(request_ids)
        with self.lock:
            self.aborted |= ids - self.samples.keys()
            # after this time `finish` repeats the abort, for requests that have not reached their engine yet
            self.abort_at = time.monotonic() + ABORT_AGAIN
            waiting = [request for group in self.waiting for request in group]
            self.waiting.clear()
        # Also if none waited: `_requeue` wakes `finish`, which from now on waits for `ABORT_AGAIN` at most.
        self._requeue(waiting)

    def _abort_again(self) -> None:
        """Repeat the abort if it is time: requests may have reached their engine after the first one."""
        if not self.aborted or time.monotonic() < self.abort_at:
            return
        self.abort_at = time.monotonic() + ABORT_AGAIN
        self._abort_aborted()

    def _abort_aborted(self) -> None:
        """Ask the engines to end the aborted requests that they have."""
        ids_by_engine: dict[str, list[str]] = {}
        with self.lock:
            for id, (name, _) in self.assigned.items():
                if id in self.aborted:
                    ids_by_engine.setdefault(name, []).append(id)
        engines = dict(self.pool.engines)  # a copy: another thread may drop one
        for name, ids in ids_by_engine.items():
            if name in engines:
                with suppress(EngineError):  # a lost engine's calls fail, and `_collect` sees it
                    engines[name].abort(sorted(ids))

    def _abort_all(self) -> None:
        """Abort the requests that still run, until their calls have ended: `finish` has failed, and calls this."""
        self.aborted.update(request.id for request in self.requests)
        self._abort_aborted()
        # again, because some requests may not have reached their engine
        while wait(self.running, ABORT_AGAIN).not_done:
            self._abort_aborted()

    # ---- for a mover of requests between engines (`EnginePool.balance`; `extensions/migration/moves.py`) ------------

    def on_engine(self, engine: str) -> dict[str, Request]:
        """Return the unfinished requests of an engine by id, also those that `resume` is about to start on it."""
        unfinished: dict[str, Request] = {}
        with self.lock:
            for name, request in self.assigned.values():
                if name == engine:
                    unfinished[request.id] = request
            for name, requests in self.resumed:
                if name == engine:
                    unfinished |= {request.id: request for request in requests}
        return unfinished

    def claim(self, engine: str, ids: Iterable[str], returned: Returned) -> list[str]:
        """Claim running samples of an engine, to move them. The mover then aborts them on that engine. Any thread.

        returned  is called once for each claimed id, without the lock, from an engine's thread or that of `finish`. It
                  gets the request to continue, or None if the sample has ended or the engine is lost. The mover must
                  hand every request that it gets to `resume`, or call `fail`: `finish` waits for that request's sample

        Returns the claimed ids. The other ids are not on this engine, or claimed already, or `finish` has failed.
        """
        claimed: list[str] = []
        with self.lock:
            if self.has_failed:
                return claimed
            for id in ids:
                if id in self.claimed or id not in self.assigned:
                    continue
                name, _ = self.assigned[id]
                if name == engine:
                    self.claimed[id] = returned
                    claimed.append(id)
        return claimed

    def _end_claims(self, ids: Iterable[str]) -> None:
        """Tell the movers that have claimed these samples that they will not get them."""
        ended = []
        with self.lock:
            for id in ids:
                if id in self.claimed:
                    ended.append((id, self.claimed.pop(id)))
        for id, returned in ended:
            returned(id, None)

    def resume(self, requests: Sequence[Request], engine: str) -> None:
        """Continue claimed samples on an engine, or on another one if that engine is lost. From a mover's thread.

        requests  those that `claim`'s callback got, each once; without any, this does nothing
        """
        if not requests:
            return
        with self.lock:
            self.resumed.append((engine, list(requests)))
            self.wake_up.set()

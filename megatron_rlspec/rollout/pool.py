"""Several engines as one: distribute requests, collect samples, and continue when engines fail."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.types import Request, RoundStats, Sample, Sampling, Scope, SpecSchedule

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class EnginePool:
    """Generates on several engines. Requests of one prompt go to one engine, whose prefix cache they share.

    in_flight  requests that one engine holds at a time; further groups go to the first engine that has room. 0: all
               groups are distributed at the start, in one `generate` per engine
    lost       is called with each engine that failed, from the thread that saw the failure

    An engine that fails is closed and left out from then on; `failures` gives the reason by the engine's `id`. Its
    unfinished requests go on on the others, from what is known of them. When no engine is left, every method raises
    EngineError.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        in_flight: int = 0,
        lost: Callable[[RolloutEngine], None] = lambda engine: None,
    ) -> None:
        if not engines:
            raise ValueError("an EnginePool needs at least one engine")
        self._engines = list(engines)
        self._in_flight = in_flight
        self._lost = lost
        self.failures: dict[int, str] = {}

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        """Return the engines that have not failed."""
        return tuple(self._engines)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        """Draw one sample per request, in their order. `on_sample` is called once per request, from any thread.

        Raises EngineError if no engine is left, and ValueError if two requests have one id.
        """
        if not self._engines:
            raise EngineError("no engine is left")
        if len({r.id for r in requests}) != len(requests):
            raise ValueError("two requests have the same id")
        return _Run(self, requests, sampling, on_sample).finish()

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
        """End these requests, or all, on every engine. Engines ignore ids that they do not hold."""
        self.everywhere(lambda engine: engine.abort(request_ids))

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
        if engine in self._engines:
            self._engines.remove(engine)
            self.failures[id(engine)] = str(error)
            logger.warning("engine left out, %d remain: %s", len(self._engines), error)
            engine.close()
            self._lost(engine)
        if not self._engines:
            raise EngineError(f"no engine is left; the last one failed with: {error}")

    def add(self, engine: RolloutEngine) -> None:
        """Add an engine that holds the same weights as the others. Not during `generate`."""
        self._engines.append(engine)

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
    """One `generate`. The calling thread distributes groups; worker threads wait for engines."""

    def __init__(
        self,
        pool: EnginePool,
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
        self.load = {id(engine): 0 for engine in pool.engines}
        self.running: dict[Future, tuple[RolloutEngine, list[Request]]] = {}
        self.changed = threading.Condition()

    def _enqueue(self, requests: Sequence[Request]) -> None:
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.prompt.id, []).append(request)
        self.waiting.extendleft(reversed(groups.values()))

    def finish(self) -> list[Sample]:
        with ThreadPoolExecutor(max(1, len(self.waiting))) as threads:
            try:
                while self.waiting or self.running:
                    self._distribute(threads)
                    with self.changed:
                        self.changed.wait_for(lambda: any(f.done() for f in self.running) or self._room())
                    self._collect()
            except BaseException:
                self.waiting.clear()
                self._abandon()
                raise
        return [self.samples[r.id] for r in self.requests]

    def _room(self) -> bool:
        return bool(self.waiting) and self._least_loaded() is not None

    def _least_loaded(self) -> RolloutEngine | None:
        engine = min(self.pool.engines, key=lambda e: self.load[id(e)])
        limit = self.pool._in_flight
        return engine if not limit or self.load[id(engine)] < limit else None

    def _distribute(self, threads: ThreadPoolExecutor) -> None:
        parts: dict[int, list[Request]] = {}
        while self.waiting and (engine := self._least_loaded()) is not None:
            group = self.waiting.popleft()
            self.load[id(engine)] += len(group)
            if self.pool._in_flight:
                self._start(threads, engine, group)
            else:
                parts.setdefault(id(engine), []).extend(group)
        for engine in self.pool.engines:
            if id(engine) in parts:
                self._start(threads, engine, parts[id(engine)])

    def _start(self, threads: ThreadPoolExecutor, engine: RolloutEngine, requests: list[Request]) -> None:
        unfinished = {r.id for r in requests}

        def finished(sample: Sample) -> None:
            with self.changed:
                if sample.request_id in unfinished:
                    unfinished.remove(sample.request_id)
                    self.load[id(engine)] -= 1
                    self.changed.notify()
                if sample.request_id in self.samples:
                    return
                self.samples[sample.request_id] = sample
            if self.on_sample:
                self.on_sample(sample)

        future = threads.submit(engine.generate, requests, self.sampling, finished)
        self.running[future] = (engine, requests)
        future.add_done_callback(self._wake)

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
                left = [r for r in requests if r.id not in self.samples]
                self._enqueue([replace(r, partial=error.begun.get(r.id, r.partial)) for r in left])

    def _abandon(self) -> None:
        """Abort the requests that still run: this `generate` has failed."""
        for engine, requests in self.running.values():
            if engine not in self.pool.engines:
                continue
            try:
                engine.abort([r.id for r in requests])
            except EngineError as error:
                logger.warning("abort after a failure: %s", error)

"""The update of engines to one version, in step: all begin, take the same buckets, and end.

`Update` serves `push.py`. `update_weights` updates a single engine without checks; the engine classes have it as a
method. The calls on an engine are those of `RolloutEngine`: `begin_update`, `send` for each bucket, `end_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

from megatron_rlspec.engine import EngineError, RolloutEngine, ask_all
from megatron_rlspec.push.bucket import Bucket, Named, bucket_bytes, buckets
from megatron_rlspec.types import Scope

Engines = Mapping[str, RolloutEngine]  # by name


class Update:
    """An update of several engines, as a context. If the body raises, no engine serves until a later update.

    The updates begin with the first `send`. A body that sends nothing must raise: otherwise engines would end an update
    that never began. An engine that fails leaves the update and serves nothing; the others go on.

    One thread calls `send`. `engines`, `errors` and `sent_bytes` change in other threads until the context ends, so
    read them only afterwards. Use an object once.

    limit       about how many bytes make a bucket: the least that any engine's memory asks for
    engines     by name, those that have not left
    errors      by name, why each of the others left; also errors of this program, which the caller must raise
    sent_bytes  by name, also of engines that left: bytes of all buckets that were sent to it
    """

    def __init__(self, engines: Engines, version: int, scope: Scope) -> None:
        self.version = version
        self.scope = scope
        self.engines = dict(engines)
        self.errors: dict[str, Exception] = {}
        self.sent_bytes = dict.fromkeys(engines, 0)
        # By the memory's id, because several engines may share one: a bucket is then laid out once for all of them. The
        # value is None for engines that take tensors without a copy.
        self._memories = {
            id(engine.bucket_memory): engine.bucket_memory for engine in engines.values()
        }
        # Without engines nothing is sent, but the exporter is still read: then in the smallest buckets.
        self.limit = min(map(bucket_bytes, self._memories.values()), default=1)
        # One thread for each engine, and one for `_deliver`, which waits for the calls in the others.
        self._threads = ThreadPoolExecutor(len(engines) + 1)
        # the delivery of the newest bucket; None: no bucket was sent yet
        self._travelling: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._threads:  # at its end the threads end
            self._arrive()  # the last bucket must have arrived before the updates end
            reason = "" if error is None else _reason(error)
            self._each(lambda engine: engine.end_update(reason))
        for memory in self._memories.values():
            if memory is not None:
                memory.close()

    def send(self, tensors: Sequence[Named]) -> None:
        """Make a bucket of the tensors, and start to send it once every engine has the bucket before it.

        It returns while the bucket travels. The bucket is packed while the one before still travels. `Memory` has two
        pieces, so packing overwrites the last bucket but one, which has arrived.
        """
        packed = {key: Bucket(tensors, memory) for key, memory in self._memories.items()}
        first = self._travelling is None
        self._arrive()
        self._travelling = self._threads.submit(self._deliver, packed, first)

    def _arrive(self) -> None:
        """Wait until every engine has the newest bucket, or has left."""
        if self._travelling is not None:
            self._travelling.result()

    def _deliver(self, packed: Mapping[int, Bucket], first: bool) -> None:
        """Send a bucket to all engines that have not left; runs in a thread.

        packed  the bucket in each memory, by the memory's id
        first   begin the updates, too. They begin only now, because an engine decodes nothing from then on
        """
        if first:
            self._each(lambda engine: engine.begin_update(self.version, self.scope))
        # Engines that share a joint memory are one part, and get the bucket by one call. Each other engine is a part of
        # its own.
        parts: dict[str, dict[str, RolloutEngine]] = {}
        for name, engine in self.engines.items():
            memory = engine.bucket_memory
            joint = memory is not None and memory.joint
            parts.setdefault(f"joint {id(memory)}" if joint else name, {})[name] = engine
            self.sent_bytes[name] += packed[id(memory)].bytes

        def send(engine: RolloutEngine, *others: RolloutEngine) -> None:
            engine.send(packed[id(engine.bucket_memory)], *others)

        self._at_once(parts.values(), send)

    def _each(self, call: Callable[[RolloutEngine], None]) -> None:
        """Run `call` for every engine that has not left, at the same time. An engine whose call fails leaves."""
        self._at_once([{name: engine} for name, engine in self.engines.items()], call)

    def _at_once(self, parts: Iterable[Engines], call: Callable[..., None]) -> None:
        """Run `call` for all parts at the same time, each with the part's engines as arguments.

        If a call fails, all engines of its part leave. Only `_deliver` calls this while a bucket travels, and only
        `__exit__` afterwards: two threads never change `engines` at once.
        """
        # A list, not a generator: it starts all calls before the first answer is waited for.
        calls = [(part, self._threads.submit(_attempt, part, call)) for part in parts]
        for part, answer in calls:
            error = answer.result()
            if error is not None:
                for name in part:
                    self.errors[name] = error
                    del self.engines[name]


def _attempt(part: Engines, call: Callable[..., None]) -> Exception | None:
    """Run `call` with the engines of one part. If it fails, end their updates as failed and return the error.

    An EngineError of `end_update` is dropped: an engine whose update stays open serves nothing either.
    """
    try:
        call(*part.values())
    except Exception as error:
        reason = _reason(error)
        ask_all(part, lambda engine: engine.end_update(reason))
        return error
    return None


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or its class. Never "", which means success for `end_update`."""
    return str(error).partition("\n")[0] or type(error).__name__


def update_weights(
    engine: RolloutEngine, version: int, tensors: Iterable[Named], scope: Scope = "all"
) -> None:
    """Update one engine, without finite checks and without a comparison. Raises EngineError.

    tensors  full ones under Hugging Face names

    After an error of any kind, raised by `tensors` too, the engine serves nothing until a later update succeeds.
    """
    memory = engine.bucket_memory
    try:
        engine.begin_update(version, scope)
        for bucket in buckets(tensors, bucket_bytes(memory)):
            engine.send(Bucket(bucket, memory))
        engine.end_update()
    except BaseException as error:
        with suppress(EngineError):
            engine.end_update(_reason(error))
        raise
    finally:
        if memory is not None:
            memory.close()

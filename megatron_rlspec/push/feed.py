"""The way of a push's tensors from the exporter to one engine, which may be slower or stop reading."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from megatron_rlspec.push.bucket import Bucket, Memory, Named


class Feed:
    """What one engine gets of a push: buckets in `memory`, or single tensors of the exporter if it has none.

    Yields (name, tensor), bounded in bytes; `buckets` yields whole buckets.
    """

    def __init__(self, limit: int, memory: Memory | None = None) -> None:
        self.limit = limit
        self.memory = memory
        self.reading = True
        self.sent_bytes = 0
        self.seconds = 0.0
        self._queue: deque[Bucket] = deque()
        self._taken: deque[Bucket] = deque()
        self._left: deque[Named] = deque()  # of the bucket that is read tensor by tensor
        self._bytes = 0
        self._ended: BaseException | bool = False
        self._changed = threading.Condition()

    @property
    def open(self) -> bool:
        """Return whether the engine still reads tensors."""
        return self.reading and not self._ended

    def put(self, bucket: Bucket) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < self.limit or not self.reading)
            if self.reading:
                self._queue.append(bucket)
                self._bytes += bucket.bytes
                self._changed.notify_all()
                return
        bucket.done()

    def close(self, error: BaseException | None = None) -> None:
        """Announce the end of the tensors. With `error`, the reader raises it after the queued tensors."""
        with self._changed:
            self._ended = self._ended or error or True
            self._changed.notify_all()

    def stop_reading(self) -> None:
        """Drop everything that is put from now on: the engine reads no more."""
        with self._changed:
            self.reading = False
            undone = [*self._taken, *self._queue]
            self._taken.clear()
            self._queue.clear()
            self._changed.notify_all()
        for bucket in undone:
            bucket.done()

    def buckets(self) -> Iterator[Bucket]:
        """Yield buckets as they come. A bucket's memory goes back when the next one is asked for."""
        while (bucket := self._take()) is not None:
            self.sent_bytes += bucket.bytes
            yield bucket
            self._done(bucket)

    def __iter__(self) -> Iterator[Named]:
        while (bucket := self._take()) is not None:
            if bucket.piece is not None:
                raise TypeError("an engine with a `bucket_memory` reads buckets, with `in_buckets`")
            self._left.extend(bucket.tensors)
            while self._left:
                name, tensor = self._left.popleft()
                self.sent_bytes += tensor.nbytes
                yield name, tensor
            self._done(bucket)

    def unread(self) -> str:
        """Return the name of the first tensor that was not read, "" if there is none. Raises the exporter's error."""
        if self._left:
            return self._left[0][0]
        if self._taken:  # else the exporter may wait for its memory
            self._done(self._taken[0])
        bucket = self._take()
        return "" if bucket is None else bucket.names[0]

    def _take(self) -> Bucket | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ended)
            if not self._queue:
                if isinstance(self._ended, BaseException):
                    raise self._ended
                return None
            bucket = self._queue.popleft()
            self._taken.append(bucket)
            self._bytes -= bucket.bytes
            self._changed.notify_all()
            return bucket

    def _done(self, bucket: Bucket) -> None:
        with self._changed:
            if bucket not in self._taken:  # `stop_reading` came first
                return
            self._taken.remove(bucket)
        bucket.done()

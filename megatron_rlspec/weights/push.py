"""One push: stream tensors from the trainer to every engine at once, as one versioned session, and compare there.

    source(scope) ──(name, tensor)──► fingerprint, finite? ──► one bounded feed per engine ──► engine.update_weights
                                            │                                                        │
                                      what is expected  ◄──────────── compare ─────────────  engine.fingerprints

After `Pusher.push` every engine holds exactly the new version, or it is in `report.failed` and serves nothing until a
later push succeeds. `contract.py` decides what follows.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.types import Scope
from megatron_rlspec.weights.fingerprint import Difference, compare, fingerprint

Named = tuple[str, Tensor]
Source = Callable[[Scope], Iterable[Named]]

_ATTENTION = re.compile(r"^(.*\.self_attn)\.")


class PushError(RuntimeError):
    """The trainer's side of a push failed: the exporter yielded a tensor that may not be sent to any engine."""


@dataclass(frozen=True)
class EngineReport:
    """One engine's part of a push.

    error       why the engine may not serve; "" if the session succeeded
    difference  between the tensors that it holds and the trainer's
    """

    seconds: float
    sent_bytes: int
    sent_tensors: int
    error: str = ""
    difference: Difference = Difference()

    @property
    def ok(self) -> bool:
        return not self.error and self.difference.empty


@dataclass(frozen=True)
class PushReport:
    """One push. `fingerprint_seconds`: the trainer's part of the check; `verify_seconds`: the slowest engine's."""

    version: int
    scope: Scope
    seconds: float
    total_bytes: int
    tensors: int
    fingerprint_seconds: float
    verify_seconds: float
    engines: Mapping[str, EngineReport] = field(default_factory=dict)

    @property
    def failed(self) -> dict[str, str]:
        """Return one line for every engine that may not serve, by name."""
        return {n: e.error or str(e.difference) for n, e in self.engines.items() if not e.ok}

    def metrics(self) -> dict[str, float]:
        return {
            "push/seconds": self.seconds,
            "push/bytes": float(self.total_bytes),
            "push/tensors": float(self.tensors),
            "push/sent_bytes": float(sum(e.sent_bytes for e in self.engines.values())),
            "push/fingerprint_seconds": self.fingerprint_seconds,
            "push/verify_seconds": self.verify_seconds,
            "push/failed_engines": float(len(self.failed)),
        }


class Pusher:
    """Push to `engines` (name -> engine), and remember the tensors that a comparison has shown in each of them.

    delta       send an engine only the tensors that differ from those that it holds; the comparison afterwards covers
                all tensors. Not for engines that need all tensors (the embedded one) or re-pack layers (SGLang with
                AMX), and not for latent attention, of which SGLang drops a projection that comes without its pair
    feed_bytes  bytes by which the exporter may run ahead of the slowest engine
    """

    def __init__(self, engines: Mapping[str, RolloutEngine], *, delta: bool = False, feed_bytes: int = 1 << 30) -> None:
        self.engines = dict(engines)
        self.delta = delta
        self.feed_bytes = feed_bytes
        self.expected: dict[str, int] = {}
        self.version = -1
        self._proven: dict[str, dict[str, int]] = {}

    def push(self, version: int, source: Source, scope: Scope = "all", only: Sequence[str] | None = None) -> PushReport:
        """Bring every engine (or `only` those named) to `version`; `source(scope)` yields full, HF-named tensors.

        A narrower scope than "all" becomes "all" if no comparison has shown that every engine holds the rest, as after
        a start or a failure. Raises PushError if the exporter yields a name twice, NaN or infinity; the engines then
        serve nothing until a later push.
        """
        began = time.perf_counter()
        names = list(self.engines) if only is None else list(only)
        if scope != "all" and any(name not in self._proven for name in names):
            scope = "all"
        proven = {name: self._proven.pop(name, {}) for name in names}  # until the comparison
        feeds = {name: _Feed(self.feed_bytes, proven[name] if self.delta else {}) for name in names}
        with ThreadPoolExecutor(max(1, len(names))) as threads:
            updates = {n: threads.submit(_update, self.engines[n], version, scope, feeds[n]) for n in names}
            try:
                new, total, spent = _stream(source(scope), list(feeds.values()))
            finally:
                for feed in feeds.values():
                    feed.close(PushError("the exporter stopped early"))  # no effect on a feed that has ended
            errors = {name: update.result() for name, update in updates.items()}
            self.expected = new if scope == "all" else {**self.expected, **new}
            self.version = version
            verified = time.perf_counter()
            checks = {n: threads.submit(_verify, self.engines[n], self.expected) for n in names if not errors[n]}
            results = {name: check.result() for name, check in checks.items()}
        ended = time.perf_counter()
        reports = {}
        for name in names:
            error, difference = results.get(name, (errors[name], Difference()))
            feed = feeds[name]
            reports[name] = EngineReport(feed.seconds, feed.sent_bytes, feed.sent_tensors, error, difference)
            if reports[name].ok:
                self._proven[name] = dict(self.expected)
        return PushReport(version, scope, ended - began, total, len(new), spent, ended - verified, reports)

    def verify(self, only: Sequence[str] | None = None) -> dict[str, Difference]:
        """Compare again without pushing, after an engine slept, was restarted or was changed from elsewhere.

        The next push sends all tensors to engines that differ. An engine that does not answer differs in every tensor.
        """
        found = {}
        for name in list(self.engines) if only is None else only:
            error, difference = _verify(self.engines[name], self.expected)
            found[name] = Difference(missing=tuple(sorted(self.expected))) if error else difference
            if not found[name].empty:
                self._proven.pop(name, None)
        return found

    def forget(self, name: str) -> None:
        """Forget what this engine holds: the next push sends it all tensors."""
        self._proven.pop(name, None)


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Yield lists of at least one tensor and about `limit` bytes; tensors of one attention module stay in one list.

    SGLang's loaders for latent attention fuse two projections if they come in one call, and drop them if not.
    """
    bucket: list[Named] = []
    size = 0
    last: str | None = None
    for name, tensor in tensors:
        match = _ATTENTION.match(name)
        module = match and match[1]
        if bucket and size >= limit and (module is None or module != last):
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        last = module
    if bucket:
        yield bucket


@contextmanager
def exporting(export: Source) -> Iterator[Source | None]:
    """Let rank 0 call a collective `export` as often as it likes, while the other ranks follow.

        with exporting(trainer.export) as source:
            if source is not None:          # rank 0
                pusher.push(version, source)

    On the other ranks the body runs with None, after rank 0's body. If rank 0's body raises, they raise PushError.
    """
    scopes: tuple[Scope, ...] = get_args(Scope)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield export
        return
    device = broadcast_device()
    order = torch.zeros((), dtype=torch.int64, device=device)
    done = len(scopes)
    failed = len(scopes) + 1
    if dist.get_rank() == 0:

        def source(scope: Scope) -> Iterator[Named]:
            dist.broadcast(order.fill_(scopes.index(scope)), src=0)
            return iter(export(scope))

        try:
            yield source
        except BaseException:
            dist.broadcast(order.fill_(failed), src=0)
            raise
        dist.broadcast(order.fill_(done), src=0)
        return
    while True:
        dist.broadcast(order, src=0)
        if int(order) == failed:
            raise PushError("the push failed on rank 0")
        if int(order) == done:
            break
        deque(export(scopes[int(order)]), maxlen=0)
    yield None


def broadcast_device() -> torch.device:
    """Return where the tensors of a broadcast must lie."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


class _Feed:
    """A queue of tensors from the exporter to one engine, bounded in bytes. Leaves out what the engine holds."""

    def __init__(self, limit: int, proven: Mapping[str, int]) -> None:
        self.limit = limit
        self.proven = proven
        self.sent_bytes = 0
        self.sent_tensors = 0
        self.seconds = 0.0
        self._queue: deque[Named] = deque()
        self._bytes = 0
        self._ended: BaseException | bool = False
        self._reader_gone = False
        self._changed = threading.Condition()

    def put(self, name: str, tensor: Tensor, mark: int) -> None:
        if self.proven.get(name) == mark:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < self.limit or self._reader_gone)
            if not self._reader_gone:
                self._queue.append((name, tensor))
                self._bytes += _bytes(tensor)
                self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Announce the end of the tensors. With `error`, the reader raises it after the queued tensors."""
        with self._changed:
            self._ended = self._ended or error or True
            self._changed.notify_all()

    def stop_reading(self) -> None:
        """Drop everything that is put from now on: the engine reads no more."""
        with self._changed:
            self._reader_gone = True
            self._queue.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Named]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if not self._queue:
                    if isinstance(self._ended, BaseException):
                        raise self._ended
                    return
                name, tensor = self._queue.popleft()
                self._bytes -= _bytes(tensor)
                self._changed.notify_all()
            self.sent_bytes += _bytes(tensor)
            self.sent_tensors += 1
            yield name, tensor


def _stream(tensors: Iterable[Named], feeds: Sequence[_Feed]) -> tuple[dict[str, int], int, float]:
    """Read the exporter to its end, even if engines fail, since the other ranks take part in it.

    Returns fingerprints by name, bytes, and seconds of fingerprinting.
    """
    marks: dict[str, int] = {}
    total = 0
    spent = 0.0
    refused = ""
    for name, tensor in tensors:
        began = time.perf_counter()
        if name in marks:
            refused = refused or f"the exporter gave {name} twice"
        elif not _finite(tensor):
            refused = refused or f"{name} holds NaN or infinity"
        marks[name] = fingerprint(tensor)
        total += _bytes(tensor)
        spent += time.perf_counter() - began
        for feed in feeds:
            if refused:
                feed.close(PushError(refused))
            else:
                feed.put(name, tensor, marks[name])
    if not marks and not refused:
        refused = "the exporter gave no tensor"
    for feed in feeds:
        feed.close(PushError(refused) if refused else None)
    if refused:
        raise PushError(refused)
    return marks, total, spent


def _update(engine: RolloutEngine, version: int, scope: Scope, feed: _Feed) -> str:
    """Run one engine's session. Returns the error, or ""."""
    began = time.perf_counter()
    try:
        engine.update_weights(version, iter(feed), scope)
        left = next(iter(feed), None)
        return f"stopped reading at {left[0]}" if left else ""
    except (EngineError, PushError) as error:
        return str(error)
    finally:
        feed.seconds = time.perf_counter() - began
        feed.stop_reading()


def _verify(engine: RolloutEngine, expected: Mapping[str, int]) -> tuple[str, Difference]:
    try:
        return "", compare(expected, engine.fingerprints())
    except EngineError as error:
        return str(error), Difference()


def _finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # NaN propagates into both
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""The embedded engines of all ranks of a training job, as one `RolloutEngine` on rank 0.

Rank 0 sends orders: ("tick", Tick), ("call", method, *arguments) or ("close",). On every other rank a thread carries
them out (`Follower`), with a gloo group of its own. So the main threads can train meanwhile, or take part in the export
of a push. `member.py` has what an order does on one rank.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from megatron_rlspec.engine import EngineDescription, EngineError
from megatron_rlspec.extensions.migration.embedded.member import Member, Requests, Tick
from megatron_rlspec.push.bucket import Bucket, buckets
from megatron_rlspec.push.update import update_weights
from megatron_rlspec.types import Request, RoundStats, Sample, Sampling, Scope, SpecConfig

# A text in the errors of collective calls when another rank has ended: they name a file of gloo's source.
LOST = "gloo/"
GRACE = 1.0  # seconds in which a follower's main thread may report that a rank was lost
MESSAGE_BYTES = 64 << 20  # bytes of weights in one message, more if `buckets` keeps them together
DIFFERS = -1  # no tensor has this fingerprint, so the comparison after a push finds a difference


class Fleet:
    """See `RolloutEngine`.

    The ranks generate in ticks of `every` rounds. Between two ticks samples are returned, new requests begin, and
    samples move. A call that changes the engines waits for the end of a tick.

    Any thread may call any method. There is no thread for the ticks: those that wait in `generate` run them, one after
    another, each for the requests of all. A thread that takes both locks takes `_lock` first.

    member  rank 0's part of the fleet
    every   rounds of a tick (`tail.every`)
    """

    bucket_memory = None  # buckets hold plain tensors

    def __init__(self, member: Member, every: int) -> None:
        self.member = member
        self.every = every
        self._lock = threading.Lock()  # held during one order to the ranks
        self._steady = threading.Condition(self._lock)  # no update is open
        self._updating = False
        # Guards what follows, from `_new` to `_size_changes`. Held shortly, also beside a tick.
        self._fields_lock = threading.RLock()
        self._new: Requests = []  # for the next tick
        # by id, requests whose samples have not ended
        self._open: dict[str, tuple[Request, Sampling]] = {}
        self._dealt: set[str] = set()  # ids of open requests that the ranks have
        self._aborted: set[str] = set()  # ids for the next tick
        self._dropped: set[str] = set()  # ids for the next tick
        self._done: dict[str, Sample] = {}  # by id, for their `generate`
        self._began = 0.0  # `perf_counter` when the first request of the rollout came
        self._moves: list[dict[str, Any]] = []  # records for `moves.jsonl`
        self._size_changes: list[dict[str, Any]] = []
        self._closed = False
        # True during an order, and for ever after one that broke off: the ranks would misread a new order
        self._mid_order = False
        self._lost = ""  # why the ranks can no longer be reached

    # -- generating ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        samples: dict[str, Sample] = {}
        left = self._open_requests(requests, sampling)
        try:
            while left:
                with self._fields_lock:
                    ended = [self._done.pop(id) for id in left & self._done.keys()]
                for sample in ended:
                    samples[sample.request_id] = sample
                    left.remove(sample.request_id)
                    if on_sample is not None:
                        on_sample(sample)
                if not left:
                    break
                try:
                    self._serve(left)
                except EngineError:
                    with self._fields_lock:
                        if not left & self._done.keys():
                            raise  # else first return what has ended
                # Locks are not fair: this lets another thread take `_lock` between two ticks.
                time.sleep(0)
        finally:
            self._forget(left)
        return [samples[request.id] for request in requests]

    def _open_requests(self, requests: Sequence[Request], sampling: Sampling) -> set[str]:
        """Queue requests for the next tick. Returns their ids. Raises EngineError if one of them is wrong."""
        scheduler = self.member.engine.scheduler
        with self._fields_lock:
            if not self._open:
                self._began = time.perf_counter()
            runs = scheduler.make_runs([(request, sampling) for request in requests])
            known_ids = set(self._open)
            for run in runs:
                scheduler.check(run, known_ids)
            for run in runs:
                id = run.request.id
                if run.sample is not None:  # its partial sample had ended already
                    self._done[id] = run.sample
                    continue
                self._new.append((run.request, sampling))
                self._open[id] = (run.request, sampling)
            return {run.request.id for run in runs}

    def _forget(self, ids: set[str]) -> None:
        """Drop requests that no caller waits for any more."""
        with self._fields_lock:
            self._new = [pair for pair in self._new if pair[0].id not in ids]
            for id in ids:
                self._done.pop(id, None)
                self._open.pop(id, None)
                if id in self._dealt:
                    self._dealt.remove(id)
                    self._dropped.add(id)

    def _serve(self, waiting: set[str]) -> None:
        """Run one tick, unless another thread's tick has ended one of the samples `waiting` (ids).

        Raises EngineError if an engine of any rank fails.
        """
        with self._ordering(tick=True):
            with self._fields_lock:
                if waiting & self._done.keys():
                    return
                order = self._tick()
            began = time.perf_counter()
            self.member.ranks.tell(("tick", order))
            try:
                samples = self.member.tick(order)
            except RuntimeError:
                # A rank was lost: of the samples of this tick, only rank 0's own arrived.
                with self._fields_lock:
                    self._end([run.sample for run in self.member.runs if run.sample is not None])
                raise
            with self._fields_lock:
                self._end(samples)
                self._record_tick(began - self._began)
            for report in self.member.reports:
                if report.error:
                    raise EngineError(report.error)

    def _end(self, samples: Sequence[Sample]) -> None:
        """Hand samples that have ended to their `generate`. The caller holds `_fields_lock`."""
        for sample in samples:
            self._dealt.discard(sample.request_id)
            # `_forget` may have dropped the request. Then no `generate` waits for the sample.
            if self._open.pop(sample.request_id, None) is not None:
                self._done[sample.request_id] = sample

    def _record_tick(self, began: float) -> None:
        """Record what a tick changed; `began`: seconds since the first request of the rollout came.

        The caller holds `_fields_lock`.
        """
        since = {"began": began}
        for change in self.member.changes:
            self._size_changes.append(since | change)
        self.member.changes = []
        for report in self.member.reports:
            for move in report.moved:
                self._moves.append(asdict(move) | since)

    def record(self) -> dict[str, Any]:
        """Return and forget what a line of `moves.jsonl` holds: {"moves": [...], "sizes": [...]}. `wiring.py` calls it.

        Their `began` is that of their tick, in seconds since the rollout's first request.
        """
        with self._fields_lock:
            record = {"moves": self._moves, "sizes": self._size_changes}
            self._size_changes = []
            self._moves = []
            return record

    def _tick(self) -> Tick:
        """Return the next tick, and clear the fields whose content is in it. The caller holds `_fields_lock`."""
        dealt = self._deal()
        cap = max((sampling.max_new_tokens for _, sampling in self._open.values()), default=1)
        tick = Tick(
            dealt,
            sorted(self._aborted),
            sorted(self._dropped),
            self.every,
            cap,
        )
        for new in dealt:
            self._dealt |= {request.id for request, _ in new}
        self._new = []
        self._aborted.clear()
        self._dropped.clear()
        return tick

    def _deal(self) -> list[Requests]:
        """Deal the new requests to the ranks that have the fewest. Returns them by rank.

        A whole group goes to one rank, where it shares the cache of its prompt. A group larger than an equal share is
        cut into parts, which may go to several ranks.
        """
        ranks = self.member.ranks.size
        groups: dict[int, Requests] = {}
        # By id: a deal does not depend on the order in which requests came.
        for request, sampling in sorted(self._new, key=lambda pair: pair[0].id):
            groups.setdefault(request.prompt.id, []).append((request, sampling))
        # Requests that a rank gets at once: an equal share, rounded up.
        largest_part = max(1, -(-len(self._new) // ranks))
        # open requests by rank
        busy = [report.open for report in self.member.reports] or [0] * ranks
        dealt: list[Requests] = [[] for _ in range(ranks)]
        for group in groups.values():
            for first in range(0, len(group), largest_part):
                part = group[first : first + largest_part]
                rank = busy.index(min(busy))
                busy[rank] += len(part)
                dealt[rank] += part
        return dealt

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self._fields_lock:
            ids = set(self._open if request_ids is None else request_ids)
            self._aborted |= ids & self._open.keys()

    # -- everything else ----------------------------------------------------------------------------------------------

    @contextmanager
    def _ordering(self, tick: bool = False) -> Iterator[None]:
        """Keep other threads from the ranks during one order. A `tick` first waits until no update is open.

        After an error in the middle of an order the ranks are told nothing more: which message they expect is unknown.
        """
        with self._lock:
            if tick:
                self._steady.wait_for(lambda: not self._updating)
            if self._closed or self._mid_order:
                raise EngineError(f"embedded engine: {self._lost or 'closed'}")
            self._mid_order = True
            try:
                yield
            except EngineError:  # an engine's own: it is raised after the last message of the order
                self._mid_order = False
                raise
            except RuntimeError as error:
                if LOST not in str(error):
                    raise
                self._lost = f"a rank of the fleet ended or cannot be reached ({str(error).splitlines()[0][:120]})"
                raise EngineError(f"embedded engine: {self._lost}") from None
            self._mid_order = False

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks' engines, between two ticks. Returns the results by rank. Raises EngineError."""
        with self._ordering():
            self.member.ranks.tell(("call", name, *arguments))
            return self.member.call(name, *arguments)

    def begin_update(self, version: int, scope: Scope = "all") -> None:
        """See `RolloutEngine`. No tick runs until `end_update`, which must follow also if this call fails."""
        with self._lock:
            self._updating = True  # first, so that no further tick begins before the call
        self._call("begin_update", version, scope)

    def send(self, bucket: Bucket, *others: Any) -> None:
        """See `RolloutEngine`. A bucket goes to the ranks in messages of about MESSAGE_BYTES."""
        for lot in buckets(bucket.tensors, MESSAGE_BYTES):
            # Copies: pickle writes the whole storage of a view.
            self._call("send", Bucket([(name, tensor.cpu().clone()) for name, tensor in lot]))

    def end_update(self, error: str = "") -> None:
        try:
            self._call("end_update", error)
        finally:
            with self._lock:
                self._updating = False
                self._steady.notify_all()

    update_weights = update_weights

    def set_config(self, config: SpecConfig, sharpness: float | None = None) -> None:
        self._call("set_config", config, sharpness)

    def set_spec_rule(self, rule: Mapping[str, Any]) -> None:
        self._call("set_spec_rule", dict(rule))

    def set_draft_vocabulary(self, words: np.ndarray) -> None:
        self._call("set_draft_vocabulary", words)

    def spec_rule_report(self) -> dict[str, Any]:
        """Return rank 0's report for all ranks: each has the same rule, and a share of the samples."""
        report: dict[str, Any] = self._call("spec_rule_report")[0]
        return report

    def hold(self, reason: str) -> None:
        self._call("hold", reason)

    def release(self) -> None:
        self._call("release")

    def sleep(self) -> None:
        """Do nothing: the engines share the trainer's processes."""

    def wake(self) -> None:
        """Do nothing."""

    def stats(self) -> list[RoundStats]:
        stats: list[RoundStats] = []
        for of_rank in self._call("stats"):
            stats += of_rank
        return stats

    def fingerprints(self) -> dict[str, int]:
        """Compute the fingerprints on all ranks. A tensor that differs between ranks gets DIFFERS.

        Each rank's are of full tensors, so they are equal on all ranks if all have the same weights.
        """
        ranks = self._call("fingerprints")
        marks: dict[str, int] = {}
        for of_rank in ranks:
            marks |= of_rank
        for name, mark in marks.items():
            if any(of_rank.get(name) != mark for of_rank in ranks):
                marks[name] = DIFFERS
        return marks

    def describe(self) -> EngineDescription:
        description = self.member.engine.describe()
        ranks = self.member.ranks.size
        description["max_total_tokens"] *= ranks
        description["max_running_requests"] *= ranks
        return description

    @property
    def alive(self) -> bool:
        return not self._closed and not self._lost

    def close(self) -> None:
        self.abort()  # if a tick comes before the lines below, it ends all samples
        with self._lock:
            if not self._closed and not self._mid_order:
                with suppress(RuntimeError):  # fails if a rank has died
                    self.member.ranks.tell(("close",))
            self._closed = True


class Follower:
    """The part of a rank above 0: it runs rank 0's orders in a thread, until rank 0 closes the fleet.

    If the thread fails, it ends this rank's process.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        # The present GPU is a setting of each thread, and a new thread begins with GPU 0.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            self._follow()
        except BaseException as error:
            if LOST in str(error):
                # The main thread may see the same loss, and its message says more.
                time.sleep(GRACE)
            else:
                traceback.print_exc()
            # A thread cannot end its process by an exception. If this rank lived on, the others would wait for it.
            os._exit(1)

    def _follow(self) -> None:
        ranks = self.member.ranks
        while True:
            method, *arguments = ranks.tell()  # as `Fleet` sends them
            if method == "close":
                return
            # `Member` has told rank 0 of the error, and `Fleet` raises it there.
            with suppress(EngineError):
                getattr(self.member, method)(*arguments)

    def close(self) -> None:
        """Wait until rank 0 has closed the fleet, at most 60 s: rank 0 may have died."""
        self._thread.join(timeout=60)

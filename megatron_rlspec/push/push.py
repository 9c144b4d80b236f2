"""One push: stream tensors from the trainer to every engine in step, as one versioned update, and compare there.

    source(scope) ──(name, tensor)──► fingerprint, finite? ──► bucket ──► all engines: begin, send, send, ..., end
                                            │                                              │
                                      what is expected  ◄────── compare ─────  engine.fingerprints

`source` is the exporter, such as `Trainer.export`: full tensors of policy and drafter under Hugging Face names
(`train/shards.py`). Fingerprints and finite checks run where the tensors are; their results are read once per bucket. A
bucket is copied once, into one of two pieces of memory, and all engines take it at once (`update.py`), by one call
where they share a process group. Meanwhile the exporter makes the next bucket, which is sent when every engine has the
bucket before it.

Only rank 0 pushes. The exporter is a collective call of all ranks (`exporting`): rank 0 reads it to its end even if
every engine fails, since the other ranks would wait for ever. An engine that fails leaves the push, and the others go
on. After `Pusher.push` each of its engines holds exactly the new version, or it is in `report.failed`. `health.py`
calls `Pusher.push`; `contract.py` decides what follows for an engine that failed.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.engine import EngineError, RolloutEngine, ask_all
from megatron_rlspec.host.ranks import job
from megatron_rlspec.push.bucket import Named, buckets
from megatron_rlspec.push.fingerprint import Difference, compare, fingerprints
from megatron_rlspec.push.update import Update
from megatron_rlspec.types import Scope

# yields each full tensor once, under its Hugging Face name
Source = Callable[[Scope], Iterable[Named]]


class PushError(RuntimeError):
    """The trainer's side of a push failed: the exporter yielded no tensor, or one that may not be sent to any engine.

    On other ranks than 0: rank 0 failed, for any reason.
    """

    exit_code = 1


@dataclass(frozen=True)
class EngineReport:
    """One engine's part of a push.

    sent_bytes  of all buckets that were sent to it, also if it failed later
    error       why the update or the comparison of fingerprints failed; "" if neither did
    difference  between the tensors that it holds and those that it was sent; empty if it was not compared
    """

    sent_bytes: int
    error: str = ""
    difference: Difference = Difference()

    @property
    def ok(self) -> bool:
        return not self.error and self.difference.empty


@dataclass(frozen=True)
class PushReport:
    """One push.

    version              the stamp that engines put on tokens under these weights
    scope                what was sent, which is "all" if the caller asked for less, but an engine was not shown to hold
                         the rest
    seconds              from the call of `Pusher.push` to the end of the comparison
    total_bytes          of the tensors, counted once
    tensors              their number
    fingerprint_seconds  time of this process for fingerprints and finite checks
    verify_seconds       time until the slowest engine had answered with its fingerprints, and all were compared
    engines              by name, every engine that was pushed to
    """

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
        """Return `push/*`, which `records/metric_names.toml` describes."""
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
    """Push to engines, and remember what was sent, and which engines were shown to hold it. Not thread-safe.

    engines   by name, such as `EnginePool.engines`. The mapping is shared: another thread may remove an engine during a
              push, and a new engine gets its first push once it is there
    frozen    Hugging Face names of tensors that no push sends because they are not trained. Engines may hold them
    expected  name -> fingerprint of the newest tensors that were sent: what every engine should hold

    `SlimePushes` in `integrations/slime/engines.py` overrides `push`.
    """

    def __init__(
        self, engines: Mapping[str, RolloutEngine], *, frozen: Collection[str] = ()
    ) -> None:
        self.engines = engines
        self.frozen = frozenset(frozen)
        self.expected: dict[str, int] = {}
        # names of engines that a comparison has shown to hold `expected`
        self._proven: set[str] = set()

    def push(
        self,
        version: int,
        source: Source,
        scope: Scope = "all",
        only: Sequence[str] | None = None,
    ) -> PushReport:
        """Bring every engine to `version`, and compare there what arrived.

        version  the stamp that engines put on tokens from now on
        source   called once with the scope; it yields full tensors under Hugging Face names
        scope    which tensors to send. "target" and "drafter" become "all" unless a comparison has shown that every
                 engine holds what was sent before. So the first push of an engine, and one after a failure, sends all
        only     names of the engines to push to; those that have left are skipped. None: all

        An engine that fails is in `PushReport.failed`, and nothing is raised for it; if its update failed, it serves
        nothing until a later push succeeds. Raises PushError if the exporter yields no tensor, a name twice, NaN or
        infinity: then `expected` stays, and the engines serve nothing until a later push.
        """
        began = time.perf_counter()
        # A copy, because another thread may remove an engine during the push.
        engines = dict(self.engines)
        if only is not None:
            engines = {name: engine for name, engine in engines.items() if name in only}
        if not self._proven.issuperset(engines):
            scope = "all"
        # From now on an engine may hold a part of the push. If anything below raises, it stays unproven, and the next
        # push sends it all tensors.
        self._proven.difference_update(engines)
        with Update(engines, version, scope) as update:
            sent, total_bytes, fingerprint_seconds = _stream(source(scope), update)
        # Another exception is an error of this program, not of an engine.
        for error in update.errors.values():
            if not isinstance(error, EngineError):
                raise error
        # A push of "target" or "drafter" leaves the tensors of the other model as they were.
        self.expected = sent if scope == "all" else {**self.expected, **sent}
        comparing = time.perf_counter()
        differences, unanswered = ask_all(update.engines, self.compare_with)
        ended = time.perf_counter()
        reports = {}
        # `update.engines` lacks the engines that failed; `update.sent_bytes` has all engines of this push.
        for name, size in update.sent_bytes.items():
            failed = update.errors.get(name) or unanswered.get(name) or ""
            reports[name] = EngineReport(size, str(failed), differences.get(name, Difference()))
            if reports[name].ok:
                self._proven.add(name)
        return PushReport(
            version,
            scope,
            ended - began,
            total_bytes,
            len(sent),
            fingerprint_seconds,
            ended - comparing,
            reports,
        )

    def compare_with(self, engine: RolloutEngine) -> Difference:
        """Return the difference between `expected` and what an engine holds. Raises EngineError."""
        fingerprints = engine.fingerprints()
        # Frozen tensors would count as `extra`, because no push sends them.
        for name in self.frozen - self.expected.keys():
            fingerprints.pop(name, None)
        return compare(self.expected, fingerprints)

    def forget(self, name: str) -> None:
        """Forget what this engine holds: the next push sends it all tensors."""
        self._proven.discard(name)


@contextmanager
def exporting(
    export: Source, broadcast: Callable[[int], int] | None = None
) -> Iterator[Source | None]:
    """Let rank 0 call a collective `export` as often as it likes, while the other ranks take part.

    A context that all ranks must enter:

        with exporting(trainer.export) as source:
            if source is not None:          # rank 0
                pusher.push(version, source)

    On the other ranks the body runs with None, after rank 0's body. If rank 0's body raises, they raise PushError, and
    their body does not run. Rank 0 must read each `source(scope)` to its end before the next call, and before its body
    ends: otherwise the other ranks wait for ever.

    broadcast  collective: returns rank 0's number on every rank, and ignores the numbers of the others. None: by a
               message to the ranks of this job

    Rank 0 sends one number for each export, the index of its scope, and at the end `done` or `failed`.
    """
    scopes: tuple[Scope, ...] = get_args(Scope)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield export
        return
    broadcast = broadcast or job().tell
    done = len(scopes)
    failed = len(scopes) + 1
    if dist.get_rank() == 0:
        # No generator function: the number must be sent when `source` is called, before anything of `export` runs.
        def source(scope: Scope) -> Iterator[Named]:
            broadcast(scopes.index(scope))
            return iter(export(scope))

        try:
            yield source
        except BaseException:
            broadcast(failed)  # also for Ctrl-C: the other ranks wait in `broadcast`
            raise
        broadcast(done)
        return
    while (order := broadcast(done)) < done:  # the argument may be any number: only rank 0's counts
        # Reads to the end and drops the tensors: `export` communicates only while it is read.
        deque(export(scopes[order]), maxlen=0)
    if order == failed:
        raise PushError("the push failed on rank 0")
    yield None


def _stream(tensors: Iterable[Named], update: Update) -> tuple[dict[str, int], int, float]:
    """Send the exporter's tensors in buckets.

    The exporter is read to its end, also after a tensor was refused or all engines failed: the other ranks take part in
    it. So PushError is raised only at the end.

    Returns fingerprints by name, bytes of all tensors, and seconds for fingerprints and finite checks.
    """
    marks: dict[str, int] = {}  # name -> fingerprint
    total = 0  # bytes
    seconds = 0.0
    refused = ""  # why nothing more may be sent
    for bucket in buckets(tensors, update.limit):
        began = time.perf_counter()
        bucket_marks, problem = _fingerprinted(bucket)
        refused = refused or problem
        for name, tensor in bucket:
            if name in marks:
                refused = refused or f"the exporter gave {name} twice"
            marks[name] = bucket_marks[name]
            total += tensor.nbytes
        seconds += time.perf_counter() - began
        if not refused:
            update.send(bucket)
    if not marks:
        refused = "the exporter gave no tensor"
    if refused:
        raise PushError(refused)
    return marks, total, seconds


def _fingerprinted(bucket: Sequence[Named]) -> tuple[dict[str, int], str]:
    """Return fingerprints by name, and a line on the first tensor with NaN or infinity; "" if there is none."""
    marks = {}
    problem = ""
    tensors = [tensor for _, tensor in bucket]
    checked = zip(bucket, fingerprints(tensors), _finite(tensors), strict=True)
    for (name, _), mark, finite in checked:
        marks[name] = mark
        if not finite and not problem:
            problem = f"{name} holds NaN or infinity"
    return marks, problem


def _finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor, in their order, whether all its elements are finite. The host waits for the GPU once.

    Tensors of integers and empty ones count as finite.
    """
    finite = [True] * len(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_floating_point() and tensor.numel():
            groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    if not groups:
        return finite
    # `indices` and `answers` are both in the order of `groups`, so that the i-th answer is of the i-th index.
    indices = list(itertools.chain.from_iterable(groups.values()))
    answers = [finite_of([tensors[i] for i in group]) for group in groups.values()]
    for i, answer in zip(indices, torch.cat(answers).tolist(), strict=True):
        if not answer:
            # On a GPU this "no" may be wrong (`finite_sums`): a sum of finite numbers can be infinite. So this tensor
            # is looked at alone. That waits for the GPU again, but is rare.
            finite[i] = bool(torch.stack(torch.aminmax(tensors[i])).isfinite().all())
    return finite


def finite_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return bool [n] on their device: whether tensors of one dtype and device are finite. None may be empty.

    On a GPU also False for a tensor of finite numbers whose sum overflows.
    """
    if tensors[0].device.type != "cpu":
        return finite_sums(tensors)
    # NaN propagates into the minimum and the maximum, so these two show every NaN and infinity.
    extremes: list[Tensor] = []
    for tensor in tensors:
        extremes += torch.aminmax(tensor)
    return torch.isfinite(torch.stack(extremes)).view(-1, 2).all(-1)


def finite_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return bool [n] on the tensors' device: whether each sum of absolute values is finite.

    NaN and infinity make the sum NaN or infinite, so True proves that a tensor is finite.

    One call serves all tensors, because the host would need longer to launch a call for each than the GPU to run it.
    """
    # at least float32: in float16 the sum of a tensor would often overflow
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.isfinite(
        torch.stack(torch._foreach_norm([tensor.detach() for tensor in tensors], 1, dtype=wide))
    )

"""One push: stream tensors from the trainer to every engine in step, as one versioned update, and compare there.

    source(scope) ──(name, tensor)──► fingerprint, finite? ──► bucket ──► all engines: begin, send, send, ..., end
                                            │                                              │
                                      what is expected  ◄────── compare ─────  engine.fingerprints

`source` is `Trainer.export`: full tensors of policy and drafter under Hugging Face names (`train/shards.py`).
Fingerprints and finite checks run where the tensors are, and are read once per bucket. A bucket is copied once, into
one of two pieces of memory, and all engines take it at once (`update.py`), by one call where they share a process
group. Meanwhile the exporter makes the next bucket, which leaves when every engine has the one before.

The exporter is a collective call: it is read to its end whatever fails. An engine that fails leaves, and the others go
on. After `Pusher.push` every engine holds exactly the new version, or it is in `report.failed` and serves nothing until
a later push succeeds. `contract.py` decides what follows.
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

Source = Callable[[Scope], Iterable[Named]]


class PushError(RuntimeError):
    """The trainer's side of a push failed: the exporter yielded a tensor that may not be sent to any engine."""

    exit_code = 1


@dataclass(frozen=True)
class EngineReport:
    """One engine's part of a push.

    error       why the engine may not serve; "" if the session succeeded
    difference  between the tensors that it holds and the trainer's
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

    fingerprint_seconds  that the trainer took for fingerprints and finite checks
    verify_seconds       that the slowest engine took for its fingerprints
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
    """Push to engines, and remember the tensors that a comparison has shown in each of them.

    engines     by name: `EnginePool.engines`, which changes with the pool
    frozen      names of tensors that no push sends because they are not trained. Engines may hold them
    """

    def __init__(
        self, engines: Mapping[str, RolloutEngine], *, frozen: Collection[str] = ()
    ) -> None:
        self.engines = engines
        self.frozen = frozenset(frozen)
        self.expected: dict[str, int] = {}
        self._proven: set[str] = set()  # engines that a comparison has shown to hold `expected`

    def push(
        self,
        version: int,
        source: Source,
        scope: Scope = "all",
        only: Sequence[str] | None = None,
    ) -> PushReport:
        """Bring every engine to `version`; `source(scope)` yields full tensors under Hugging Face names.

        only  names of the engines to push to; those that have left are skipped. None: all

        Another scope than "all" becomes "all" unless a comparison has shown that every engine holds the other tensors.
        This is the case after a start and after a failure. Raises PushError if the exporter yields a name twice, NaN or
        infinity; the engines then serve nothing until a later push.
        """
        began = time.perf_counter()
        # a copy, because another thread may remove an engine during the push
        engines = dict(self.engines)
        if only is not None:
            engines = {name: engine for name, engine in engines.items() if name in only}
        if not self._proven.issuperset(engines):
            scope = "all"
        self._proven.difference_update(engines)  # until the comparison
        with Update(engines, version, scope) as update:
            sent, total, spent = _stream(source(scope), update)
        for error in update.errors.values():
            if not isinstance(error, EngineError):
                raise error
        self.expected = sent if scope == "all" else {**self.expected, **sent}
        verified = time.perf_counter()
        differences, silent = ask_all(update.engines, self.compare_with)
        ended = time.perf_counter()
        reports = {}
        for name, size in update.sent_bytes.items():
            failed = update.errors.get(name) or silent.get(name) or ""
            reports[name] = EngineReport(size, str(failed), differences.get(name, Difference()))
            if reports[name].ok:
                self._proven.add(name)
        seconds = ended - began
        return PushReport(
            version, scope, seconds, total, len(sent), spent, ended - verified, reports
        )

    def compare_with(self, engine: RolloutEngine) -> Difference:
        """Return the difference between what an engine was sent and what it holds. Raises EngineError."""
        fingerprints = engine.fingerprints()
        # An engine may hold frozen tensors that no push sends.
        for name in self.frozen - self.expected.keys():
            fingerprints.pop(name, None)
        return compare(self.expected, fingerprints)

    def forget(self, name: str) -> None:
        """Forget what this engine holds: the next push sends it all tensors."""
        self._proven.discard(name)


@contextmanager
def exporting(
    export: Source, number: Callable[[int], int] | None = None
) -> Iterator[Source | None]:
    """Let rank 0 call a collective `export` as often as it likes, while the other ranks follow.

        with exporting(trainer.export) as source:
            if source is not None:          # rank 0
                pusher.push(version, source)

    On the other ranks the body runs with None, after rank 0's body. If rank 0's body raises, they raise PushError.

    number  returns rank 0's number on every rank; None: over this job's ranks
    """
    scopes: tuple[Scope, ...] = get_args(Scope)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield export
        return
    number = number or job().tell
    done = len(scopes)
    failed = len(scopes) + 1
    if dist.get_rank() == 0:

        def source(scope: Scope) -> Iterator[Named]:
            number(scopes.index(scope))
            return iter(export(scope))

        try:
            yield source
        except BaseException:
            number(failed)
            raise
        number(done)
        return
    while (order := number(done)) < done:
        deque(export(scopes[order]), maxlen=0)
    if order == failed:
        raise PushError("the push failed on rank 0")
    yield None


def _stream(tensors: Iterable[Named], update: Update) -> tuple[dict[str, int], int, float]:
    """Read the exporter to its end, even if engines fail, since the other ranks take part in it.

    Returns fingerprints by name, bytes, and seconds of fingerprinting. Raises PushError.
    """
    marks: dict[str, int] = {}
    total = 0
    spent = 0.0
    refused = ""
    for lot in buckets(tensors, update.limit):
        began = time.perf_counter()
        found, problem = _fingerprinted(lot)
        refused = refused or problem
        for name, tensor in lot:
            if name in marks:
                refused = refused or f"the exporter gave {name} twice"
            marks[name] = found[name]
            total += tensor.nbytes
        spent += time.perf_counter() - began
        if not refused:
            update.send(lot)
    if not marks:
        refused = "the exporter gave no tensor"
    if refused:
        raise PushError(refused)
    return marks, total, spent


def _fingerprinted(bucket: Sequence[Named]) -> tuple[dict[str, int], str]:
    """Return fingerprints by name, and which tensor may not be sent; "" if all may."""
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
    """Return for each tensor whether all of it is finite. Answers on a GPU are read together, with one wait."""
    finite = [True] * len(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_floating_point() and tensor.numel():
            groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    if not groups:
        return finite
    indices = list(itertools.chain.from_iterable(groups.values()))
    answers = [finite_of([tensors[i] for i in group]) for group in groups.values()]
    for i, answer in zip(indices, torch.cat(answers).tolist(), strict=True):
        if not answer:
            # A sum of finite numbers can be infinite.
            finite[i] = bool(torch.stack(torch.aminmax(tensors[i])).isfinite().all())
    return finite


def finite_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return bool [n]: whether tensors of one dtype and device are finite; on a GPU, False also for very large ones."""
    if tensors[0].device.type != "cpu":
        return finite_sums(tensors)
    # Into the smallest and the largest number NaN propagates.
    extremes: list[Tensor] = []
    for tensor in tensors:
        extremes += torch.aminmax(tensor)
    return torch.isfinite(torch.stack(extremes)).view(-1, 2).all(-1)


def finite_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return bool [n], by one call for all tensors: calls for each would take a GPU's host longer than the GPU."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.isfinite(
        torch.stack(torch._foreach_norm([tensor.detach() for tensor in tensors], 1, dtype=wide))
    )

"""One rank's part of a fleet of embedded engines: it runs its requests, and exchanges samples with other ranks.

All ranks run the same calls in lock-step: some rounds, one small exchange of loads, the same plan on every rank, the
moves of the plan. No clock enters a plan, so a resumed run decodes in the same batches as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.groups import Groups
from megatron_rlspec.extensions.migration.embedded.move import (
    Arrivals,
    KVMessage,
    RowReservation,
    TransferEndpoint,
)
from megatron_rlspec.extensions.migration.embedded.regroup import regroup
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.extensions.migration.plans.record import How, Move, MoveRecord
from megatron_rlspec.extensions.migration.plans.tp_planner import TPPlanner
from megatron_rlspec.host.ranks import Pending, Ranks
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.types import Load, Request, Sample, Sampling

Requests = list[tuple[Request, Sampling]]


class Tick(NamedTuple):
    """Some rounds on all ranks. new: requests of each rank; cap: tokens of a response; aborted, dropped: ids."""

    new: list[Requests]
    aborted: list[str]
    dropped: list[str]
    rounds: int
    cap: int


class Report(NamedTuple):
    """What a rank tells all others after a tick. open: its requests; done: its samples that have ended."""

    load: Load
    open: int
    done: int
    moved: list[MoveRecord]
    error: str = ""


@dataclass(frozen=True)
class Arrival:
    """A move with this rank as its target, while it lasts.

    source   rank
    first    stage 1, which travels
    granted  ids of the samples that may come
    record   of what has arrived
    """

    source: int
    first: Pending
    granted: list[str]
    record: MoveRecord


class Member:
    """One rank.

    rebalancer  plans the moves; None: samples stay where they were dealt
    sizes       decides on the tensor-parallel size of a rollout's end; None: it stays 1
    groups      of the ranks, made for all sizes in question; needed with `sizes`
    """

    def __init__(
        self,
        engine: MigratableEmbeddedEngine,
        ranks: Ranks,
        rebalancer: Rebalancer | None,
        sizes: TPPlanner | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.engine = engine
        self.ranks = ranks
        self.rebalancer = rebalancer
        self.sizes = sizes
        self.groups = groups
        self.changes: list[dict[str, Any]] = []  # records of changes of the size
        self.mover = TransferEndpoint(engine)
        self.reports: list[Report] = []
        self.runs: list[ActiveRequest] = []
        self._error = ""
        self._moved: list[MoveRecord] = []  # in this tick

    # ---- a tick -----------------------------------------------------------------------------------------------------

    def tick(self, order: Tick) -> list[Sample]:
        """Run one tick. Returns the samples of all ranks that have ended on rank 0, none elsewhere."""
        self._error = ""
        engine = self.engine
        self._resize(order)
        dropped = {run.request.id for run in engine.drop(order.dropped)}
        self.runs = [run for run in self.runs if run.request.id not in dropped]
        new: Requests = []
        for rank in self._group:
            new += order.new[rank]
        self.runs += engine.submit(new)
        engine.abort(order.aborted)
        plan = self._plan(order)
        if plan:
            self._move(plan)
        for _ in range(order.rounds):
            if self._error or not (engine.running or engine.waiting):
                break
            self._step()
        return self._report()

    @property
    def _group(self) -> range:
        """Return the ranks that run the same requests as this one. The first of them speaks for all."""
        size = self.engine.model.comm.size
        first = self.ranks.rank // size * size
        return range(first, first + size)

    def _resize(self, order: Tick) -> None:
        """Change the tensor-parallel size before this tick's rounds, if that pays. A new rollout begins at 1."""
        if self.sizes is None or self.groups is None:
            return
        now = self.engine.model.comm.size
        wanted = 1
        how: How = "kv"
        open_requests = sum(report.open for report in self.reports[::now])
        if open_requests:
            wanted = now
            loads = self._loads(order)[::now]  # one of each engine
            change = self.sizes.decide(loads, now, order.cap)
            if change is not None:
                wanted = change.tp
                how = change.how
        if wanted == now:
            return
        began = time.perf_counter()
        self.runs = regroup(self.engine, self.ranks, self.groups, wanted, how)
        ms = (time.perf_counter() - began) * 1e3
        record = {"from": now, "to": wanted, "samples": open_requests, "how": how, "ms": ms}
        self.changes.append(record)

    def _loads(self, order: Tick) -> list[Load]:
        """Return every rank's load, with the requests of this tick."""
        loads = []
        for report, new in zip(self.reports, order.new, strict=True):
            waiting = report.load.waiting + len(new)
            loads.append(replace(report.load, waiting=waiting))
        return loads

    def _step(self, arrivals: Arrivals | None = None) -> None:
        try:
            if arrivals is None:
                self.engine.step()
            else:
                self.engine.step(arrivals.runs, arrivals.land)
        except RuntimeError as error:  # torch's own, too: every error must reach rank 0
            self._error = f"rank {self.ranks.rank}: {error}".splitlines()[0]

    def _report(self) -> list[Sample]:
        ended = [run.sample for run in self.runs if run.sample is not None]
        self.runs = [run for run in self.runs if run.sample is None]
        done = ended if self.ranks.rank == self._group[0] else []
        report = Report(
            load=self.engine.load(str(self.ranks.rank)),
            open=len(self.runs),
            done=len(done),
            moved=self._moved,
            error=self._error,
        )
        self._moved = []
        self.reports = self.ranks.share(report)
        if self.ranks.rank:
            if done:
                self.ranks.send(0, done)
                self.ranks.flush()
            return []
        for rank, other in enumerate(self.reports):
            if rank and other.done:
                done += self.ranks.receive(rank)
        return done

    def _plan(self, order: Tick) -> list[Move]:
        """Return the moves before this tick's rounds: the same on every rank."""
        if self.rebalancer is None or not self.reports:
            return []
        if order.aborted or order.dropped or len(self._group) > 1:
            return []
        for report in self.reports:
            if report.error:
                return []
        return self.rebalancer.plan(self._loads(order))

    # ---- moves ------------------------------------------------------------------------------------------------------

    def _move(self, plan: Sequence[Move]) -> None:
        """Carry out the moves of a plan, in two rounds. Every rank passes every message in the order of the plan."""
        rank = self.ranks.rank
        leaving: list[tuple[int, list[str]]] = []  # targets, and the ids that they granted
        coming: list[Arrival] = []
        for move in plan:
            if rank == int(move.source):
                leaving.append((int(move.target), self._send_verified(move)))
            elif rank == int(move.target):
                coming.append(self._expect(move))
        self._step()  # stage 1 travels meanwhile
        for arrival in coming:
            self._take_verified(arrival)
        for target, granted in leaving:
            self._send_rest(target, granted)
        if coming:
            self._land(coming)
        else:
            self._step()
        self.ranks.flush()

    def _send_verified(self, move: Move) -> list[str]:
        """As the source: offer samples, and start to send those that are granted. Returns their ids."""
        target = int(move.target)
        offer = self.mover.offer(move.ids)
        self.ranks.send(target, offer)
        grants: list[RowReservation] = self.ranks.receive(target)
        self.ranks.send(target, self.mover.begin(grants))
        return [grant.id for grant in grants if not grant.refused]

    def _send_rest(self, target: int, granted: Sequence[str]) -> None:
        """As the source: send stage 2 of samples that have not ended meanwhile, which leave this rank."""
        first, rest = self.mover.finish(granted)
        gone = {columns.id for columns in first.samples}
        self.runs = [run for run in self.runs if run.request.id not in gone]
        self.ranks.send(target, first)
        self.ranks.send(target, rest)

    def _expect(self, move: Move) -> Arrival:
        """As the target: reserve room, and start to receive."""
        source = int(move.source)
        grants = self.mover.grant(self.ranks.receive(source))
        self.ranks.send(source, grants)
        granted = [grant.id for grant in grants if not grant.refused]
        refused = next((grant.refused for grant in grants if grant.refused), "")
        record = MoveRecord(move.source, move.target, [], "kv", 0, refused=refused)
        return Arrival(source, self.ranks.expect(source), granted, record)

    def _take_verified(self, arrival: Arrival) -> None:
        began = time.perf_counter()
        self.mover.take(arrival.first.wait())
        self._count(arrival, arrival.first, began)

    def _land(self, coming: Sequence[Arrival]) -> None:
        """Take what arrives in stage 2 into the second round."""
        messages = []
        rests = []
        for arrival in coming:
            message = self._receive_rest(arrival)
            contexts = {one.id: one.context for one in self.reports[arrival.source].load.running}
            for columns in message.samples:
                arrival.record.ids.append(columns.id)
                arrival.record.tokens += contexts.get(columns.id, 0)
            messages.append((arrival.granted, message))
            rests.append(partial(self._receive_rest, arrival))
        arrivals = Arrivals(self.mover, messages, rests)
        self.runs += [*arrivals.runs, *arrivals.queued]
        self._step(arrivals)
        arrivals.receive_rests()
        self._moved += [arrival.record for arrival in coming]

    def _receive_rest(self, arrival: Arrival) -> KVMessage:
        """Receive a message of stage 2."""
        began = time.perf_counter()
        rest = self.ranks.expect(arrival.source)
        message: KVMessage = rest.wait()
        self._count(arrival, rest, began)
        return message

    def _count(self, arrival: Arrival, part: Pending, began: float) -> None:
        arrival.record.bytes += part.bytes
        arrival.record.ms += (time.perf_counter() - began) * 1e3

    # ---- everything else --------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank's engine. Returns the results of all ranks. Raises EngineError."""
        error = ""
        result = None
        try:
            result = getattr(self.engine, name)(*arguments)
        except EngineError as failed:
            error = f"rank {self.ranks.rank}: {failed}"
        return self._checked(error, result)

    def _checked(self, error: str, result: Any = None) -> list[Any]:
        """Return the results of all ranks. Raises EngineError, the first rank's that failed."""
        answers = self.ranks.share((error, result))
        for failed, _ in answers:
            if failed:
                raise EngineError(failed)
        return [result for _, result in answers]

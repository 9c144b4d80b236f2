"""One rank's part of a fleet of embedded engines: it runs its requests, and exchanges samples with other ranks.

All ranks run the same calls in lock-step: some rounds, one small exchange of loads, the same plan on every rank, the
moves of the plan. No clock enters a plan, so a resumed run decodes in the same batches as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.groups import Groups
from megatron_rlspec.extensions.migration.embedded.move import (
    RowReservation,
    TransferEndpoint,
)
from megatron_rlspec.extensions.migration.embedded.regroup import regroup
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.extensions.migration.plans.record import How, Move, MoveRecord
from megatron_rlspec.extensions.migration.plans.tp_planner import TPPlanner
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.types import Load, Request, Sample, Sampling

Requests = list[tuple[Request, Sampling]]


class Tick(NamedTuple):
    """An order to run some rounds on all ranks.

    new      the requests that begin, for each rank
    aborted  ids of samples that end now
    dropped  ids of samples that no caller waits for
    cap      the most tokens of a response
    """

    new: list[Requests]
    aborted: list[str]
    dropped: list[str]
    rounds: int
    cap: int


class Report(NamedTuple):
    """What a rank tells all others after a tick.

    open   how many requests it has
    done   how many of its samples ended in the tick
    moved  moves in which it was the target
    error  why its engine failed; "" if it did not
    """

    load: Load
    open: int
    done: int
    moved: list[MoveRecord]
    error: str = ""


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
            loads = self._loads(order)[::now]  # one of each engine
            wanted, how = self.sizes.decide(loads, now, order.cap)
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

    def _step(self) -> None:
        try:
            self.engine.step()
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
        """Carry out the moves of a plan, and run one round. A rank takes part in one move at most."""
        rank = str(self.ranks.rank)
        for move in plan:
            if rank == move.source:
                self._leave(int(move.target), move.ids)
                return
            if rank == move.target:
                self._come(move)
                return
        self._step()

    def _leave(self, target: int, ids: Sequence[str]) -> None:
        """As the source: send what the target grants. Samples that end in the round between the stages stay."""
        ranks = self.ranks
        ranks.send(target, self.mover.offer(ids))
        grants: list[RowReservation] = ranks.receive(target)
        ranks.send(target, self.mover.begin(grants))
        self._step()  # stage 1 travels meanwhile
        rest = self.mover.finish()
        gone = {columns.id for columns in rest.samples}
        self.runs = [run for run in self.runs if run.request.id not in gone]
        ranks.send(target, rest)
        ranks.flush()

    def _come(self, move: Move) -> None:
        """As the target: reserve room, and take what comes."""
        ranks = self.ranks
        source = int(move.source)
        ranks.send(source, self.mover.grant(ranks.receive(source)))
        first = ranks.expect(source)
        self._step()
        began = time.perf_counter()
        self.mover.take(first.wait())
        rest = ranks.expect(source)
        arrived = self.mover.land(rest.wait())
        ranks.flush()
        self.runs += arrived
        record = MoveRecord(
            source=move.source,
            target=move.target,
            ids=[run.request.id for run in arrived],
            how="kv",
            tokens=sum(len(run.tokens) for run in arrived),
            bytes=first.bytes + rest.bytes,
            ms=(time.perf_counter() - began) * 1e3,
        )
        self._moved.append(record)

    # ---- everything else --------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank's engine. Returns the results of all ranks. Raises EngineError."""
        error = ""
        result = None
        try:
            result = getattr(self.engine, name)(*arguments)
        except EngineError as failed:
            error = f"rank {self.ranks.rank}: {failed}"
        answers = self.ranks.share((error, result))
        for error, _ in answers:
            if error:
                raise EngineError(error)
        return [result for _, result in answers]

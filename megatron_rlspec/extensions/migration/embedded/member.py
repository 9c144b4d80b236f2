"""One rank's part of a fleet of embedded engines: it runs its requests, and exchanges samples with other ranks.

All ranks run the same calls in lock-step. Rank 0 decides on them (`fleet.py`). One tick is, in this order: a change of
the tensor-parallel size if that pays, the requests that go or come, the same plan of moves on every rank, the moves,
some rounds, one exchange of reports, and the ended samples of all ranks to rank 0.

What a rank decides by itself follows from the loads that all ranks exchanged, and from no clock. So all ranks decide
alike, and a resumed run decodes in the same batches as an uninterrupted one.
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

    new      the requests that begin, by rank; `Fleet` has checked them
    aborted  ids of samples to end now, with what they have
    dropped  ids of samples that no caller waits for; they end without a sample
    rounds   to run, beside the one round that a plan of moves takes; fewer on a rank that has no request left
    cap      the most tokens of a response, over all open requests
    """

    new: list[Requests]
    aborted: list[str]
    dropped: list[str]
    rounds: int
    cap: int


class Report(NamedTuple):
    """What a rank tells all others after a tick.

    load   its engine's, at the end of the tick
    open   how many requests it has
    done   how many samples it sends to rank 0 for this tick
    moved  moves in which it was the target
    error  why its engine failed; "" if it did not
    """

    load: Load
    open: int
    done: int
    moved: list[MoveRecord]
    error: str = ""


class Member:
    """One rank of the fleet. On rank 0 `Fleet` calls `tick` and `call`, on the others `Follower`, with equal arguments.

    rebalancer  plans the moves; None: samples stay where they were dealt
    tp_planner  decides on the tensor-parallel size of a rollout's end; None: it stays 1
    groups      of the ranks, made for all sizes in question; needed with `tp_planner`
    reports     by rank, of the last tick; [] before the first
    runs        the requests of this rank's engine, running or waiting; within a tick also those that it has ended
    """

    def __init__(
        self,
        engine: MigratableEmbeddedEngine,
        ranks: Ranks,
        rebalancer: Rebalancer | None,
        tp_planner: TPPlanner | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.engine = engine
        self.ranks = ranks
        self.rebalancer = rebalancer
        self.tp_planner = tp_planner
        self.groups = groups
        # records of changes of the size, for `moves.jsonl`; `Fleet` takes them on rank 0
        self.changes: list[dict[str, Any]] = []
        self.endpoint = TransferEndpoint(engine)
        self.reports: list[Report] = []
        self.runs: list[ActiveRequest] = []
        self._error = ""  # of this tick; "" if no round failed
        self._moved: list[MoveRecord] = []  # in this tick

    # ---- a tick -----------------------------------------------------------------------------------------------------

    def tick(self, order: Tick) -> list[Sample]:
        """Run one tick. Collective. On rank 0 returns the samples of all ranks that have ended, elsewhere none.

        A round that fails does not raise: its error is in `reports`, and all ranks get to the end of the tick.
        """
        self._error = ""
        engine = self.engine
        self._resize(order)  # first: it decides which ranks get the new requests
        # Before `submit`: a request that was dropped may come again under its id.
        dropped = {run.request.id for run in engine.drop(order.dropped)}
        self.runs = [run for run in self.runs if run.request.id not in dropped]
        new: Requests = []
        for rank in self._group:  # ranks that are one engine have one set of requests
            new += order.new[rank]
        self.runs += engine.submit(new)
        engine.abort(order.aborted)  # after `submit`: some of these ids may be of new requests
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
        """Return the ranks that run the same requests as this one. The first of them sends their samples to rank 0."""
        size = self.engine.model.comm.size
        first = self.ranks.rank // size * size
        return range(first, first + size)

    def _resize(self, order: Tick) -> None:
        """Change the tensor-parallel size before this tick's rounds, if that pays. A new rollout begins at 1.

        All ranks decide alike from `reports` and `order`, because `regroup` is collective.
        """
        if self.tp_planner is None or self.groups is None:
            return
        now = self.engine.model.comm.size
        wanted = 1
        how: How = "kv"
        # Every rank of an engine reports the same requests: [::now] is one report of each engine.
        open_requests = sum(report.open for report in self.reports[::now])
        if open_requests:
            loads = self._loads(order)[::now]
            wanted, how = self.tp_planner.decide(loads, now, order.cap)
        if wanted == now:
            return
        began = time.perf_counter()
        self.runs = regroup(self.engine, self.ranks, self.groups, wanted, how)
        ms = (time.perf_counter() - began) * 1e3
        record = {"from": now, "to": wanted, "samples": open_requests, "how": how, "ms": ms}
        self.changes.append(record)

    def _loads(self, order: Tick) -> list[Load]:
        """Return every rank's load at the end of the last tick, with the requests that begin in this one."""
        loads = []
        for report, new in zip(self.reports, order.new, strict=True):
            waiting = report.load.waiting + len(new)
            loads.append(replace(report.load, waiting=waiting))
        return loads

    def _step(self) -> None:
        """Run one round. Does not raise: the error of an engine that fails is kept for `_report`."""
        try:
            self.engine.step()
        except RuntimeError as error:
            # EngineError, and torch's own errors. The other ranks go on, so this one must, too.
            self._error = f"rank {self.ranks.rank}: {error}".splitlines()[0]

    def _report(self) -> list[Sample]:
        """End a tick: exchange reports, and bring the samples that have ended to rank 0. Returns as `tick`."""
        ended = [run.sample for run in self.runs if run.sample is not None]
        self.runs = [run for run in self.runs if run.sample is None]
        # All ranks of a group have the same samples; rank 0 must get each once.
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
            if rank and other.done:  # the others send nothing
                done += self.ranks.receive(rank)
        return done

    def _plan(self, order: Tick) -> list[Move]:
        """Return the moves before this tick's rounds: the same on every rank."""
        if self.rebalancer is None or not self.reports:
            return []
        # The loads are of the last tick: they still count the samples that this tick ends or drops. A move is from one
        # rank to another; an engine of several ranks cannot take part.
        if order.aborted or order.dropped or len(self._group) > 1:
            return []
        # After an error `Fleet` ends the calls that wait, and their requests.
        for report in self.reports:
            if report.error:
                return []
        return self.rebalancer.plan(self._loads(order))

    # ---- moves ------------------------------------------------------------------------------------------------------

    def _move(self, plan: Sequence[Move]) -> None:
        """Carry out the moves of a plan, and run one round on every rank. A rank takes part in one move at most."""
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
        """As the source: send what the target grants. Samples that end in the round between the stages stay.

        The messages are, in this order: offer, grants (back), stage 1, stage 2. `_come` is the other side.
        """
        ranks = self.ranks
        ranks.send(target, self.endpoint.offer(ids))
        grants: list[RowReservation] = ranks.receive(target)
        ranks.send(target, self.endpoint.begin(grants))
        self._step()  # stage 1 travels meanwhile
        stage2 = self.endpoint.finish()
        gone = {columns.id for columns in stage2.samples}
        self.runs = [run for run in self.runs if run.request.id not in gone]
        ranks.send(target, stage2)
        ranks.flush()

    def _come(self, move: Move) -> None:
        """As the target: reserve room, and take what comes. The messages are those of `_leave`."""
        ranks = self.ranks
        source = int(move.source)
        ranks.send(source, self.endpoint.grant(ranks.receive(source)))
        stage1 = ranks.expect(source)
        self._step()  # stage 1 arrives meanwhile
        began = time.perf_counter()
        self.endpoint.take(stage1.wait())
        stage2 = ranks.expect(source)
        arrived = self.endpoint.land(stage2.wait())
        ranks.flush()
        self.runs += arrived
        record = MoveRecord(
            source=move.source,
            target=move.target,
            ids=[run.request.id for run in arrived],
            how="kv",
            tokens=sum(len(run.tokens) for run in arrived),
            bytes=stage1.n_bytes + stage2.n_bytes,
            ms=(time.perf_counter() - began) * 1e3,
        )
        self._moved.append(record)

    # ---- everything else --------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method `name` of every rank's engine. Collective. Returns the results of all ranks, in their order.

        Raises EngineError on every rank if it failed on any, with the error of the first such rank.
        """
        error = ""
        result = None
        try:
            result = getattr(self.engine, name)(*arguments)
        except EngineError as failed:
            error = f"rank {self.ranks.rank}: {failed}"
        # Also after an error: the other ranks wait in this exchange.
        answers = self.ranks.share((error, result))
        for error, _ in answers:
            if error:
                raise EngineError(error)
        return [result for _, result in answers]

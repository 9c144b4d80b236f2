"""One rank's part of a fleet of embedded engines: it draws its requests, and exchanges samples with other ranks.

All ranks run the same calls in lock-step: some rounds, one small exchange of loads, the same plan on every rank, the
moves of the plan. No clock enters a plan, so a resumed run draws in the same batches as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch

from megatron_rlspec import wire
from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.move import (
    Arrivals,
    KVMessage,
    Offer,
    RowReservation,
    TransferEndpoint,
)
from megatron_rlspec.extensions.migration.embedded.regroup import regroup
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import How, Rebalancer
from megatron_rlspec.extensions.migration.plans.record import MoveRecord
from megatron_rlspec.extensions.migration.plans.tp_planner import TPPlanner
from megatron_rlspec.host.ranks import Pending, Ranks
from megatron_rlspec.push.bucket import Named, buckets
from megatron_rlspec.rollout.embedded.parallel import Groups
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.types import Load, Move, Request, Sample, Sampling, Scope, SpecSchedule

BUCKET = 64 << 20  # bytes of weights in one message
Drawn = list[tuple[Request, Sampling]]


class Tick(msgspec.Struct, frozen=True):
    """Some rounds on all ranks. new: requests of each rank; cap: tokens of a response; aborted, dropped: ids."""

    new: list[Drawn]
    aborted: list[str]
    dropped: list[str]
    rounds: int
    cap: int


class Order(msgspec.Struct, frozen=True):
    """What rank 0 has all ranks do: a tick, a push (version, scope), or a method of the engine with its argument."""

    tick: Tick | None = None
    push: tuple[int, Scope] | None = None
    call: str = ""
    argument: Any = None
    close: bool = False


class Report(msgspec.Struct, frozen=True):
    """What a rank tells all others after a tick. ended: (tokens, whether cut) of its samples; open: its requests."""

    load: Load
    ended: list[tuple[int, bool]]
    open: int
    done: int
    moved: list[MoveRecord]
    error: str = ""


@dataclass
class Arrival:
    """A move with this rank as its target, while it lasts."""

    move: Move
    granted: list[str] = field(default_factory=list)
    first: Pending | None = None  # stage 1
    bytes: int = 0
    ms: float = 0.0
    refused: str = ""


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
        self.changes: list[dict[str, Any]] = []  # of the size
        self.mover = TransferEndpoint(engine)
        self.lengths = Lengths()  # of this rollout
        self.reports: list[Report] = []
        self.runs: list[ActiveRequest] = []
        self.seconds = 0.0  # of making plans
        self._error = ""
        # moved samples: tokens at the move, steps without a new one
        self._missed: dict[str, tuple[int, int]] = {}
        self._moved: list[MoveRecord] = []

    # ---- a tick -----------------------------------------------------------------------------------------------------

    def tick(self, order: Tick) -> list[Sample]:
        """Run one tick. Returns the samples of all ranks that have ended on rank 0, none elsewhere."""
        self._error = ""
        engine = self.engine
        self._resize(order)
        dropped = {run.request.id for run in engine.drop(order.dropped)}
        self.runs = [run for run in self.runs if run.request.id not in dropped]
        self.runs += engine.submit([new for rank in self._group for new in order.new[rank]])
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
        """Return the ranks that draw the same requests as this one. The first of them speaks for all."""
        size = self.engine.model.comm.size
        first = self.ranks.rank // size * size
        return range(first, first + size)

    def _resize(self, order: Tick) -> None:
        """Change the tensor-parallel size before this tick's rounds, if that pays. A new rollout begins at 1."""
        if self.sizes is None or self.groups is None:
            return
        now = self.engine.model.comm.size
        began = time.perf_counter()
        wanted = 1
        how: How = "kv"
        held = sum(report.open for report in self.reports[::now])
        if held:
            change = self.sizes.decide(self._loads(order)[::now], now, self.lengths, order.cap)
            wanted = now if change is None else change.tp
            how = "kv" if change is None else change.how
        self.seconds += time.perf_counter() - began
        if wanted != now:
            began = time.perf_counter()
            self.runs = regroup(self.engine, self.ranks, self.groups, wanted, how)
            took = (time.perf_counter() - began) * 1e3
            self.changes.append(
                {"from": now, "to": wanted, "samples": held, "how": how, "ms": took}
            )

    def _loads(self, order: Tick) -> list[Load]:
        """Return every rank's load, with the requests of this tick."""
        loads = []
        for report, new in zip(self.reports, order.new, strict=True):
            loads.append(replace(report.load, waiting=report.load.waiting + len(new)))
        return loads

    def _step(self, landing: Arrivals | None = None) -> None:
        try:
            self.engine.step(landing)
        except RuntimeError as error:  # torch's own, too: every error must reach rank 0
            self._error = f"rank {self.ranks.rank}: {error}".splitlines()[0]
        for id, (length, missed) in list(self._missed.items()):
            run = next(
                (run for run in self.runs if run.request.id == id and run.sample is None), None
            )
            if run is not None and len(run.response) == length:
                self._missed[id] = length, missed + 1

    def _report(self) -> list[Sample]:
        done = [
            run.sample
            for run in self.runs
            if run.sample is not None and self.ranks.rank == self._group[0]
        ]
        self.runs = [run for run in self.runs if run.sample is None]
        moved = self._settled()
        ended = [(len(sample.response), sample.status != "finished") for sample in done]
        load = self.engine.load(str(self.ranks.rank))
        report = Report(load, ended, len(self.runs), len(done), moved, self._error)
        self.reports = [wire.decode(data, Report) for data in self.ranks.share(wire.encode(report))]
        if self.ranks.rank:
            if done:
                self.ranks.send(0, wire.encode(done))
                self.ranks.flush()
            return []
        for other, told_by_it in enumerate(self.reports):
            if other and told_by_it.done:
                done += wire.decode(self.ranks.receive(other).numpy().data, list[Sample])
        return done

    def _settled(self) -> list[MoveRecord]:
        """Return the records of moves whose samples have all drawn a token since, or ended."""
        still = {
            run.request.id
            for run in self.runs
            if self._missed.get(run.request.id, (-1,))[0] == len(run.response)
        }
        found = [record for record in self._moved if not still & set(record.ids)]
        self._moved = [record for record in self._moved if still & set(record.ids)]
        told = []
        for record in found:
            missed = max([self._missed.pop(id, (0, 0))[1] for id in record.ids], default=0)
            told.append(replace(record, rounds=float(missed)))
        return told

    def _plan(self, order: Tick) -> list[Move]:
        """Return the moves before this tick's rounds: the same on every rank."""
        reports = self.reports
        if not any(report.open for report in reports):
            # a new rollout; nothing of the one before, which a resumed run has not seen
            self.lengths = Lengths()
            return []
        for report in reports:
            self.lengths.observe(
                [length for length, _ in report.ended], [cut for _, cut in report.ended]
            )
        if self.rebalancer is None or order.aborted or order.dropped:
            return []
        if any(report.error for report in reports):
            return []
        if len(self._group) > 1:
            return []
        began = time.perf_counter()
        plan = self.rebalancer.plan(self._loads(order), self.lengths, order.cap)
        self.seconds += time.perf_counter() - began
        return plan

    # ---- moves ------------------------------------------------------------------------------------------------------

    def _move(self, plan: Sequence[Move]) -> None:
        """Carry out the moves of a plan, in two rounds. Every rank passes every message in the order of the plan."""
        rank = self.ranks.rank
        leaving: list[tuple[int, list[str]]] = []
        coming: list[Arrival] = []
        for move in plan:
            if rank == int(move.source):
                self._let_go(move, leaving)
            elif rank == int(move.target):
                self._expect(Arrival(move), coming)
        self._step()  # stage 1 travels meanwhile
        for arrival in coming:
            assert arrival.first is not None
            began = time.perf_counter()
            data = arrival.first.wait()
            self.mover.take(KVMessage.unpack(data))
            self._note(arrival, len(data), began)
        for target, granted in leaving:
            first, rest = self.mover.finish(granted)
            gone = {columns.id for columns in first.header.samples}
            self.runs = [run for run in self.runs if run.request.id not in gone]
            self.ranks.send(target, first.pack())
            self.ranks.send(target, rest.pack())
        if coming:
            self._land(coming)
        else:
            self._step()
        self.ranks.flush()

    def _let_go(self, move: Move, leaving: list[tuple[int, list[str]]]) -> None:
        """As the source: offer samples, and start to send those that are granted; or send them without their caches."""
        target = int(move.target)
        if move.how == "recompute":
            gone = self.mover.detach(move.ids)
            self.ranks.send(target, wire.encode(gone))
            ids = {request.id for request, _ in gone}
            self.runs = [run for run in self.runs if run.request.id not in ids]
            return
        self.ranks.send(target, wire.encode(self.mover.offer(move.ids)))
        grants = wire.decode(self.ranks.receive(target).numpy().data, list[RowReservation])
        self.ranks.send(target, self.mover.begin(grants).pack())
        leaving.append((target, [grant.id for grant in grants if not grant.refused]))

    def _expect(self, arrival: Arrival, coming: list[Arrival]) -> None:
        """As the target: reserve room, and start to receive; or queue what comes without caches."""
        source = int(arrival.move.source)
        data = self.ranks.receive(source)
        began = time.perf_counter()
        if arrival.move.how == "recompute":
            runs = self.engine.submit(wire.decode(data.numpy().data, Drawn))
            self.runs += runs
            self._missed |= {run.request.id: (len(run.response), 0) for run in runs}
            self._note(arrival, len(data), began)
            self._record(arrival, [run.request.id for run in runs])
            return
        grants = self.mover.grant(wire.decode(data.numpy().data, Offer))
        self.ranks.send(source, wire.encode(grants))
        arrival.granted = [grant.id for grant in grants if not grant.refused]
        arrival.refused = next((grant.refused for grant in grants if grant.refused), "")
        arrival.first = self.ranks.expect(source)
        self._note(arrival, len(data), began)
        coming.append(arrival)

    def _land(self, coming: Sequence[Arrival]) -> None:
        """Take what arrives in stage 2 into the second round."""
        messages = [(arrival.granted, self._rest(arrival)) for arrival in coming]
        arrivals = Arrivals(
            self.mover, messages, [partial(self._rest, arrival) for arrival in coming]
        )
        here = [*arrivals.runs, *arrivals.queued]
        self._missed |= {run.request.id: (len(run.response), 0) for run in here}
        self.runs += here
        self._step(arrivals)
        arrivals.close()
        for arrival, (_, message) in zip(coming, messages, strict=True):
            self._record(arrival, [columns.id for columns in message.header.samples])

    def _rest(self, arrival: Arrival) -> KVMessage:
        """Receive a message of stage 2."""
        began = time.perf_counter()
        data = self.ranks.receive(int(arrival.move.source))
        self._note(arrival, len(data), began)
        return KVMessage.unpack(data)

    def _note(self, arrival: Arrival, size: int, began: float) -> None:
        arrival.bytes += size
        arrival.ms += (time.perf_counter() - began) * 1e3

    def _record(self, arrival: Arrival, ids: Sequence[str]) -> None:
        """Keep the record of a move, of which `ids` have arrived."""
        move = arrival.move
        held = {held.id: held.context for report in self.reports for held in report.load.running}
        there, here = (
            len(self.reports[int(name)].load.running) for name in (move.source, move.target)
        )
        why = f"{there} samples there, {here} here"
        tokens = sum(held.get(id, 0) for id in ids)
        moved = MoveRecord(
            move.source, move.target, list(ids), move.how, why, tokens, arrival.bytes, arrival.ms
        )
        self._moved.append(replace(moved, refused=arrival.refused))

    # ---- everything else --------------------------------------------------------------------------------------------

    def call(self, name: str, argument: Any) -> list[bytes]:
        """Call a method of every rank's engine. Returns the encoded results of all ranks. Raises EngineError."""
        error, result = "", b""
        try:
            if name == "set_schedule":
                argument = SpecSchedule.from_json(argument)
            elif name == "set_draft_vocabulary":
                argument = torch.tensor(argument).numpy()
            method = getattr(self.engine, name)
            result = wire.encode(method() if argument is None else method(argument))
        except EngineError as failed:
            error = f"rank {self.ranks.rank}: {failed}"
        return self._checked(self.ranks.share(wire.encode((error, result))))

    def update(self, version: int, scope: Scope, tensors: Iterable[Named]) -> None:
        """Update every rank's engine with rank 0's tensors. Raises EngineError on all ranks if one engine fails."""
        error = ""
        stream = self._sent(tensors) if self.ranks.rank == 0 else self._received()
        try:
            self.engine.update_weights(version, stream, scope)
        except EngineError as failed:
            error = f"rank {self.ranks.rank}: {failed}"
        finally:  # also after an error of the exporter: the other ranks wait for the end of the stream
            if self.ranks.rank == 0:
                stream.close()
            with suppress(EngineError):
                deque(stream, maxlen=0)
            answers = self.ranks.share(wire.encode((error, b"")))
        self._checked(answers)

    def _checked(self, answers: Sequence[bytes]) -> list[bytes]:
        """Return the results of all ranks. Raises EngineError, the first rank's that failed."""
        decoded = [wire.decode(data, tuple[str, bytes]) for data in answers]
        for failed, _ in decoded:
            if failed:
                raise EngineError(failed)
        return [found for _, found in decoded]

    def _sent(self, tensors: Iterable[Named]) -> Generator[Named, None, None]:
        """Yield rank 0's tensors after every rank has them."""
        whole = False
        try:
            for lot in buckets(tensors, BUCKET):
                heads = [
                    (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
                    for name, tensor in lot
                ]
                self.ranks.tell(wire.encode(heads))
                flat = [
                    tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    for _, tensor in lot
                ]
                self.ranks.tell(torch.cat(flat).numpy().tobytes())
                yield from lot
            whole = True
        finally:
            self.ranks.tell(wire.encode([("", "whole" if whole else "cut", [])]))

    def _received(self) -> Generator[Named, None, None]:
        """Yield the tensors of `_sent`. Raises EngineError if rank 0 sent a part of them only."""
        while True:
            heads = wire.decode(self.ranks.tell(), list[tuple[str, str, list[int]]])
            if not heads[0][0]:
                if heads[0][1] == "cut":
                    raise EngineError("the update ended early on rank 0")
                return
            data = torch.frombuffer(bytearray(self.ranks.tell()), dtype=torch.uint8)
            for name, dtype, shape in heads:
                kind = getattr(torch, dtype)
                size = kind.itemsize * torch.Size(shape).numel()
                yield name, data[:size].view(kind).view(shape)
                data = data[size:]

"""Move running samples to another embedded engine with their KV caches, in two stages (RLHFSpec, section 6.2).

    source                                   target
    offer  ── what would come ─────────────► grant: a row and slots are reserved, or a reason why not
    begin  ── keys of verified columns ────► take                      the source goes on: such columns never change
    finish ── the drafter's rest, header ──► arrive: the newcomer drafts
           ── the target's rest ───────────► land: it is verified, in the same round

Every step is a method of `TransferEndpoint`; bytes travel elsewhere. A sample that is refused never left. One that left
and finds no room any more waits at the target, which computes it anew. Both engines have one model and one version of
its weights, since ranks of a job move in lock-step.

The data of one message is one contiguous buffer, ordered by model (drafter, its hidden rows, target), layer and sample.
Column c of the drafter's cache holds the pair (h of column c - 1, token of column c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from megatron_rlspec import wire
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.types import Partial, Request, Sampling

FRONT = 16  # bytes before a header: its length
# columns that are reserved beyond a sample's present length; a round commits fewer tokens
ROOM = 64
Range = tuple[int, int]  # columns [first, last)
# what a source would send: id, the prompt's tokens [P], and length
Offer = list[tuple[str, np.ndarray, int]]


class RowReservation(msgspec.Struct, frozen=True):
    """The answer for one sample. Columns below `target` and `drafter` are there; `refused`: why it may not come."""

    id: str
    target: int = 0
    drafter: int = 1
    refused: str = ""


class Columns(msgspec.Struct, frozen=True):
    """What a message holds of one sample."""

    id: str
    drafter: Range = (0, 0)
    hidden: Range = (0, 0)
    target: Range = (0, 0)


class Header(msgspec.Struct, frozen=True):
    """Describes a message. `requests`, each with its sampling: the samples themselves, in the drafter's rest only."""

    dtype: str
    samples: list[Columns]
    requests: list[tuple[Request, Sampling]] = []


class KVMessage(NamedTuple):
    """One message: a header, and one contiguous buffer."""

    header: Header
    data: torch.Tensor  # [elements] of the model's dtype

    def pack(self) -> torch.Tensor:
        """Return the message as bytes: the header's length, the header, the buffer."""
        header = wire.encode(self.header)
        padded = bytearray(header + bytes(-len(header) % FRONT))  # so that the buffer is aligned
        front = bytearray(len(header).to_bytes(FRONT, "little"))
        buffer = self.data.detach().cpu().contiguous().view(torch.uint8).view(-1)
        return torch.cat([torch.frombuffer(front + padded, dtype=torch.uint8), buffer])

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> KVMessage:
        """Return the message of `pack`."""
        size = int.from_bytes(bytes(packed[:FRONT].tolist()), "little")
        body = packed[FRONT:]
        header = wire.decode(body[:size].numpy().data, Header)
        return cls(header, body[size + -size % FRONT :].view(getattr(torch, header.dtype)))


class Departure(NamedTuple):
    """A sample that has been begun to move. Columns below `target` and `drafter` have been sent."""

    run: ActiveRequest
    seat: int
    target: int
    drafter: int


class TransferEndpoint:
    """One engine's side of moves, as source and as target. Engine and endpoint are called by one thread at a time."""

    def __init__(self, engine: MigratableEmbeddedEngine) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.drafts = engine.model.arch.draft_layers > 0
        self.departing: dict[str, Departure] = {}

    # ---- source -----------------------------------------------------------------------------------------------------

    def offer(self, ids: Sequence[str]) -> Offer:
        """Describe those of these samples that run here and have been prefilled."""
        runs = [run for run in self.engine.running if run.request.id in ids and self._ready(run)]
        return [
            (r.request.id, np.asarray(r.request.prompt.tokens), int(self.cache.length[r.row]))
            for r in runs
        ]

    def begin(self, grants: Sequence[RowReservation]) -> KVMessage:
        """Start to move the samples that were granted, which go on here. Returns stage 1: their verified columns."""
        here = {run.request.id: run for run in self.engine.running}
        parts = []
        for grant in grants:
            run = here.get(grant.id)
            if grant.refused or run is None or not self._ready(run):
                continue
            length, drafted, prefix = self._extent(run)
            # what another sample of the prompt brings may come later
            sent = min(max(grant.drafter, 1), drafted)
            last = (prefix - 1, prefix) if grant.target < prefix and self.drafts else (0, 0)
            columns = Columns(grant.id, (sent, drafted), last, (grant.target, length - 1))
            parts.append((run, columns))
            self.departing[grant.id] = Departure(run, run.seats, length - 1, drafted)
        return self._message(parts)

    def finish(self, ids: Sequence[str]) -> tuple[KVMessage, KVMessage]:
        """End the moves of `ids` that were begun. Returns stage 2: the drafter's rest, and the target's rest.

        The samples are in the first, and leave this engine. Those that ended since, or went back into the queue, are
        missing.
        """
        begun = [self.departing.pop(id) for id in ids if id in self.departing]
        leaving = [departure for departure in begun if self._stays(departure)]
        drafter: list[tuple[ActiveRequest, Columns]] = []
        target: list[tuple[ActiveRequest, Columns]] = []
        for run, _, verified, sent in leaving:
            length, drafted, _ = self._extent(run)
            hidden = (drafted - 1, length - 1) if self.drafts else (0, 0)
            drafter.append((run, Columns(run.request.id, (sent, drafted), hidden)))
            target.append((run, Columns(run.request.id, target=(verified, length - 1))))
        requests = [(self._request(run), run.sampling) for run, _ in drafter]
        messages = self._message(drafter, requests), self._message(target)
        for run, _ in drafter:
            self.engine.scheduler.remove(run)
        return messages

    def detach(self, ids: Sequence[str]) -> list[tuple[Request, Sampling]]:
        """Take samples out, to be computed anew elsewhere."""
        return [(self._request(run), run.sampling) for run in self.engine.drop(ids)]

    # ---- target -----------------------------------------------------------------------------------------------------

    def grant(self, offer: Offer) -> list[RowReservation]:
        """Reserve a row and slots for each offered sample, or say why not."""
        coming: set[bytes] = set()
        return [self._reserve(id, prompt, length, coming) for id, prompt, length in offer]

    def take(self, message: KVMessage) -> None:
        """Write stage 1."""
        self._write(message)
        for columns in message.header.samples:
            row = self.engine.reserved.get(columns.id)
            if row is not None:
                prefix = self.cache.prefix[row]
                size = len(prefix.tokens)
                if columns.target[0] < size:
                    prefix.computed = size
                prefix.drafted = max(prefix.drafted, min(columns.drafter[1], size))

    def arrive(self, message: KVMessage) -> tuple[list[ActiveRequest], list[ActiveRequest]]:
        """Write the drafter's rest. Returns the samples that may draft now, and those without room, which wait here."""
        engine = self.engine
        cache = self.cache
        runs = []
        queued = []
        for (request, sampling), columns in zip(
            message.header.requests, message.header.samples, strict=True
        ):
            row = engine.reserved.get(request.id)
            [run] = engine.scheduler.made([(request, sampling)])
            tokens = np.concatenate([np.asarray(request.prompt.tokens), run.response])
            if row is None or not cache.back(row, len(tokens)):
                queued.append(run)
                continue
            prefix = cache.prefix[row]
            cache.tokens[row, : len(tokens)] = tokens
            cache.length[row] = len(tokens)
            cache.drafted[row] = max(columns.drafter[1], len(prefix.tokens), 1)
            prefix.drafted = max(prefix.drafted, min(columns.drafter[1], len(prefix.tokens)))
            engine.rounds.seat(row, sampling, request.seed, run.draws)
            run.row = row
            run.seats = 1
            runs.append(run)
        self._write(message, {run.request.id for run in runs})
        engine.waiting.extend(queued)
        return runs, queued

    def land(self, message: KVMessage, runs: Sequence[ActiveRequest]) -> None:
        """Write the target's rest for the samples of `arrive`, which run here from now on."""
        self._write(message, {run.request.id for run in runs})
        for run in runs:
            self.cache.computed[run.row] = self.cache.length[run.row] - 1
            del self.engine.reserved[run.request.id]

    def withdraw(self, ids: Sequence[str]) -> None:
        """Give up the reservations of these ids, if there are any."""
        for id in ids:
            row = self.engine.reserved.pop(id, None)
            if row is not None:
                self.cache.close(row)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _ready(self, run: ActiveRequest) -> bool:
        return len(run.response) > 0 and not run.abort and self.engine.rounds.ready(run.row)

    def _stays(self, departure: Departure) -> bool:
        """Return whether the sample is still in the row whose columns were sent; an update takes it out."""
        run = departure.run
        return run.seats == departure.seat and not run.abort and run in self.engine.running

    def _extent(self, run: ActiveRequest) -> tuple[int, int, int]:
        """Return a sample's length, the end of the columns that hold the drafter's keys, and its prefix's length."""
        prefix = self.cache.prefix[run.row]
        size = len(prefix.tokens)
        drafted = prefix.drafted if prefix.drafted < size else int(self.cache.drafted[run.row])
        return int(self.cache.length[run.row]), drafted, size

    def _request(self, run: ActiveRequest) -> Request:
        if run.row >= 0:
            run.draws = int(self.engine.rounds.draws[run.row])
        return replace(
            run.request, partial=Partial.of(run.so_far("aborted")) if run.response else None
        )

    def _reserve(
        self, id: str, prompt: np.ndarray, length: int, coming: set[bytes]
    ) -> RowReservation:
        cache = self.cache
        row = cache.open(
            np.concatenate([prompt, np.zeros(length - len(prompt), np.int64)]), len(prompt)
        )
        if row is None:
            return RowReservation(id, refused="no row or no room for the prompt")
        if not cache.back(row, min(length + ROOM, cache.columns)):
            cache.close(row)
            return RowReservation(id, refused=f"no room for {length} tokens")
        prefix = cache.prefix[row]
        size = len(prefix.tokens)
        here = prefix.computed == size or prefix.key in coming
        drafted = prefix.drafted >= size or prefix.key in coming
        coming.add(prefix.key)
        self.engine.reserved[id] = row
        return RowReservation(id, size if here else 0, max(size, 1) if drafted else 1)

    def _pools(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every pool in the order of the buffer."""
        layers = self.cache.model.arch.layers
        yield from (("drafter", pool) for pool in self.cache.kv[layers:])
        yield "hidden", self.cache.hidden
        yield from (("target", pool) for pool in self.cache.kv[:layers])

    def _message(
        self,
        parts: Sequence[tuple[ActiveRequest, Columns]],
        requests: Sequence[tuple[Request, Sampling]] = (),
    ) -> KVMessage:
        """Copy the columns of all samples into one buffer."""
        slots = {}
        for kind in ("drafter", "hidden", "target"):
            found = [
                self.cache.slots[run.row, slice(*getattr(columns, kind))] for run, columns in parts
            ]
            slots[kind] = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *found]))
        sizes = [len(slots[kind]) * pool[0].numel() for kind, pool in self._pools()]
        data = torch.empty(sum(sizes), dtype=self.cache.model.dtype, device=self.cache.model.device)
        for (kind, pool), piece in zip(self._pools(), data.split(sizes), strict=True):
            torch.index_select(
                pool, 0, slots[kind].to(pool.device), out=piece.view(-1, *pool.shape[1:])
            )
        columns = [columns for _, columns in parts]
        return KVMessage(
            Header(str(data.dtype).removeprefix("torch."), columns, list(requests)), data
        )

    def _write(self, message: KVMessage, only: set[str] | None = None) -> None:
        """Copy a buffer into the slots of the reserved rows. What belongs to other ids is left out."""
        samples = message.header.samples
        rows = {c.id: self.engine.reserved[c.id] for c in samples if c.id in self.engine.reserved}
        slots = {}
        wanted = {}
        for kind in ("drafter", "hidden", "target"):
            ranges = [getattr(columns, kind) for columns in samples]
            here = [c.id in rows and (only is None or c.id in only) for c in samples]
            found = [
                self.cache.slots[rows[c.id], slice(*r)]
                for c, r, h in zip(samples, ranges, here, strict=True)
                if h
            ]
            slots[kind] = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *found]))
            wanted[kind] = torch.from_numpy(
                np.repeat(np.array(here, bool), [last - first for first, last in ranges])
            )
        sizes = [len(wanted[kind]) * pool[0].numel() for kind, pool in self._pools()]
        for (kind, pool), piece in zip(self._pools(), message.data.split(sizes), strict=True):
            columns = piece.view(-1, *pool.shape[1:])[wanted[kind]]
            pool.index_copy_(0, slots[kind].to(pool.device), columns.to(pool.device))


class Arrivals:
    """Samples that arrive during a step: a `Landing`.

    messages  the drafter's rests, each with the ids that were granted; some may have stayed at their source
    rests     wait for the target's rest of each message, in order
    queued    samples that came, and wait here without room
    """

    def __init__(
        self,
        mover: TransferEndpoint,
        messages: Sequence[tuple[Sequence[str], KVMessage]],
        rests: Sequence[Callable[[], KVMessage]],
    ) -> None:
        self.mover = mover
        self.landed: list[ActiveRequest] = []
        self.queued: list[ActiveRequest] = []
        self._rests = list(rests)
        self._groups: list[list[ActiveRequest]] = []
        for granted, message in messages:
            arrived, queued = mover.arrive(message)
            self.queued += queued
            self._groups.append(arrived)
            here = {run.request.id for run in arrived}
            mover.withdraw([id for id in granted if id not in here])
        self.runs = [run for group in self._groups for run in group]

    def land(self) -> list[ActiveRequest]:
        while self._rests:
            group = self._groups[-len(self._rests)]
            self.mover.land(self._rests.pop(0)(), group)
            self.landed += group
        return self.landed

    def close(self) -> None:
        """Receive what still travels, because the step did not come so far."""
        while self._rests:
            self._rests.pop(0)()

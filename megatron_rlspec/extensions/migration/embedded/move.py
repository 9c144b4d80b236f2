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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.types import Request, Sampling

# columns that are reserved beyond a sample's present length; a round commits fewer tokens
ROOM = 64
Range = tuple[int, int]  # columns [first, last)
KINDS = ("drafter", "hidden", "target")  # of data in a message, as the fields of `Columns`
# what a source would send: id, the prompt's tokens [P], and length
Offer = list[tuple[str, np.ndarray, int]]


class RowReservation(NamedTuple):
    """The answer for one sample. Columns below `target` and `drafter` are there; `refused`: why it may not come."""

    id: str
    target: int = 0
    drafter: int = 1
    refused: str = ""


class Columns(NamedTuple):
    """What a message holds of one sample."""

    id: str
    drafter: Range = (0, 0)
    hidden: Range = (0, 0)
    target: Range = (0, 0)


class KVMessage(NamedTuple):
    """One message.

    data      [elements] of the model's dtype, on the CPU
    requests  the samples themselves, each with its sampling, in the drafter's rest only
    """

    samples: list[Columns]
    data: Tensor
    requests: Sequence[tuple[Request, Sampling]]


class Departure(NamedTuple):
    """A sample that has been begun to move, and the columns of stage 1."""

    run: ActiveRequest
    seat: int
    sent: Columns


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
        offer: Offer = []
        for run in self.engine.running:
            if run.request.id in ids and self._ready(run):
                prompt = np.asarray(run.request.prompt.tokens)
                length = int(self.cache.length[run.row])
                offer.append((run.request.id, prompt, length))
        return offer

    def begin(self, grants: Sequence[RowReservation]) -> KVMessage:
        """Start to move the samples that were granted, which go on here. Returns stage 1: their verified columns."""
        here = {run.request.id: run for run in self.engine.running}
        parts = []
        for grant in grants:
            run = here.get(grant.id)
            if grant.refused or run is None or not self._ready(run):
                continue
            length, drafted, prefix = self._extent(run)
            hidden = (0, 0)
            if self.drafts and grant.target < prefix:
                hidden = (prefix - 1, prefix)
            # what another sample of the prompt brings may come later
            present = min(max(grant.drafter, 1), drafted)
            columns = Columns(
                id=grant.id,
                drafter=(present, drafted),
                hidden=hidden,
                target=(grant.target, length - 1),
            )
            parts.append((run, columns))
            self.departing[grant.id] = Departure(run, run.seats, columns)
        return self._message(parts)

    def finish(self, ids: Sequence[str]) -> tuple[KVMessage, KVMessage]:
        """End the moves of `ids` that were begun. Returns stage 2: the drafter's rest, and the target's rest.

        The samples are in the first, and leave this engine. Those that ended since, or went back into the queue, are
        missing.
        """
        drafter: list[tuple[ActiveRequest, Columns]] = []
        target: list[tuple[ActiveRequest, Columns]] = []
        for id in ids:
            departure = self.departing.pop(id, None)
            if departure is None or not self._in_its_row(departure):
                continue
            run = departure.run
            length, drafted, _ = self._extent(run)
            hidden = (drafted - 1, length - 1) if self.drafts else (0, 0)
            of_drafter = Columns(id, (departure.sent.drafter[1], drafted), hidden)
            of_target = Columns(id, target=(departure.sent.target[1], length - 1))
            drafter.append((run, of_drafter))
            target.append((run, of_target))
        for run, _ in drafter:
            run.draws = int(self.engine.rounds.draws[run.row])
        requests = [(run.continued(), run.sampling) for run, _ in drafter]
        first = self._message(drafter, requests)
        rest = self._message(target)
        for run, _ in drafter:
            self.engine.scheduler.remove(run)
        return first, rest

    # ---- target -----------------------------------------------------------------------------------------------------

    def grant(self, offer: Offer) -> list[RowReservation]:
        """Reserve a row and slots for each offered sample, or say why not."""
        coming: set[bytes] = set()
        grants = []
        for id, prompt, length in offer:
            grants.append(self._reserve(id, prompt, length, coming))
        return grants

    def take(self, message: KVMessage) -> None:
        """Write stage 1."""
        self._write(message)
        for columns in message.samples:
            row = self.engine.reserved.get(columns.id)
            if row is None:
                continue
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
        for (request, sampling), columns in zip(message.requests, message.samples, strict=True):
            [run] = engine.scheduler.made([(request, sampling)])
            tokens = run.tokens
            row = engine.reserved.get(request.id)
            if row is None or not cache.back(row, len(tokens)):
                queued.append(run)
                continue
            prefix = cache.prefix[row]
            size = len(prefix.tokens)
            cache.tokens[row, : len(tokens)] = tokens
            cache.length[row] = len(tokens)
            cache.drafted[row] = max(columns.drafter[1], size, 1)
            prefix.drafted = max(prefix.drafted, min(columns.drafter[1], size))
            engine.scheduler.seat(run, row)
            runs.append(run)
        self._write(message, {run.request.id for run in runs})
        engine.waiting.extend(queued)
        return runs, queued

    def land(self, message: KVMessage, runs: Sequence[ActiveRequest]) -> None:
        """Write the target's rest for the samples of `arrive`, which run here from now on."""
        self._write(message, {run.request.id for run in runs})
        for run in runs:
            length = self.cache.length[run.row]
            self.cache.computed[run.row] = length - 1
            del self.engine.reserved[run.request.id]

    def withdraw(self, ids: Sequence[str]) -> None:
        """Give up the reservations of these ids, if there are any."""
        for id in ids:
            row = self.engine.reserved.pop(id, None)
            if row is not None:
                self.cache.close(row)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _ready(self, run: ActiveRequest) -> bool:
        if run.abort or not run.response:
            return False
        return self.engine.rounds.ready(run.row)

    def _in_its_row(self, departure: Departure) -> bool:
        """Return whether the sample is still in the row whose columns were sent; an update takes it out."""
        run = departure.run
        if run.abort or run.seats != departure.seat:
            return False
        return run in self.engine.running

    def _extent(self, run: ActiveRequest) -> tuple[int, int, int]:
        """Return a sample's length, the end of the columns that hold the drafter's keys, and its prefix's length."""
        prefix = self.cache.prefix[run.row]
        size = len(prefix.tokens)
        drafted = prefix.drafted
        if drafted >= size:
            drafted = int(self.cache.drafted[run.row])
        return int(self.cache.length[run.row]), drafted, size

    def _reserve(
        self,
        id: str,
        prompt: np.ndarray,
        length: int,
        coming: set[bytes],
    ) -> RowReservation:
        """Reserve a row and slots for a sample; `coming`: keys of the prompts that samples before it bring."""
        cache = self.cache
        response = np.zeros(length - len(prompt), np.int64)  # not known yet
        tokens = np.concatenate([prompt, response])
        row = cache.open(tokens, len(prompt), min(length + ROOM, cache.columns))
        if row is None:
            return RowReservation(id, refused=f"no row or no room for {length} tokens")
        prefix = cache.prefix[row]
        size = len(prefix.tokens)
        computed = prefix.computed == size or prefix.key in coming
        drafted = prefix.drafted >= size or prefix.key in coming
        coming.add(prefix.key)
        self.engine.reserved[id] = row
        target = size if computed else 0
        drafter = max(size, 1) if drafted else 1
        return RowReservation(id, target, drafter)

    def _pools(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every pool in the order of the buffer."""
        layers = self.cache.model.arch.layers
        for pool in self.cache.kv[layers:]:
            yield "drafter", pool
        yield "hidden", self.cache.hidden
        for pool in self.cache.kv[:layers]:
            yield "target", pool

    def _message(
        self,
        parts: Sequence[tuple[ActiveRequest, Columns]],
        requests: Sequence[tuple[Request, Sampling]] = (),
    ) -> KVMessage:
        """Copy the columns of all samples into one buffer."""
        slots = {}
        for kind in KINDS:
            pieces = []
            for run, columns in parts:
                first, last = getattr(columns, kind)
                pieces.append(self.cache.slots[run.row, first:last])
            slots[kind] = _joined(pieces)
        sizes = []
        for kind, pool in self._pools():
            sizes.append(len(slots[kind]) * pool[0].numel())
        model = self.cache.model
        data = torch.empty(sum(sizes), dtype=model.dtype, device=model.device)
        pieces_of_data = iter(data.split(sizes))
        for kind, pool in self._pools():
            columns_of_pool = next(pieces_of_data).view(-1, *pool.shape[1:])
            index = slots[kind].to(pool.device)
            torch.index_select(pool, 0, index, out=columns_of_pool)
        return KVMessage([columns for _, columns in parts], data.cpu(), requests)

    def _write(self, message: KVMessage, only: set[str] | None = None) -> None:
        """Copy a buffer into the slots of the reserved rows. What belongs to other ids is left out."""
        slots = {}
        wanted = {}  # by kind: whether each column of the buffer is written
        for kind in KINDS:
            pieces = []
            masks = []
            for columns in message.samples:
                first, last = getattr(columns, kind)
                row = self.engine.reserved.get(columns.id)
                written = row is not None and (only is None or columns.id in only)
                masks.append(np.full(last - first, written))
                if written:
                    pieces.append(self.cache.slots[row, first:last])
            slots[kind] = _joined(pieces)
            wanted[kind] = _joined(masks).bool()
        sizes = []
        for kind, pool in self._pools():
            sizes.append(len(wanted[kind]) * pool[0].numel())
        pieces_of_data = iter(message.data.split(sizes))
        for kind, pool in self._pools():
            columns_of_pool = next(pieces_of_data).view(-1, *pool.shape[1:])
            source = columns_of_pool[wanted[kind]]
            index = slots[kind].to(pool.device)
            pool.index_copy_(0, index, source.to(pool.device))


def _joined(pieces: Sequence[np.ndarray]) -> Tensor:
    """Return all pieces as one tensor, [n] int64, also if there are none."""
    nothing = np.zeros(0, np.int64)
    return torch.from_numpy(np.concatenate([nothing, *pieces]))


class Arrivals:
    """Samples that arrive during a step of `MigratableEmbeddedEngine`.

    They draft in the round during which the target's keys arrive, and are verified in it.

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
        """Wait for the target's keys. Returns the samples, which are whole now."""
        while self._rests:
            group = self._groups[-len(self._rests)]
            receive = self._rests.pop(0)
            self.mover.land(receive(), group)
            self.landed += group
        return self.landed

    def receive_rests(self) -> None:
        """Receive what still travels, because the step did not come so far."""
        while self._rests:
            self._rests.pop(0)()

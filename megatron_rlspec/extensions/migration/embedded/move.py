"""Move running samples to another embedded engine with their KV caches, in two stages (RLHFSpec, section 6.2).

    source                                   target
    offer  ── what would come ─────────────► grant: a row and slots are reserved, as far as there is room
           ◄── what the target has already ─ grant
    begin  ── stage 1: verified columns ───► take            both run a round meanwhile; such columns never change
    finish ── stage 2: that round's columns► land: the samples run here from now on

Every step is a method of `TransferEndpoint`. The caller (`Member._leave`, `Member._come`) carries the messages, and
runs exactly one round between the stages: `grant` reserves room for one. A sample that is not granted stays. Both
engines have the same model and the same version of its weights, because the ranks of a job move in lock-step.

A column is a position of a sample (`rollout/embedded/cache.py`). Column c of the drafter's cache holds the pair
(hidden state of column c - 1, token of column c), so there is none for column 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rlspec.config.spec import MOST_DRAFTS
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.types import Request, Sampling

Range = tuple[int, int]  # columns [first, last)
KINDS = ("drafter", "hidden", "target")  # of data in a message; names of fields of `Columns`
# what a source would send: id, the prompt's tokens [P] int64, and tokens of prompt and response together
Offer = list[tuple[str, np.ndarray, int]]


class RowReservation(NamedTuple):
    """A sample that may come, and the columns that the source need not send.

    The target engine has columns [0, target) of the target model, and [1, drafter) of the drafter: in a prefix that its
    own samples use, or from an earlier sample of the same offer.
    """

    id: str
    target: int
    drafter: int


class Columns(NamedTuple):
    """The columns that a message holds of one sample.

    drafter  with keys and values of the drafter
    hidden   with hidden states
    target   with keys and values of the target model
    """

    id: str
    drafter: Range
    hidden: Range
    target: Range


class KVMessage(NamedTuple):
    """One stage's message.

    data      one tensor for each pool of the cache, in the order of `TransferEndpoint._pools`, on the CPU: the columns
              of all samples, one after another
    requests  stage 2: the samples to continue, each with its sampling, in the order of `samples`; stage 1: none
    """

    samples: list[Columns]
    data: list[Tensor]
    requests: Sequence[tuple[Request, Sampling]]


class TransferEndpoint:
    """One engine's side of moves, as source and as target. Engine and endpoint are called by one thread at a time.

    departing  by id, samples whose stage 1 was sent, with the columns in it
    reserved   by id, the rows of the cache that `grant` took. `land` seats the samples that came, and closes the other
               rows
    """

    def __init__(self, engine: MigratableEmbeddedEngine) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.drafts = engine.model.arch.draft_layers > 0
        self.departing: dict[str, tuple[ActiveRequest, Columns]] = {}
        self.reserved: dict[str, int] = {}

    # ---- source -----------------------------------------------------------------------------------------------------

    def offer(self, ids: Sequence[str]) -> Offer:
        """Describe those of these samples that run here and have been prefilled."""
        offer: Offer = []
        for run in self.engine.running:
            if run.request.id in ids and run.response and self.engine.rounds.ready(run.row):
                prompt = np.asarray(run.request.prompt.tokens)
                length = int(self.cache.length[run.row])
                offer.append((run.request.id, prompt, length))
        return offer

    def begin(self, grants: Sequence[RowReservation]) -> KVMessage:
        """Return stage 1 of the samples that were granted: their verified columns. They go on here.

        One move at a time: this sends all of `departing`, which only `finish` clears.
        """
        here = {run.request.id: run for run in self.engine.running}
        for grant in grants:
            run = here[grant.id]  # no round has run since `offer`
            length, drafted, prefix_size = self._extent(run)
            hidden = (0, 0)
            if self.drafts and grant.target < prefix_size:
                # Later samples of this prompt on the target begin to draft at column `prefix_size`, whose pair has the
                # hidden state of column prefix_size - 1.
                hidden = (prefix_size - 1, prefix_size)
            columns = Columns(
                id=grant.id,
                drafter=(min(grant.drafter, drafted), drafted),
                hidden=hidden,
                # The last token is pending: the target has not run on it.
                target=(grant.target, length - 1),
            )
            self.departing[grant.id] = (run, columns)
        return self._message(list(self.departing.values()))

    def finish(self) -> KVMessage:
        """Return stage 2 of the samples that were begun: their other columns. They leave this engine.

        Samples that ended since, or went back into the queue, are missing.
        """
        leaving: list[tuple[ActiveRequest, Columns]] = []
        requests = []
        for id, (run, sent) in self.departing.items():
            if run.row < 0:  # it has ended, or waits
                continue
            length, drafted, _ = self._extent(run)
            # The drafter's next run on the target engine begins at column `drafted`, whose pair has the hidden state of
            # column drafted - 1.
            hidden = (drafted - 1, length - 1) if self.drafts else (0, 0)
            rest = Columns(id, (sent.drafter[1], drafted), hidden, (sent.target[1], length - 1))
            leaving.append((run, rest))
            # `run.continued()` below copies `run.draws` into the request. While a run has a row, only
            # `rounds.draws[row]` is counted on (see `Scheduler.vacate`): store it first.
            run.draws = int(self.engine.rounds.draws[run.row])
            requests.append((run.continued(), run.sampling))
        # Before `remove`, which frees the slots.
        message = self._message(leaving, requests)
        for run, _ in leaving:
            self.engine.scheduler.remove(run)
        self.departing.clear()
        return message

    # ---- target -----------------------------------------------------------------------------------------------------

    def grant(self, offer: Offer) -> list[RowReservation]:
        """Reserve a row and slots for each offered sample that there is room for.

        The rows stay reserved until `land`, also those of samples that will not come.
        """
        cache = self.cache
        coming: set[bytes] = set()  # keys of the prefixes that samples of this offer bring
        grants = []
        for id, prompt, length in offer:
            response = np.zeros(length - len(prompt), np.int64)  # `land` writes the tokens
            tokens = np.concatenate([prompt, response])
            # The round between the stages adds at most 1 + MOST_DRAFTS tokens.
            row = cache.open(tokens, len(prompt), length + 1 + MOST_DRAFTS)
            if row is None:
                continue
            self.reserved[id] = row
            prefix = cache.prefix[row]
            size = len(prefix.tokens)
            comes = prefix.key in coming
            coming.add(prefix.key)
            # A prefix is sent whole unless this engine has all of it, or an earlier sample of the offer brings it.
            target = size if comes or prefix.computed == size else 0
            drafter = max(size, 1) if comes or prefix.drafted >= size else 1
            grants.append(RowReservation(id, target, drafter))
        return grants

    def take(self, message: KVMessage) -> None:
        """Write stage 1 into the reserved rows. Their samples do not run yet, but their prefixes can be used."""
        self._write(message)
        for columns in message.samples:
            prefix = self.cache.prefix[self.reserved[columns.id]]
            size = len(prefix.tokens)
            if columns.target[0] < size:  # then the message holds the whole prefix
                prefix.computed = size
            prefix.drafted = max(prefix.drafted, min(columns.drafter[1], size))

    def land(self, message: KVMessage) -> list[ActiveRequest]:
        """Write stage 2, and free the rows of samples that stayed. Returns the samples that run here from now on."""
        cache = self.cache
        self._write(message)
        # `make_runs` keeps the order of `requests`, which is that of `samples`.
        runs = self.engine.scheduler.make_runs(message.requests)
        for run, columns in zip(runs, message.samples, strict=True):
            row = self.reserved.pop(columns.id)
            tokens = run.tokens
            cache.tokens[row, : len(tokens)] = tokens
            cache.length[row] = len(tokens)
            cache.computed[row] = len(tokens) - 1
            prefix = cache.prefix[row]
            size = len(prefix.tokens)
            # `cache.drafted` of a row is at least its prefix's length, because the prefix's columns count in
            # `prefix.drafted`; and at least 1, because column 0 has no pair.
            cache.drafted[row] = max(columns.drafter[1], size, 1)
            prefix.drafted = max(prefix.drafted, min(columns.drafter[1], size))
            self.engine.scheduler.seat(run, row)
        self.engine.running.extend(runs)
        for row in self.reserved.values():
            cache.close(row)
        self.reserved.clear()
        return runs

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _extent(self, run: ActiveRequest) -> tuple[int, int, int]:
        """Return a sample's length, the end of the columns that hold the drafter's keys, and its prefix's length."""
        prefix = self.cache.prefix[run.row]
        size = len(prefix.tokens)
        drafted = prefix.drafted
        # `cache.drafted` counts from the prefix on, and says nothing of the prefix itself.
        if drafted >= size:
            drafted = int(self.cache.drafted[run.row])
        return int(self.cache.length[run.row]), drafted, size

    def _pools(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every pool with the kind of its data. This is the order of `KVMessage.data` on both sides."""
        layers = self.cache.model.arch.layers  # the target's; the drafter's layers follow
        for pool in self.cache.kv[layers:]:
            yield "drafter", pool
        yield "hidden", self.cache.hidden
        for pool in self.cache.kv[:layers]:
            yield "target", pool

    def _slots(self, rows: Sequence[int], samples: Sequence[Columns]) -> dict[str, Tensor]:
        """Return the slots of all columns of these samples, [n] int64 by kind. `rows`: in this cache, one a sample."""
        slots = {}
        for kind in KINDS:
            pieces = [np.zeros(0, np.int64)]
            for row, columns in zip(rows, samples, strict=True):
                first, last = getattr(columns, kind)
                pieces.append(self.cache.slots[row, first:last])
            slots[kind] = torch.from_numpy(np.concatenate(pieces))
        return slots

    def _message(
        self,
        parts: Sequence[tuple[ActiveRequest, Columns]],
        requests: Sequence[tuple[Request, Sampling]] = (),
    ) -> KVMessage:
        """Copy these columns of the samples to the CPU."""
        samples = [columns for _, columns in parts]
        slots = self._slots([run.row for run, _ in parts], samples)
        data = [pool[slots[kind].to(pool.device)].cpu() for kind, pool in self._pools()]
        return KVMessage(samples, data, requests)

    def _write(self, message: KVMessage) -> None:
        """Copy a message's columns into the slots of the reserved rows. The source's `_message` has their order."""
        rows = [self.reserved[columns.id] for columns in message.samples]
        slots = self._slots(rows, message.samples)
        for (kind, pool), data in zip(self._pools(), message.data, strict=True):
            pool.index_copy_(0, slots[kind].to(pool.device), data.to(pool.device))

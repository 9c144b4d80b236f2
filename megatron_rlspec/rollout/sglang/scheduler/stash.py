"""Keep in host memory the inputs that the drafter has not read yet, without holding up the forward passes.

`drafter_gap.py` is the only caller: it decides when rows move to the stash and when they are read.

The rows of a GPU are copied to pinned memory on a CUDA stream of their own. From there a thread copies them to ordinary
memory. torch keeps the pinned memory for the next copy, because pinning memory takes the host as long as the copy.

A request is known by a number, which `DrafterGap` gives. The rows of each request are tensors of their own, and no
views of a common one, so that their memory is freed when the request ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SkippedRound:
    """The drafter's inputs of one round: `width` rows of each request, of which the first `counts` are valid.

    `clock` orders the rounds: it is the sum of the widths of all earlier rounds (`DrafterGap._clock`).
    """

    clock: int
    numbers: np.ndarray  # [B] int64: the number of each request, by `DrafterGap`
    hidden: Tensor  # [B * width, H]
    tokens: Tensor  # [B * width]
    width: int
    counts: Tensor | None  # [B] valid rows of each request; None: all `width` rows are valid


@dataclass(frozen=True)
class Rows:
    """Rows of one request, in the order of time. `clocks` is `SkippedRound.clock` of the round of each row."""

    clocks: np.ndarray  # [n], never falling
    hidden: Tensor  # [n, H]
    tokens: Tensor  # [n] int64

    def since(self, clock: int) -> Rows:
        """Return the rows of the rounds from `clock` on, as views."""
        first = int(np.searchsorted(self.clocks, clock))
        return Rows(self.clocks[first:], self.hidden[first:], self.tokens[first:])


def gather(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the concatenation of tensors, at least one, on the device. Each may be on the host or on that device.

    All tensors from the host travel in one copy. The host does not wait for it: torch keeps the pinned memory until
    the copy has ended.
    """
    on_host = [part for part in parts if not part.is_cuda]
    if device.type != "cuda" or not on_host:
        return torch.cat(list(parts))
    sizes = [len(part) for part in on_host]
    shape = (sum(sizes), *on_host[0].shape[1:])
    pinned = torch.empty(shape, dtype=on_host[0].dtype, pin_memory=True)
    torch.cat(on_host, out=pinned)
    moved = iter(pinned.to(device, non_blocking=True).split(sizes))
    return torch.cat([part if part.is_cuda else next(moved) for part in parts])


def split_by_request(
    rounds: Sequence[SkippedRound],
    hidden: Tensor,
    tokens: Tensor,
    counts: np.ndarray,
    wanted: Collection[int] | None = None,
) -> dict[int, Rows]:
    """Return copies of the valid rows of rounds by request number: of the `wanted` ones, or of all.

    hidden, tokens  the concatenation of those of all rounds, on one device
    counts          the concatenation of those of the rounds that have counts, on the host
    wanted          request numbers; None: all

    A request without a valid row is not in the result.
    """
    # lists with an array for each round, which has a value for each row
    numbers, clocks, valid = [], [], []
    for skipped in rounds:
        requests = len(skipped.numbers)
        accepted = np.full(requests, skipped.width)
        if skipped.counts is not None:
            accepted, counts = counts[:requests], counts[requests:]
        numbers.append(np.repeat(skipped.numbers, skipped.width))
        clocks.append(np.full(requests * skipped.width, skipped.clock))
        valid.append((np.arange(skipped.width) < accepted[:, None]).ravel())
    owners = np.concatenate(numbers)
    selected = np.concatenate(valid)
    if wanted is not None:
        selected &= np.isin(owners, list(wanted))
    # Indices of the selected rows, sorted by request. The sort is stable, so rows of one request stay in time order.
    places = np.flatnonzero(selected)
    places = places[np.argsort(owners[places], kind="stable")]
    present, first, sizes = np.unique(owners[places], return_index=True, return_counts=True)
    clocks_of_requests = np.split(np.concatenate(clocks)[places], first[1:])
    indices = torch.from_numpy(places).to(hidden.device).split(sizes.tolist())
    rows = {}
    # Not strict: without any selected row `np.split` still returns one empty part.
    for number, own_clocks, index in zip(
        present.tolist(), clocks_of_requests, indices, strict=False
    ):
        rows[number] = Rows(own_clocks, hidden[index], tokens[index])
    return rows


class Stash:
    """The rows of running requests in host memory, in chunks of some rounds.

    The scheduler's thread calls all methods. The stash has a thread of its own, which splits the rows by request.
    """

    def __init__(self) -> None:
        # What each `put` stores, in the order of time: rows by request number, once the thread has split them.
        self._chunks: list[Future[dict[int, Rows]]] = []
        # One thread, which starts at the first `put`.
        self._thread = ThreadPoolExecutor(1, "rlspec-stash")
        self._stream: torch.cuda.Stream | None = None  # of the copies to the host

    def put(self, rounds: Sequence[SkippedRound]) -> None:
        """Begin to copy these rounds, at least one. The caller may drop them at once.

        No later pass may overwrite their tensors. Call it in the order of time: `find` returns rows in this order.
        """
        hidden = [skipped.hidden for skipped in rounds]
        # Tokens of all rounds, then counts of all rounds. Together they take one copy, and `finish` takes them apart.
        integers = [skipped.tokens.long() for skipped in rounds]
        integers += [skipped.counts.long() for skipped in rounds if skipped.counts is not None]
        copied = None
        if hidden[0].is_cuda:
            staged, copied = self._copy_to_host(hidden, integers)
        else:
            staged = [torch.cat(hidden), torch.cat(integers)]

        def finish() -> dict[int, Rows]:
            if copied is not None:  # this thread waits, and not the scheduler's
                copied.synchronize()
            rows, values = staged
            tokens, counts = values[: len(rows)], values[len(rows) :]
            return split_by_request(rounds, rows, tokens, counts.numpy())

        self._chunks.append(self._thread.submit(finish))

    def _copy_to_host(
        self, hidden: list[Tensor], integers: list[Tensor]
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        """Begin to copy both concatenations into pinned memory, on a stream of its own.

        Returns [hidden, integers], which are complete once the returned event has come.
        """
        device = hidden[0].device
        self._stream = self._stream or torch.cuda.Stream(device)
        # The passes that compute these tensors may still run: the copies must come after them.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            staged = [torch.cat(parts).to("cpu", non_blocking=True) for parts in (hidden, integers)]
        # The caller drops the tensors now. torch must not give their memory to others before the copies have read it.
        for part in (*hidden, *integers):
            part.record_stream(self._stream)
        return staged, self._stream.record_event()

    def keep(self, running: Collection[int]) -> None:
        """Drop the rows of all requests but these numbers. Rows still being copied are dropped at a later call."""
        left = []
        for chunk in self._chunks:
            if chunk.done():
                rows = chunk.result()
                for number in rows.keys() - running:
                    del rows[number]
                if not rows:
                    continue
            left.append(chunk)
        self._chunks = left

    def find(self, number: int, since: int) -> list[Rows]:
        """Return a request's rows of the rounds from the clock `since` on, in the order of time.

        Waits until all copies have ended. Returns [] if the stash has no such rows.
        """
        parts = []
        for chunk in self._chunks:
            rows = chunk.result().get(number)
            if rows is not None and rows.clocks[-1] >= since:
                parts.append(rows.since(since))
        return parts

    def clear(self) -> None:
        """Drop all rows. Copies that are under way end in the background, and are dropped, too."""
        self._chunks = []

"""Keep the drafter's inputs of rounds without drafts in host memory, without holding up the forward passes.

A GPU's rows are copied on a stream of their own into one pinned buffer, and from there a thread copies them into
ordinary memory. The buffer is allocated once: to pin memory for every copy would take the host as long as the copy.

Requests are numbers here. Rows lie sorted by request, so that those of some requests are found without a walk over
rounds or over the other requests (`find`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

_BITS = 32  # of a key: its upper half is the request's number, its lower half is `SkippedRound.at`


@dataclass(frozen=True)
class SkippedRound:
    """The drafter's inputs of one round: `width` rows of each request, of which the first `counts` are valid."""

    at: int  # the most tokens that a request can have missed before this round
    numbers: np.ndarray  # [B] of the requests
    hidden: torch.Tensor  # [B * width, H]
    tokens: torch.Tensor  # [B * width]
    width: int
    counts: torch.Tensor | None  # [B]; None: all


@dataclass(frozen=True)
class Rows:
    """Rows of hidden [n, H] and tokens [n], and some requests' `places` among them: `counts` [k] of each in turn."""

    places: np.ndarray
    counts: np.ndarray
    hidden: torch.Tensor
    tokens: torch.Tensor


class Missed:
    """What some requests missed, request by request: `counts` [k] rows of each, which end before row `ends` [k].

    found    rows of these requests, in the order of time
    buffers  for hidden and tokens that lie in host memory
    """

    def __init__(
        self, found: Sequence[Rows], requests: int, buffers: tuple[Buffer, Buffer]
    ) -> None:
        self.counts = sum((rows.counts for rows in found), np.zeros(requests, np.int64))
        self.ends = np.cumsum(self.counts)
        self._found = found
        self._buffers = buffers
        owners = [np.repeat(np.arange(requests), rows.counts) for rows in found]
        order = np.argsort(np.concatenate([np.empty(0, np.int64), *owners]), kind="stable")
        self._source = np.repeat(np.arange(len(found)), [len(rows.places) for rows in found])[order]
        self._places = np.concatenate([np.empty(0, np.int64), *(rows.places for rows in found)])[
            order
        ]

    def read(
        self, first: int, last: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden and tokens (int64) of rows [first, last). Copies no others."""
        source = self._source[first:last]
        order = np.argsort(source, kind="stable")
        places = torch.from_numpy(self._places[first:last][order])
        sources, sizes = np.unique(source, return_counts=True)
        picked = list(zip(sources.tolist(), places.split(sizes.tolist()), strict=True))
        hidden = self._buffers[0].gather(
            [(self._found[i].hidden, index) for i, index in picked], device
        )
        tokens = self._buffers[1].gather(
            [(self._found[i].tokens, index) for i, index in picked], device
        )
        # waits until the pass before has been computed
        back = torch.from_numpy(np.argsort(order)).to(device)
        return hidden[back], tokens[back]


class Buffer:
    """Host memory through which rows go to the device, pinned for a GPU. It stays, and grows for more rows."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)
        # when the device has read what the buffer holds
        self._copied: torch.cuda.Event | None = None

    def gather(
        self, picked: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> torch.Tensor:
        """Return the rows at an index of each of some tensors, concatenated on the device.

        Those in host memory come first. The host gathers them while the device computes, and waits for it only before
        it fills the buffer again. On a CPU the result may be the buffer itself, so the caller copies it.
        """
        host = [(rows, index) for rows, index in picked if not rows.is_cuda]
        parts = []
        if host:
            parts.append(self._from_host(host, device))
        for rows, index in picked[len(host) :]:
            parts.append(rows[index.to(device)])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _from_host(
        self, picked: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> torch.Tensor:
        count, (like, _) = sum(len(index) for _, index in picked), picked[0]
        if self._copied is not None:
            self._copied.synchronize()
        if (
            self._rows.dtype != like.dtype
            or self._rows.shape[1:] != like.shape[1:]
            or len(self._rows) < count
        ):
            rows = torch.empty(count, *like.shape[1:], dtype=like.dtype)
            self._rows = rows.pin_memory() if device.type == "cuda" else rows
        at = 0
        for rows, index in picked:
            torch.index_select(rows, 0, index, out=self._rows[at : at + len(index)])
            at += len(index)
        moved = self._rows[:count].to(device, non_blocking=True)
        if device.type == "cuda":
            self._copied = torch.cuda.current_stream(device).record_event()
        return moved


def sort(rounds: Sequence[SkippedRound], counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys [n] of the valid rows of rounds, sorted, and their places in the concatenation of all rows.

    counts  the concatenation of all `SkippedRound.counts`
    """
    keys = []
    valid = []
    for kept in rounds:
        keys.append(np.repeat(kept.numbers << _BITS | kept.at, kept.width))
        known, counts = (
            (None, counts) if kept.counts is None else np.split(counts, [len(kept.numbers)])
        )
        own = kept.width if known is None else known[:, None]
        valid.append(
            np.broadcast_to(np.arange(kept.width) < own, (len(kept.numbers), kept.width)).reshape(
                -1
            )
        )
    places = np.flatnonzero(np.concatenate(valid))
    found = np.concatenate(keys)[places]
    order = np.argsort(found, kind="stable")
    return found[order], places[order]


def find(keys: np.ndarray, numbers: np.ndarray, since: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places [m] of the rows of these requests since then, request by request, and how many each has."""
    first = np.searchsorted(keys, numbers << _BITS | since)
    counts = np.searchsorted(keys, (numbers + 1) << _BITS) - first
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum()), counts


@dataclass(frozen=True)
class _Sorted:
    """Rows sorted by `keys` [n]: hidden [n, H], tokens [n]."""

    keys: np.ndarray
    hidden: torch.Tensor
    tokens: torch.Tensor


@dataclass(eq=False)
class _Chunk:
    """Rows of many rounds. `rows`: of each running request, at most; `total`: that these were when it was made."""

    rows: dict[int, int]
    alive: int
    total: int
    content: Future[_Sorted]


class Stash:
    """Rounds in host memory, in chunks. A chunk more than half of whose rows are of ended requests is made smaller.

    Host memory holds at most two rows per token of the running requests, a few per cent of the KV cache, and the rows
    of refused drafts.
    """

    def __init__(self) -> None:
        self._chunks: dict[_Chunk, None] = {}  # in the order of time
        self._holding: dict[int, list[_Chunk]] = {}  # the chunks with rows of a request
        # starts its thread when it is first used
        self._thread = ThreadPoolExecutor(1, "rlspec-stash")
        self._pinned: dict[torch.dtype, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._arrived: Future[_Sorted] | None = None  # when the pinned buffers are free again

    def put(self, rounds: Sequence[SkippedRound]) -> None:
        """Begin to copy these rounds. They may be dropped at once, and no later pass may overwrite their tensors."""
        hidden = [kept.hidden for kept in rounds]
        numbers = [
            *(kept.tokens for kept in rounds),
            *(kept.counts for kept in rounds if kept.counts is not None),
        ]
        if hidden[0].device.type != "cuda":
            copied = torch.cat(hidden), torch.cat([part.long() for part in numbers])
            self._add(rounds, self._thread.submit(_sorted, rounds, *copied))
            return
        device = hidden[0].device
        if self._arrived is not None:
            self._arrived.result()  # since many rounds
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            staged = [self._stage(torch.cat([part.to(kind) for part in parts])) for parts, kind in
                      ((hidden, hidden[0].dtype), (numbers, torch.int64))]  # fmt: skip
        for part in (*hidden, *numbers):
            part.record_stream(self._stream)
        done = self._stream.record_event()

        def finish() -> _Sorted:
            done.synchronize()
            return _sorted(rounds, *staged)

        self._arrived = self._thread.submit(finish)
        self._add(rounds, self._arrived)

    def _stage(self, values: torch.Tensor) -> torch.Tensor:
        pinned = self._pinned.get(values.dtype)
        if pinned is None or pinned.numel() < values.numel():
            pinned = self._pinned[values.dtype] = torch.empty(
                values.numel(), dtype=values.dtype
            ).pin_memory()
        return pinned[: values.numel()].view(values.shape).copy_(values, non_blocking=True)

    def _add(self, rounds: Sequence[SkippedRound], content: Future[_Sorted]) -> None:
        numbers = np.concatenate([kept.numbers for kept in rounds])
        widths = np.repeat([kept.width for kept in rounds], [len(kept.numbers) for kept in rounds])
        known, where = np.unique(numbers, return_inverse=True)
        rows = dict(
            zip(known.tolist(), np.bincount(where, widths).astype(int).tolist(), strict=True)
        )
        chunk = _Chunk(rows, int(widths.sum()), int(widths.sum()), content)
        self._chunks[chunk] = None
        for number in rows:
            self._holding.setdefault(number, []).append(chunk)

    def keep(self, running: Collection[int]) -> None:
        """Drop the rows of all other requests, at the latest when they are most of a chunk."""
        smaller: dict[_Chunk, None] = {}
        for number in self._holding.keys() - running:
            for chunk in self._holding.pop(number):
                chunk.alive -= chunk.rows.pop(number)
                smaller[chunk] = None
        for chunk in smaller:
            if not chunk.rows:
                del self._chunks[chunk]
            elif 2 * chunk.alive < chunk.total:
                chunk.total = chunk.alive
                chunk.content = self._thread.submit(
                    _of, chunk.content, np.array(sorted(chunk.rows))
                )

    def find(self, numbers: np.ndarray, since: np.ndarray) -> list[Rows]:
        """Return what each chunk has of these requests since then (`SkippedRound.at`), in the order of time."""
        held = {chunk for number in numbers.tolist() for chunk in self._holding.get(number, ())}
        found = []
        for chunk in self._chunks if held else ():
            if chunk in held:
                content = chunk.content.result()
                places, counts = find(content.keys, numbers, since)
                if len(places):
                    found.append(Rows(places, counts, content.hidden, content.tokens))
        return found


def _of(content: Future[_Sorted], running: np.ndarray) -> _Sorted:
    """Return these requests' rows only."""
    kept = content.result()
    places, _ = find(kept.keys, running, np.zeros_like(running))
    index = torch.from_numpy(places)
    return _Sorted(kept.keys[places], kept.hidden[index], kept.tokens[index])


def _sorted(rounds: Sequence[SkippedRound], hidden: torch.Tensor, numbers: torch.Tensor) -> _Sorted:
    """Return a sorted copy of the rounds' rows. numbers: all their tokens, then all counts."""
    keys, places = sort(rounds, numbers[len(hidden) :].numpy())
    index = torch.from_numpy(places)
    return _Sorted(keys, hidden[index], numbers[: len(hidden)][index])

"""Keep the drafter's inputs of rounds without drafts in host memory, without holding up the forward passes.

A GPU's rows are copied on a stream of their own into one pinned buffer, and from there a thread copies them into
ordinary memory. The buffer is allocated once: to pin memory for every copy would take the host as long as the copy.

Requests are numbers here. Each request's rows are copies of their own, so they leave memory with the request.
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

    at  the most tokens that a request can have missed before this round
    """

    at: int
    numbers: np.ndarray  # [B] of the requests
    hidden: Tensor  # [B * width, H]
    tokens: Tensor  # [B * width]
    width: int
    counts: Tensor | None  # [B]; None: all


@dataclass(frozen=True)
class Rows:
    """Rows of one request, in the order of time. `at`: `SkippedRound.at` of each."""

    at: np.ndarray  # [n]
    hidden: Tensor  # [n, H]
    tokens: Tensor  # [n] int64

    def since(self, at: int) -> Rows:
        """Return the rows of the rounds from `at` on."""
        first = int(np.searchsorted(self.at, at))
        return Rows(self.at[first:], self.hidden[first:], self.tokens[first:])


class PinnedBuffer:
    """Memory through which rows go to the device. It grows for more rows, and stays."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)
        # when the device has read what the buffer holds
        self._copied: torch.cuda.Event | None = None

    def gather(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the concatenation of tensors on the device. Some of them may be there already.

        The host gathers while the device computes. It waits for the device only before it fills the buffer again.
        """
        on_host = [part for part in parts if not part.is_cuda]
        if device.type != "cuda" or not on_host:
            return torch.cat(list(parts))
        moved = iter(self._move(on_host, device).split([len(part) for part in on_host]))
        return torch.cat([part if part.is_cuda else next(moved) for part in parts])

    def _move(self, parts: list[Tensor], device: torch.device) -> Tensor:
        count = sum(len(part) for part in parts)
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._rows) < count:
            shape = (count, *parts[0].shape[1:])
            self._rows = torch.empty(shape, dtype=parts[0].dtype).pin_memory()
        torch.cat(parts, out=self._rows[:count])
        moved = self._rows[:count].to(device, non_blocking=True)
        self._copied = torch.cuda.current_stream(device).record_event()
        return moved


def split(
    rounds: Sequence[SkippedRound],
    hidden: Tensor,
    tokens: Tensor,
    counts: np.ndarray,
    wanted: Collection[int] | None = None,
) -> dict[int, Rows]:
    """Return copies of the valid rows of rounds by request: of the `wanted` ones, or of all.

    hidden, tokens, counts  the concatenation of those of all rounds
    """
    numbers, at, valid = [], [], []
    for skipped in rounds:
        requests = len(skipped.numbers)
        accepted = np.full(requests, skipped.width)
        if skipped.counts is not None:
            accepted, counts = counts[:requests], counts[requests:]
        numbers.append(np.repeat(skipped.numbers, skipped.width))
        at.append(np.full(requests * skipped.width, skipped.at))
        valid.append((np.arange(skipped.width) < accepted[:, None]).ravel())
    owners = np.concatenate(numbers)
    keep = np.concatenate(valid)
    if wanted is not None:
        keep &= np.isin(owners, list(wanted))
    # a stable order by request: rows of one request stay in the order of time
    places = np.flatnonzero(keep)
    places = places[np.argsort(owners[places], kind="stable")]
    found, first, sizes = np.unique(owners[places], return_index=True, return_counts=True)
    times = np.split(np.concatenate(at)[places], first[1:])
    indices = torch.from_numpy(places).to(hidden.device).split(sizes.tolist())
    rows = {}
    for number, own_times, index in zip(found.tolist(), times, indices, strict=False):
        rows[number] = Rows(own_times, hidden[index], tokens[index])
    return rows


class Stash:
    """The rows of running requests in host memory, in chunks of some rounds.

    It holds at most two rows per token of the running requests, a few per cent of the KV cache, and the rows of refused
    drafts.
    """

    def __init__(self) -> None:
        self._chunks: list[Future[dict[int, Rows]]] = []  # in the order of time
        self._newest: Future[dict[int, Rows]] | None = None
        # starts its thread when it is first used
        self._thread = ThreadPoolExecutor(1, "rlspec-stash")
        self._pinned: dict[torch.dtype, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def put(self, rounds: Sequence[SkippedRound]) -> None:
        """Begin to copy these rounds. They may be dropped at once, and no later pass may overwrite their tensors."""
        hidden = [skipped.hidden for skipped in rounds]
        # one copy for tokens and counts
        numbers = [skipped.tokens.long() for skipped in rounds]
        numbers += [skipped.counts.long() for skipped in rounds if skipped.counts is not None]
        copied = None
        if hidden[0].is_cuda:
            staged, copied = self._copy_to_host(hidden, numbers)
        else:
            staged = [torch.cat(hidden), torch.cat(numbers)]

        def finish() -> dict[int, Rows]:
            if copied is not None:
                copied.synchronize()
            rows, values = staged
            tokens, counts = values[: len(rows)], values[len(rows) :]
            return split(rounds, rows, tokens, counts.numpy())

        self._newest = self._thread.submit(finish)
        self._chunks.append(self._newest)

    def _copy_to_host(
        self, hidden: list[Tensor], numbers: list[Tensor]
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        """Copy the concatenations into the pinned buffers, on a stream of its own."""
        if self._newest is not None:
            self._newest.result()  # it has left the buffers since many rounds
        device = hidden[0].device
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            staged = [self._stage(torch.cat(parts)) for parts in (hidden, numbers)]
        for part in (*hidden, *numbers):
            part.record_stream(self._stream)
        return staged, self._stream.record_event()

    def _stage(self, values: Tensor) -> Tensor:
        pinned = self._pinned.get(values.dtype)
        if pinned is None or pinned.numel() < values.numel():
            pinned = torch.empty(values.numel(), dtype=values.dtype).pin_memory()
            self._pinned[values.dtype] = pinned
        return pinned[: values.numel()].view(values.shape).copy_(values, non_blocking=True)

    def keep(self, running: Collection[int]) -> None:
        """Drop the rows of all other requests; those that are still being copied, at the next call."""
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
        """Return a request's rows of the rounds from `since` on (`SkippedRound.at`), in the order of time."""
        parts = []
        for chunk in self._chunks:
            rows = chunk.result().get(number)
            if rows is not None and rows.at[-1] >= since:
                parts.append(rows.since(since))
        return parts

    def clear(self) -> None:
        """Drop all rows."""
        self._chunks = []

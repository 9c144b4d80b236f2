"""Keep the drafter's inputs of rounds without drafts in host memory, without holding up the forward passes.

A GPU's rows are copied to pinned memory on a stream of their own. From there a thread copies them to ordinary memory.
torch keeps the pinned memory for the next copy: to pin memory takes the host as long as the copy.

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

    `at` orders the rounds: it counts the tokens of earlier rounds, of a request that took part in all of them and whose
    drafts were all accepted.
    """

    at: int
    numbers: np.ndarray  # [B] of the requests
    hidden: Tensor  # [B * width, H]
    tokens: Tensor  # [B * width]
    width: int
    counts: Tensor | None  # [B]; None: all


@dataclass(frozen=True)
class Rows:
    """Rows of one request, in the order of time. `at` is `SkippedRound.at` of the round of each row."""

    at: np.ndarray  # [n]
    hidden: Tensor  # [n, H]
    tokens: Tensor  # [n] int64

    def since(self, at: int) -> Rows:
        """Return the rows of the rounds from `at` on."""
        first = int(np.searchsorted(self.at, at))
        return Rows(self.at[first:], self.hidden[first:], self.tokens[first:])


def gather(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the concatenation of tensors on the device. Some of them may be there already.

    The host does not wait for the device. torch keeps pinned memory, and uses it again after the copy.
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

    They take a few per cent of the size of the KV cache.
    """

    def __init__(self) -> None:
        self._chunks: list[Future[dict[int, Rows]]] = []  # in the order of time
        # starts its thread when it is first used
        self._thread = ThreadPoolExecutor(1, "rlspec-stash")
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

        self._chunks.append(self._thread.submit(finish))

    def _copy_to_host(
        self, hidden: list[Tensor], numbers: list[Tensor]
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        """Copy the concatenations into pinned memory, on a stream of its own."""
        device = hidden[0].device
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            staged = [torch.cat(parts).to("cpu", non_blocking=True) for parts in (hidden, numbers)]
        for part in (*hidden, *numbers):
            part.record_stream(self._stream)
        return staged, self._stream.record_event()

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

"""Keep the drafter's inputs of rounds without drafts in host memory, without holding up the forward passes.

A GPU's rows are copied on a stream of their own into one pinned buffer, and from there a thread copies them into
ordinary memory. The buffer is allocated once: to pin memory for every copy would take the host as long as the copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SkippedRound:
    """The drafter's inputs of one round: `width` rows of each request, of which the first `counts` are valid."""

    at: int  # the most tokens that a request can have missed before this round
    rids: list[str]
    hidden: torch.Tensor  # [B * width, H]
    tokens: torch.Tensor  # [B * width]
    width: int
    counts: torch.Tensor | None  # [B]; None: all

    def of(self, running: Collection[str]) -> SkippedRound:
        """Return a copy with these requests' rows only."""
        kept = [i for i, rid in enumerate(self.rids) if rid in running]
        index = torch.tensor([i * self.width + j for i in kept for j in range(self.width)], dtype=torch.int64)
        counts = None if self.counts is None else self.counts[kept]
        rids = [self.rids[i] for i in kept]
        return SkippedRound(self.at, rids, self.hidden[index], self.tokens[index], self.width, counts)


class Stash:
    """Rounds in host memory, in chunks. A chunk more than half of whose rows are of ended requests is made smaller.

    Host memory holds at most two rows per token of the running requests, a few per cent of the KV cache, and the rows
    of refused drafts.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[Counter[str], Future[list[SkippedRound]]]] = []  # rows by request, rounds
        self._thread = ThreadPoolExecutor(1, "rlspec-stash")  # starts its thread when it is first used
        self._pinned: dict[torch.dtype, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._arrived: Future[list[SkippedRound]] | None = None  # when the pinned buffers are free again

    def put(self, rounds: Sequence[SkippedRound]) -> None:
        """Begin to copy these rounds. They may be dropped at once, and no later pass may overwrite their tensors."""
        rows: Counter[str] = Counter()
        for kept in rounds:
            rows.update(dict.fromkeys(kept.rids, kept.width))
        hidden = [kept.hidden for kept in rounds]
        counts = [kept.counts for kept in rounds if kept.counts is not None]
        numbers = [*(kept.tokens for kept in rounds), *counts]
        device = hidden[0].device
        if device.type != "cuda":
            copied = torch.cat(hidden), torch.cat([part.long() for part in numbers])
            self._chunks.append((rows, self._thread.submit(_split, rounds, *copied)))
            return
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

        def finish() -> list[SkippedRound]:
            done.synchronize()
            return _split(rounds, *(buffer.clone() for buffer in staged))

        self._arrived = self._thread.submit(finish)
        self._chunks.append((rows, self._arrived))

    def _stage(self, values: torch.Tensor) -> torch.Tensor:
        pinned = self._pinned.get(values.dtype)
        if pinned is None or pinned.numel() < values.numel():
            pinned = self._pinned[values.dtype] = torch.empty(values.numel(), dtype=values.dtype).pin_memory()
        return pinned[: values.numel()].view(values.shape).copy_(values, non_blocking=True)

    def keep(self, running: Collection[str]) -> None:
        """Drop the rows of all other requests, at the latest when they are most of a chunk."""
        chunks = []
        for rows, rounds in self._chunks:
            alive = Counter({rid: n for rid, n in rows.items() if rid in running})
            if 2 * alive.total() < rows.total():
                rows, rounds = alive, self._thread.submit(_of, rounds, frozenset(alive))
            if alive:
                chunks.append((rows, rounds))
        self._chunks = chunks

    def rounds(self) -> Iterator[SkippedRound]:
        """Return all rounds, in order, once they have arrived."""
        for _, rounds in self._chunks:
            yield from rounds.result()


def _of(rounds: Future[list[SkippedRound]], running: Collection[str]) -> list[SkippedRound]:
    return [kept.of(running) for kept in rounds.result()]


def _split(rounds: Sequence[SkippedRound], hidden: torch.Tensor, numbers: torch.Tensor) -> list[SkippedRound]:
    """Return the rounds with these tensors, the concatenations of theirs: hidden, then tokens and counts."""
    sizes = [len(kept.tokens) for kept in rounds]
    counted = [len(kept.rids) for kept in rounds if kept.counts is not None]
    parts = numbers.split(sizes + counted)
    counts = iter(parts[len(rounds) :])
    moved = []
    for kept, states, tokens in zip(rounds, hidden.split(sizes), parts, strict=False):
        own = None if kept.counts is None else next(counts)
        moved.append(SkippedRound(kept.at, kept.rids, states, tokens, kept.width, own))
    return moved

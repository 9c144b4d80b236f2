"""Move running samples between the engines of a pool, with their KV cache or without.

A sample is always in exactly one place: on an engine, or in the hands of the mover, as a request with what it has so
far. A move that fails before the sample has left changes nothing. After that, the target computes what it lacks of the
KV cache.
"""

from __future__ import annotations

import glob
import logging
import os
import queue
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.protocol import KVTransfer, Reservation, TransferRequest
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.types import Held, Move, Request

HEADROOM = 64  # tokens that a sample may draw between the offer and its arrival
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved:
    """What became of one move.

    ids      samples that another engine continues
    how      "kv", or "recompute"; the part of the ids whose KV cache arrived is `kept`
    why      the reason, in words; for samples that stayed, `refused` says why
    bytes    of KV cache that travelled
    began    seconds of `time.perf_counter`
    ms       from then to the arrival
    away_ms  of that, from the order to leave on
    rounds   of decoding that take as long as `away_ms`
    tp       tensor-parallel sizes of source and target
    paused   whether all samples were away meanwhile, until one fleet had slept and another one had woken up
    """

    source: str
    target: str
    ids: tuple[str, ...]
    how: str
    why: str
    kept: int = 0
    bytes: int = 0
    began: float = 0.0
    ms: float = 0.0
    away_ms: float = 0.0
    rounds: float = 0.0
    refused: str = ""
    tp: tuple[int, int] = (1, 1)
    paused: bool = False


class Mover:
    """Carries out moves between named engines."""

    def __init__(
        self, owner: RunningRequests, engines: Mapping[str, MigratableSGLangEngine]
    ) -> None:
        self._owner = owner
        self._engines = engines

    def move(self, move: Move, version: int, why: str = "") -> Moved:
        """Carry out one move, and wait until its samples are on the target. Raises no EngineError."""
        began = time.perf_counter()
        source, target = self._engines[move.source], self._engines[move.target]
        here = self._owner.on_engine(move.source)
        requests = {name: here[name] for name in move.ids if name in here}
        report = Moved(move.source, move.target, (), move.how, why, began=began)
        files: list[KVTransfer] = []
        try:
            firsts = dict.fromkeys(requests, 0)
            if move.how == "kv":
                files = self._first_stage(source, target, list(requests.values()), version)
                firsts = {piece.id: piece.last for piece in files if not piece.refused}
                if refused := next((piece for piece in files if piece.refused), None):
                    report = replace(report, refused=refused.refused)
            if not firsts:
                return report
            left = time.perf_counter()
            arrived, delta = self.fetch(move.source, firsts, move.how)
            files += delta
            known = {request.id for request in arrived}
            kept = self.deliver(target, [piece for piece in delta if piece.id in known])
        finally:
            discard(files)
        self._owner.resume(arrived, move.target)
        now = time.perf_counter()
        size = sum(piece.bytes for piece in (*files, *kept))
        report = replace(report, ids=tuple(sorted(known)), kept=len(kept), bytes=size)
        self._give_up(target, [name for name in firsts if name not in known], move.how)
        return replace(report, ms=1e3 * (now - began), away_ms=1e3 * (now - left))

    def _first_stage(
        self,
        source: MigratableSGLangEngine,
        target: MigratableSGLangEngine,
        requests: Sequence[Request],
        version: int,
    ) -> list[KVTransfer]:
        """Reserve room, and bring over what is final. Refused pieces have not moved; nothing has changed for them."""
        sent: list[KVTransfer] = []
        try:
            held = {sample.id: sample for sample in source.progress().running}
            notes = [_note(request, held[request.id]) for request in requests if request.id in held]
            grants = target.offer(version, notes) if notes else []
            granted = [grant for grant in grants if not grant.refused]
            sent = source.export(granted) if granted else []
            ready = [piece for piece in sent if not piece.refused]
            taken = target.accept(ready) if ready else []
        except EngineError as error:
            self._give_up(target, [request.id for request in requests], "kv")
            failed = [KVTransfer(request.id, refused=str(error)) for request in requests]
            return failed + [replace(piece, refused=str(error)) for piece in sent]
        answers: list[Reservation | KVTransfer] = [*grants, *sent, *taken]
        refusals = {answer.id: answer.refused for answer in answers if answer.refused}
        self._give_up(target, list(refusals), "kv")
        return [replace(piece, refused=refusals.get(piece.id, "")) for piece in sent] + [
            KVTransfer(grant.id, refused=grant.refused) for grant in grants if grant.refused
        ]

    def fetch(
        self, source: str, firsts: Mapping[str, int], how: str
    ) -> tuple[list[Request], list[KVTransfer]]:
        """Have samples leave the source; return those that did, as requests to continue, and their last columns."""
        returned: queue.SimpleQueue[tuple[str, Request | None]] = queue.SimpleQueue()
        left = set(
            self._owner.claim(source, firsts, lambda name, request: returned.put((name, request)))
        )
        delta: list[KVTransfer] = []
        try:
            grants = [Reservation(name, first) for name, first in firsts.items() if name in left]
            delta = self._engines[source].detach(grants, columns=how == "kv") if grants else []
            stay = {piece.id for piece in delta if piece.refused}
            self._owner.unclaim(stay)
            left -= stay
        except (
            EngineError
        ) as error:  # what arrives nevertheless is continued; the rest ends at the source
            logger.warning("a move from %s: %s", source, error)
        arrived = []
        while left:
            name, request = returned.get()
            left.discard(name)
            if request is not None:
                arrived.append(request)
        return arrived, [piece for piece in delta if piece.path and not piece.refused]

    def deliver(
        self, target: MigratableSGLangEngine, delta: Sequence[KVTransfer]
    ) -> list[KVTransfer]:
        """Give columns to the target; return the pieces that it took."""
        try:
            answers = target.accept(delta) if delta else []
        except (
            EngineError
        ) as error:  # the target computes the columns, or is lost, which `resume` sees
            logger.warning("a move to %s: %s", target, error)
            return []
        return [answer for answer in answers if not answer.refused]

    def _give_up(self, target: MigratableSGLangEngine, ids: Sequence[str], how: str) -> None:
        if ids and how == "kv":
            with suppress(EngineError):
                target.withdraw(ids)


def _note(request: Request, held: Held) -> TransferRequest:
    tokens = np.asarray(request.prompt.tokens, dtype=np.int64)
    if request.partial is not None:
        tokens = np.concatenate([tokens, request.partial.response])
    return TransferRequest(request.id, tokens, held.context + HEADROOM)


def discard(files: Iterable[KVTransfer]) -> None:
    """Remove files that no target has read, if they are on this machine."""
    for piece in files:
        for name in glob.glob(f"{glob.escape(piece.path)}.*") if piece.path else ():
            with suppress(OSError):
                os.unlink(name)

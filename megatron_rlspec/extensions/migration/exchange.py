"""Exchange a fleet of engines for one of another tensor-parallel size on the same devices, in the middle of a rollout.

SGLang cannot change its tensor-parallel size. Two fleets can share devices if one of them sleeps. `order` says which
calls are made; `Exchange` makes them.

    both fit    wake the new fleet, push weights to it, move the samples while they are drawn, let the old fleet sleep
    otherwise   the samples leave, their KV caches go to host memory, the old fleet sleeps, the new one wakes, gets
                weights, and reads the caches
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.moves import Moved, Mover, discard
from megatron_rlspec.extensions.migration.plans.rebalance import How, held_of
from megatron_rlspec.extensions.migration.plans.tp_planner import deal
from megatron_rlspec.extensions.migration.protocol import KVTransfer
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.types import Move, Request

Act = Literal["wake", "push", "move", "leave", "sleep", "arrive"]
TRIES = 100  # to have every sample leave: one that waits for its first round cannot yet
PAUSE = 0.05  # seconds between two tries


@dataclass(frozen=True)
class Footprint:
    """Bytes of one engine's rank on its device.

    weights  of target and drafter
    cache    keys and values of target and drafter
    rest     that stays while the engine sleeps: CUDA's context, NCCL's buffers
    """

    weights: int
    cache: int
    rest: int = 0


def order(old: Footprint, new: Footprint, budget: int) -> list[Act]:
    """Return the calls, in their order. Samples are away from `leave` to `arrive` only, and never under `move`.

    budget  bytes of one device for both fleets

    Raises ValueError if a fleet does not fit beside the other one asleep.
    """
    always = old.rest + new.rest
    before = always + old.weights + old.cache
    after = always + new.weights + new.cache
    most = max(before, after)
    if most > budget:
        raise ValueError(
            f"a fleet of {most} bytes a device, the other one asleep, does not fit into {budget}"
        )
    if before + after - always <= budget:
        return ["wake", "push", "move", "sleep"]
    return ["leave", "sleep", "wake", "push", "arrive"]


class Exchange:
    """Makes the calls of `order` during one `generate`.

    owner  of the samples
    old    the fleet that draws, by name
    new    the fleet that sleeps, by name
    push   gives the named engines all weights, the drafter's too, of `version`: from the trainer, or a copy on the host
    serve  tells which engines are given requests from now on (`EnginePool.serve`)
    how    samples move; those that are refused are recomputed

    moving_ms  of `run` that samples took, not the fleets
    """

    def __init__(
        self,
        owner: RunningRequests,
        old: Mapping[str, MigratableSGLangEngine],
        new: Mapping[str, MigratableSGLangEngine],
        push: Callable[[Collection[str]], None],
        serve: Callable[[Collection[str]], None],
        version: int,
        how: How = "kv",
    ) -> None:
        self._owner = owner
        self._old = old
        self._new = new
        self._push = push
        self._serve = serve
        self._version = version
        self._how = how
        self._mover = Mover(owner, {**old, **new})
        self._left: list[tuple[Move, float, list[Request], list[KVTransfer]]] = []
        self._slept = False
        self.moved: list[Moved] = []
        self.moving_ms = 0.0

    def run(self, calls: Collection[Act]) -> None:
        """Make the calls. Raises EngineError; samples go on then, on the old fleet, which is woken if it sleeps."""
        steps: dict[Act, Callable[[], None]] = {
            "wake": lambda: self._each(self._new, "wake"),
            "sleep": self._sleep,
            "push": lambda: self._give_weights(self._new),
            "move": self._move,
            "leave": self._leave,
            "arrive": self._arrive,
        }
        ended = False
        try:
            for call in calls:
                began = time.perf_counter()
                steps[call]()
                if call in ("move", "leave", "arrive"):
                    self.moving_ms += 1e3 * (time.perf_counter() - began)
            ended = True
        finally:
            try:
                if not ended:
                    self._go_back()
            finally:
                self._arrive()

    def _go_back(self) -> None:
        """Have the old fleet draw again. Raises EngineError if it slept and does not wake up."""
        self._serve(list(self._old))
        if self._slept:
            self._slept = False
            for engine in self._new.values():
                with suppress(EngineError):  # some may be gone, or sleep still
                    engine.sleep()
            self._each(self._old, "wake")
            self._give_weights(self._old)

    def _give_weights(self, engines: Mapping[str, MigratableSGLangEngine]) -> None:
        """Push. Raises EngineError if an engine has another version then: its samples would be another policy's."""
        self._push(list(engines))
        for name, engine in engines.items():
            version = engine.progress().version
            if version != self._version:
                raise EngineError(
                    f"{name} has weights of version {version}, expected {self._version}"
                )

    def _sleep(self) -> None:
        self._slept = True
        self._each(self._old, "sleep")

    def _each(
        self, engines: Mapping[str, MigratableSGLangEngine], act: Literal["wake", "sleep"]
    ) -> None:
        for engine in engines.values():
            getattr(engine, act)()

    def _moves(self, how: How) -> list[Move]:
        """Deal the running samples to the new engines."""
        where = {
            name: (source, request)
            for source in self._old
            for name, request in self._owner.on_engine(source).items()
        }
        running = [held_of(request) for _, request in where.values()]
        found = []
        for target, group in zip(self._new, deal(running, len(self._new)), strict=True):
            for source in self._old:
                ids = tuple(held.id for held in group if where[held.id][0] == source)
                if ids:
                    found.append(Move(source, target, ids, how))
        return found

    def _until_all_left(self, act: Callable[[Move], None]) -> None:
        """Have every sample leave, those that were refused by recomputation. Raises EngineError if some stay."""
        self._serve(list(self._new))
        for tried in range(TRIES):
            moves = self._moves("recompute" if tried else self._how)
            if not moves:
                return
            time.sleep(PAUSE if tried else 0)
            for move in moves:
                act(move)
        raise EngineError(
            f"samples stay on {', '.join(move.source for move in moves)}, which therefore cannot sleep"
        )

    def _move(self) -> None:
        self._until_all_left(
            lambda move: self.moved.append(self._mover.move(move, self._version, "another size"))
        )

    def _leave(self) -> None:
        def fetch(move: Move) -> None:
            firsts = dict.fromkeys(move.ids, 0)
            self._left.append(
                (move, time.perf_counter(), *self._mover.fetch(move.source, firsts, move.how))
            )

        self._until_all_left(fetch)

    def _arrive(self) -> None:
        while self._left:
            move, began, requests, columns = self._left.pop()
            known = {request.id for request in requests}
            name = move.target if self._slept else move.source
            target = self._new[name] if self._slept else self._old[name]
            kept = self._mover.deliver(target, [piece for piece in columns if piece.id in known])
            discard(columns)
            self._owner.resume(requests, name)
            ids = tuple(sorted(known))
            size = sum(piece.bytes for piece in kept)
            ms = 1e3 * (time.perf_counter() - began)
            why = "another size"
            moved = Moved(
                move.source, name, ids, move.how, why, len(kept), size, began, ms, ms, paused=True
            )
            self.moved += [moved] if self._slept else []

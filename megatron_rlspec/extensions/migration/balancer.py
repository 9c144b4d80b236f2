"""Decide, while a rollout runs, which samples move to which engine, and have them moved.

`tail.rebalance` decides, `moves.Mover` acts. The decisions need no engine's consent: a move that an engine refuses is
recorded, and the sample stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.moves import Moved, Mover
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer, held_of
from megatron_rlspec.extensions.migration.plans.tp_planner import Change, Choice
from megatron_rlspec.extensions.migration.turns import Turns
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.types import Held, Load, Move, Request

logger = logging.getLogger(__name__)
PERIOD = 0.05  # seconds between two looks at the engines, at least
SHARE = 0.01  # of the time that looking and deciding may take, about


class Balancer:
    """A thread that looks at the engines while a `generate` runs, and moves samples where the plan says so.

    owner    of the requests
    engines  by name
    planner  decides
    lengths  of samples that have ended; `cap` is the most tokens that a response may have
    every    decode rounds between two decisions, or more where a decision takes long (`SHARE`)
    turns    brings in a second fleet; None: there is none
    """

    def __init__(
        self,
        owner: RunningRequests,
        engines: Mapping[str, MigratableSGLangEngine],
        planner: Rebalancer,
        lengths: Lengths,
        cap: int,
        every: int,
        turns: Turns | None = None,
    ) -> None:
        self.moves: list[Moved] = []
        self.sizes: list[dict[str, Any]] = []  # changes of the fleet that draws
        self.seconds = 0.0  # spent on looking and deciding
        self._owner = owner
        self._engines = dict(engines)
        self._mover = Mover(owner, {**engines, **(turns.second if turns else {})})
        self._turns = turns
        self._planner = planner
        self._lengths = lengths
        self._cap = cap
        self._every = every
        self._clock = RoundClock()
        self._last = 0.0  # seconds that the last plan took
        self._acted = False  # whether any move was tried
        self._counted: set[str] = set()
        self._refused = ""  # why the last move was refused, if it was
        self._began = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="balancer", daemon=True)

    def __enter__(self) -> Balancer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End after the move that runs; engines give up what they keep for samples that never came, and their files."""
        self._ended.set()
        self._thread.join()
        self._learn()
        if self._acted:
            for engine in self._engines.values():
                with suppress(EngineError):
                    engine.withdraw()

    def record(self) -> dict[str, Any]:
        """Return what a line of `moves.jsonl` holds."""
        moves = [asdict(moved) | {"began": moved.began - self._began} for moved in self.moves]
        return {"moves": moves, "sizes": self.sizes, "decision_seconds": self.seconds}

    def _run(self) -> None:
        while not self._ended.wait(
            max(PERIOD, self._every * self._clock.seconds, self._last / SHARE)
        ):
            began = time.perf_counter()
            self._learn()
            loads = self._loads()
            ready = len(loads) > 1 and self._clock.seconds > 0  # from the second look on
            choice = self._choose(loads) if ready else Choice()
            spent = time.perf_counter() - began
            self.seconds += spent
            self._last = spent if ready else self._last
            for move in choice.moves:
                self._move(move, loads)
            if choice.change is not None:
                self._change(choice.change, loads)

    def _choose(self, loads: Sequence[Load]) -> Choice:
        if self._turns is None or self._owner.waiting:  # with requests waiting it is not the tail
            return Choice(moves=tuple(self._planner.plan(loads, self._lengths, self._cap)))
        return self._turns.choose(self._planner, loads, self._lengths, self._cap)

    def _change(self, change: Change, loads: Sequence[Load]) -> None:
        """Have the second fleet take over. Of the first one's engines none is asked any more."""
        if self._ended.is_set() or self._turns is None:
            return
        self._acted = True
        began = time.perf_counter()
        size = min(load.tp for load in loads)
        taken, moved = self._turns.change(self._owner, change)
        ms = 1e3 * (time.perf_counter() - began)
        for one in moved:
            rounds = one.away_ms / 1e3 / self._clock.seconds
            self.moves.append(replace(one, rounds=rounds, tp=(size, change.tp)))
            # else the time is that of the whole change
            if one.kept and one.bytes and not one.paused:
                self._planner.moved([(one.bytes, one.ms)])
        if taken:
            row = {
                "began": began - self._began,
                "from": size,
                "to": change.tp,
                "how": change.how,
                "ms": ms,
            }
            self.sizes.append(row | {"samples": sum(map(len, change.groups))})
            self._engines = dict(self._turns.second)

    def _learn(self) -> None:
        """Count the samples that have ended since the last look. Aborted ones say nothing."""
        new = [
            sample
            for name, sample in list(self._owner.samples.items())
            if name not in self._counted
        ]
        self._counted |= {sample.request_id for sample in new}
        whole = [sample for sample in new if sample.status != "aborted"]
        self._lengths.observe(
            [len(sample.response) for sample in whole], [s.status == "truncated" for s in whole]
        )

    def _loads(self) -> list[Load]:
        """Ask every engine. One that does not answer is left out; its `generate` tells the pool why."""
        found = []
        for name, engine in list(self._engines.items()):
            try:
                load = engine.progress()
            except EngineError as error:
                logger.warning("%s takes no part in moves: %s", name, error)
                del self._engines[name]
                continue
            requests = dict(self._owner.on_engine(name))
            running = [
                _as_asked(held, requests.pop(held.id))
                for held in load.running
                if held.id in requests
            ]
            # Those that were moved to the engine, which does not decode them yet.
            running += [
                held_of(request) for request in requests.values() if request.partial is not None
            ]
            found.append(replace(load, engine=name, running=tuple(running)))
        self._clock.observe(found)
        return found

    def _move(self, move: Move, loads: Sequence[Load]) -> None:
        if self._ended.is_set():
            return
        by_name = {load.engine: load for load in loads}
        source, target = by_name[move.source], by_name[move.target]
        why = f"{len(source.running)} samples on {move.source}, {len(target.running)} on {move.target}"
        tp = source.tp, target.tp
        if tp[0] != tp[1]:
            why += f"; tensor-parallel size {tp[0]} to {tp[1]}"
        self._acted = True
        moved = self._mover.move(move, source.version, why)
        news = moved.refused and moved.refused != self._refused
        self._refused = moved.refused
        if moved.ids or news:
            self.moves.append(
                replace(moved, rounds=moved.away_ms / 1e3 / self._clock.seconds, tp=tp)
            )
        if moved.kept and moved.bytes:
            self._planner.moved([(moved.bytes, moved.ms)])


class RoundClock:
    """Seconds of a decode round, from how far samples get between two looks; 0 until it is known."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before: dict[str, Held] = {}
        self._at = 0.0

    def observe(self, loads: Sequence[Load]) -> None:
        now = time.perf_counter()
        held = {sample.id: sample for load in loads for sample in load.running}
        rounds = [
            (sample.context - before.context) / sample.accept
            for name, sample in held.items()
            if (before := self._before.get(name)) is not None and sample.context > before.context
        ]
        if rounds:
            self.seconds = (now - self._at) / float(np.median(rounds))
        self._before = held
        self._at = now


def _as_asked(held: Held, request: Request) -> Held:
    """Give a sample its own prompt: an engine that continues one takes all that came before for the prompt."""
    return replace(held, prompt=len(request.prompt.tokens), group=request.prompt.id)

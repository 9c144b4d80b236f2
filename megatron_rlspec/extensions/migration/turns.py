"""Two fleets of SGLang engines on the same devices: one draws, and the other one sleeps.

The second fleet takes over in the tail of a rollout where that pays (`tail.tp_planner`), by an `Exchange`. Outside
`generate` the first one is awake, so that pushes, statistics and checks know no other. The sleeping fleet gets no
pushes: when it wakes, it is given a copy of the newest weights, which stays on the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.exchange import Act, Exchange, Footprint, order
from megatron_rlspec.extensions.migration.moves import Moved
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import WIRE, Rebalancer
from megatron_rlspec.extensions.migration.plans.tp_planner import (
    Change,
    Choice,
    SwitchCosts,
    TPPlanner,
    choose,
)
from megatron_rlspec.memory_estimate import PROCESS_BYTES, SPARE
from megatron_rlspec.push.bucket import Named
from megatron_rlspec.push.push import Pusher, Source
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import Load, RoundStats, Scope

Fleet = dict[str, MigratableSGLangEngine]
Rounds = list[tuple[str, list[RoundStats]]]


class Turns:
    """Has a second fleet take over, and brings the first one back.

    planner         decides at which of the two sizes samples are drawn
    first, second   engines by name; the second ones sleep
    calls           of an exchange, by `calls`
    pool, pusher    of the engines that are awake; other engines than these fleets' stay as they are
    speculate       sets the run's speculation on an engine; None: there is none
    """

    def __init__(
        self,
        planner: TPPlanner,
        first: Fleet,
        second: Fleet,
        calls: Sequence[Act],
        pool: EnginePool,
        pusher: Pusher,
        speculate: Callable[[str, RolloutEngine], None] | None,
    ) -> None:
        self.planner = planner
        self.first = first
        self.second = second
        self.changes = 0  # of the size
        self._rooms = {name: engine.describe() for name, engine in second.items()}
        self._calls = calls
        self._pool = pool
        self._pusher = pusher
        self._speculate = speculate
        self._copy: dict[str, torch.Tensor] = {}
        self._words: np.ndarray | None = None
        self._version = -1
        self._ms: float | None = None  # that the newest exchange took, without the moves
        self._switched = False  # whether the second fleet draws
        self._stale = False  # whether the first fleet has slept, and got no weights since
        self._over = False  # whether the second fleet has failed
        self._slept: Rounds = []
        self._reports: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def copied(self, version: int, source: Source, words: np.ndarray | None) -> Source:
        """Return the `source` of a push of `version`, of which a copy stays here. `words`: as in `Rollouts.push`."""
        self._version = version
        self._words = self._words if words is None else words
        self._stale = False
        if self._over:
            self._copy.clear()
            return source

        def tensors(scope: Scope) -> Iterator[Named]:
            for name, tensor in source(scope):
                self._keep(name, tensor.detach())
                yield name, tensor

        return tensors

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy into the memory of the push before, pinned beside a GPU: new pages take longer than the bytes."""
        held = self._copy.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available()
            )
            self._copy[name] = held
        held.copy_(tensor)

    def _push(self, names: Collection[str]) -> None:
        """Give engines that have woken the copy, and compare it with what the trainer had. Raises EngineError."""
        engines = {**self.first, **self.second}
        if self._words is not None:
            for name in names:
                engines[name].set_draft_vocabulary(self._words)
        # On one CPU core the copy's own fingerprints take seconds. The trainer's, from its device, are there.
        report = self._pusher.push(
            self._version,
            lambda scope: self._copy.items(),
            only=list(names),
            known=self._pusher.expected,
        )
        if report.failed:
            raise EngineError("; ".join(f"{name}: {why}" for name, why in report.failed.items()))
        for name in names:
            if self._speculate is not None:
                self._speculate(name, engines[name])

    # ---- decisions --------------------------------------------------------------------------------------------------

    def choose(
        self, rebalancer: Rebalancer, loads: Sequence[Load], lengths: Lengths, cap: int
    ) -> Choice:
        """Choose between staying, moves and the second fleet. It must be whole, and have room for all samples."""
        link = rebalancer.transport
        rate = link.rate if "kv" in rebalancer.modes else 0.0
        bytes_of_copy = sum(tensor.nbytes for tensor in self._copy.values())
        spent = bytes_of_copy / WIRE / 1e6 if self._ms is None else self._ms
        self.planner.costs = SwitchCosts(
            spent, token_bytes=link.token_bytes, gigabytes_per_second=rate
        )
        here = [load for load in loads if load.engine in self.first]
        whole = len(here) == len(self.first) and {load.version for load in here} == {self._version}
        possible = whole and not self._switched and not self._over
        found = choose(rebalancer, self.planner if possible else None, loads, lengths, cap)
        if found.change is None:
            return found
        if not self._has_room(found.change, here, lengths, cap):
            return choose(rebalancer, None, loads, lengths, cap)
        how = found.change.how if found.change.how in rebalancer.modes else rebalancer.modes[0]
        return replace(found, change=replace(found.change, how=how))

    def _has_room(self, change: Change, loads: Iterable[Load], lengths: Lengths, cap: int) -> bool:
        held = {sample.id: sample for load in loads for sample in load.running}
        for group, room in zip(change.groups, self._rooms.values(), strict=True):
            samples = [held[name] for name in group]
            tokens = sum(s.context + lengths.remaining(s.context - s.prompt, cap) for s in samples)
            if len(samples) > room["max_running_requests"] or tokens > room["max_total_tokens"]:
                return False
        return True

    # ---- changes ----------------------------------------------------------------------------------------------------

    def change(self, owner: RunningRequests, change: Change) -> tuple[bool, list[Moved]]:
        """Have the second fleet take over. Returns whether it did, and what moved. If not, the first one goes on."""
        with self._lock:
            began = time.perf_counter()
            self._join(self.second)
            exchange = Exchange(
                owner,
                self.first,
                self.second,
                self._push,
                self._pool.serve,
                self._version,
                how=change.how,
            )
            try:
                for engine in self.second.values():
                    if not engine.alive:
                        raise EngineError(f"{engine}: it ended while it slept")
                exchange.run(self._calls)
            except EngineError as error:
                self._give_up(error)
                return False, exchange.moved
            self._leave(self.first)
            self._switched = True
            self.changes += 1
            self._ms = 1e3 * (time.perf_counter() - began) - exchange.moving_ms
            return True, exchange.moved

    def begin(self, rebalancer: Rebalancer) -> None:
        """Before `generate`: take over what was learned, and give the first fleet weights, if it has slept since."""
        if isinstance(rebalancer.cost, CostTable):
            self.planner.renew(rebalancer.cost.of_sizes(self.planner.sizes), rebalancer.rates)
        self._refresh()

    def _refresh(self) -> None:
        if self._stale:
            self._stale = False
            try:
                self._push(self.first)
            except EngineError:
                self._try(self.first, lambda name, engine: self._push([name]))

    def end(self) -> None:
        """After `generate`: wake the first fleet, if it sleeps. It serves nothing before `begin`, or a push."""
        with self._lock:
            if not self._switched:
                return
            for name, engine in self.second.items():
                with suppress(EngineError):
                    self._slept.append((name, engine.stats()))
                    self._reports.append(engine.spec_rule_report())
            self._join(self.first)
            self._try(self.second, lambda name, engine: engine.sleep())
            self._leave(self.second)
            self._return()

    def lost(self, name: str) -> None:
        """Have the first fleet go on, if the second one was drawing and has lost an engine. Blocks.

        The samples go on from the tokens that are known. In the middle of a change the change itself fails.
        """
        if name not in self.second or not self._lock.acquire(blocking=False):
            return
        try:
            if self._switched and not self._over:
                self._join(self.first)
                self._give_up(EngineError(f"{name}: it ended, so its whole fleet gives way"))
                self._return()
                self._refresh()
        finally:
            self._lock.release()

    def taken(self) -> tuple[Rounds, list[dict[str, Any]]]:
        """Return and forget rounds and rule reports of second fleets that sleep again."""
        found = self._slept, self._reports
        self._slept, self._reports = [], []
        return found

    def replace(self, name: str, engine: RolloutEngine) -> None:
        """Take a restarted engine for one of the first fleet."""
        if name in self.first and isinstance(engine, MigratableSGLangEngine):
            self.first[name] = engine

    def _return(self) -> None:
        self._switched = False
        self._stale = True
        self._pool.serve(list(self.first))
        self._try(self.first, lambda name, engine: engine.wake())
        self._try(self.first, lambda name, engine: engine.withdraw())

    def _join(self, engines: Fleet) -> None:
        """Take engines that wake up among those that are awake; they are given no requests yet."""
        for name, engine in engines.items():
            self._pool.add(name, engine, spare=True)
            self._pusher.forget(name)

    def _leave(self, engines: Fleet) -> None:
        for name in engines:
            self._pool.remove(name)

    def _give_up(self, error: EngineError) -> None:
        """Close the second fleet for good. Its samples go on on the others."""
        self._over = True
        for name in self.second:
            self._pool.drop(name, error)

    def _try(self, engines: Fleet, act: Callable[[str, MigratableSGLangEngine], object]) -> None:
        """Act on every engine, and leave those out that fail. Raises EngineError if none is left."""
        for name, engine in engines.items():
            try:
                act(name, engine)
            except EngineError as error:
                self._over |= name in self.second
                self._pool.drop(name, error)


def calls(layout: GpuLayout, first: Fleet, second: Fleet, sizes: Mapping[str, int]) -> list[Act]:
    """Return the calls of an exchange. Without GPUs memory is not counted, as engines keep theirs while they sleep.

    Raises ValueError if a fleet does not fit beside the other one asleep.
    """
    need = layout.need
    if need is None:
        return order(Footprint(0, 0), Footprint(0, 0), 0)

    def footprint(fleet: Fleet) -> Footprint:
        name, engine = next(iter(fleet.items()))
        tokens = engine.describe()["max_total_tokens"]
        return Footprint(
            need.engine.weights // sizes[name],
            tokens * need.engine.token // sizes[name],
            PROCESS_BYTES,
        )

    return order(footprint(first), footprint(second), int(need.gpu * (1 - SPARE)))

"""A second fleet of SGLang engines, of a larger tensor-parallel size, on the devices of the first one (PAT, section 4).

SGLang cannot change its tensor-parallel size, but two fleets can share devices if one of them sleeps. The second one
takes over in the tail of a rollout where that pays: samples leave, the first fleet sleeps, the second one wakes, gets
weights, prefills the samples and goes on. Outside `generate` the first fleet is awake, so that pushes, statistics and
checks know no other. A sleeping fleet gets no pushes: when it wakes, it is given a copy of the newest weights, which
stays on the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.extensions.migration.moves import cut_off
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer, held_of
from megatron_rlspec.extensions.migration.plans.record import MoveRecord
from megatron_rlspec.extensions.migration.plans.tp_planner import (
    WIRE,
    Change,
    SwitchCosts,
    TPPlanner,
    deal,
)
from megatron_rlspec.push.bucket import Named
from megatron_rlspec.push.push import Pusher, Source
from megatron_rlspec.rollout.dispatch import Dispatch
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.types import Load, Request, RoundStats, Scope

Engines = dict[str, SGLangEngine]
Rounds = list[tuple[str, list[RoundStats]]]
TRIES = 100  # to have every sample leave: one that was just sent on cannot yet
PAUSE = 0.05  # seconds between two tries


class SecondFleet:
    """Takes over from the first fleet, and brings it back.

    planner         decides at which of the two sizes samples are generated
    first, engines  by name: the first fleet, and this one, which sleeps
    pool, pusher    of the engines that are awake
    speculate       sets the run's speculation on an engine; None: there is none
    cap             the most tokens that a response may have
    """

    def __init__(
        self,
        planner: TPPlanner,
        first: Engines,
        engines: Engines,
        pool: EnginePool,
        pusher: Pusher,
        speculate: Callable[[str, RolloutEngine], None] | None,
        cap: int,
    ) -> None:
        self.planner = planner
        self.first = first
        self.engines = engines
        self.changes = 0  # of the size
        self._rooms = [engine.describe() for engine in engines.values()]
        self._pool = pool
        self._pusher = pusher
        self._speculate = speculate
        self._cap = cap
        self._lengths = Lengths()  # of all responses of the run
        self._counted: set[str] = set()  # ids of this rollout's samples whose length counts
        self._copy: dict[str, torch.Tensor] = {}
        self._draft_vocabulary: np.ndarray | None = None
        self._version = -1
        self._ms: float | None = None  # that the newest change took
        self._asleep: set[str] = set()  # of the first fleet
        self._generates = False  # whether this fleet has taken over
        self._stale = False  # whether the first fleet has slept, and got no weights since
        self._failed = False
        self._rounds: Rounds = []
        self._reports: list[dict[str, Any]] = []
        # A change may find that an engine is lost, which calls `lost` in the same thread.
        self._lock = threading.RLock()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def copied(self, version: int, source: Source, hot_tokens: np.ndarray | None) -> Source:
        """Return the `source` of a push of `version`, of which a copy stays here. See `run.extension.Migration`."""
        self._version = version
        if hot_tokens is not None:
            self._draft_vocabulary = hot_tokens
        self._stale = False
        if self._failed:
            self._copy.clear()
            return source

        def tensors(scope: Scope) -> Iterator[Named]:
            for name, tensor in source(scope):
                self._store(name, tensor.detach())
                yield name, tensor

        return tensors

    def _store(self, name: str, tensor: torch.Tensor) -> None:
        """Copy into the memory of the push before, pinned beside a GPU: new pages take longer than the bytes."""
        copy = self._copy.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            pinned = torch.cuda.is_available()
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._copy[name] = copy
        copy.copy_(tensor)

    def _push(self, engines: Engines) -> None:
        """Give engines that have woken the copy, and compare it with what the trainer had. Raises EngineError."""
        if self._draft_vocabulary is not None:
            for engine in engines.values():
                engine.set_draft_vocabulary(self._draft_vocabulary)
        # On one CPU core the copy's own fingerprints take seconds. The trainer's, from its device, are there.
        report = self._pusher.push(
            self._version,
            lambda scope: self._copy.items(),
            only=list(engines),
            known=self._pusher.expected,
        )
        if report.failed:
            raise EngineError("; ".join(f"{name}: {why}" for name, why in report.failed.items()))
        if self._speculate is not None:
            for name, engine in engines.items():
                self._speculate(name, engine)
                if name not in self._pool.engines:
                    raise EngineError(f"{name}: it was left out when it got its speculation")

    # ---- decisions --------------------------------------------------------------------------------------------------

    def decide(self, owner: Dispatch, loads: Sequence[Load]) -> Change | None:
        """Return the change to this fleet, if it pays. The first fleet must be whole, and this one have room."""
        self._count_lengths(owner)
        whole = {load.engine for load in loads} == self.first.keys()
        versions = {load.version for load in loads}
        if self._generates or self._failed or not whole or versions != {self._version}:
            return None
        spent = self._ms
        if spent is None:  # no change was timed yet
            spent = sum(tensor.nbytes for tensor in self._copy.values()) / WIRE / 1e6
        self.planner.costs = SwitchCosts(spent)
        change = self.planner.decide(loads, loads[0].tp, self._lengths, self._cap)
        if change is None or not self._has_room(change, loads):
            return None
        return change

    def _count_lengths(self, owner: Dispatch) -> None:
        """Count the samples that have ended since the last call. Aborted ones say nothing."""
        for id, sample in list(owner.samples.items()):
            if id not in self._counted:
                self._counted.add(id)
                if sample.status != "aborted":
                    self._lengths.observe([len(sample.response)], [sample.status == "truncated"])

    def _has_room(self, change: Change, loads: Iterable[Load]) -> bool:
        samples = {held.id: held for load in loads for held in load.running}
        for ids, room in zip(change.groups, self._rooms, strict=True):
            group = [samples[id] for id in ids]
            responses = [held.context - held.prompt for held in group]
            tokens = sum(held.context for held in group)
            tokens += self._lengths.remaining(responses, self._cap).sum()
            if len(ids) > room["max_running_requests"] or tokens > room["max_total_tokens"]:
                return False
        return True

    # ---- changes ----------------------------------------------------------------------------------------------------

    def begin(self, rebalancer: Rebalancer) -> None:
        """Before `generate`: take over what was learned, and give the first fleet weights, if it has slept since."""
        self._counted.clear()
        if isinstance(rebalancer.cost, CostTable):
            self.planner.renew(rebalancer.cost.of_sizes(self.planner.sizes), rebalancer.rates)
        self._refresh()

    def take_over(self, owner: Dispatch, change: Change) -> list[MoveRecord] | None:
        """Have this fleet continue all samples. Returns what moved, or None if it failed and the first one goes on."""
        with self._lock:
            began = time.perf_counter()
            requests: dict[str, list[Request]] = {}
            self._join(self.engines)
            self._pool.serve([])  # until one of the fleets is awake and has weights
            try:
                for engine in self.engines.values():
                    if not engine.alive:
                        raise EngineError(f"{engine}: it ended while it slept")
                self._leave_first(owner, requests)
                for name, engine in self.first.items():
                    engine.sleep()
                    self._asleep.add(name)
                for engine in self.engines.values():
                    engine.wake()
                self._push(self.engines)
            except EngineError as error:
                self._give_up(error)
                self._wake_first()
                self._refresh()
                self._pool.serve(list(self.first))
                for name, cut in requests.items():
                    owner.resume(cut, name)
                return None
            for name in self.first:
                self._pool.remove(name)
            self._pool.serve(list(self.engines))
            self._generates = True
            self.changes += 1
            self._ms = 1e3 * (time.perf_counter() - began)
            return self._resume(owner, requests)

    def _leave_first(self, owner: Dispatch, requests: dict[str, list[Request]]) -> None:
        """Have all samples leave the first fleet, into `requests` by engine. Raises EngineError if some stay."""
        for _ in range(TRIES):
            running = {name: list(owner.on_engine(name)) for name in self.first}
            if not any(running.values()):
                return
            for name, ids in running.items():
                left = cut_off(owner, name, self.first[name], ids)
                requests.setdefault(name, []).extend(left)
            time.sleep(PAUSE)
        raise EngineError(f"samples stay on {', '.join(self.first)}, which therefore cannot sleep")

    def _resume(self, owner: Dispatch, requests: dict[str, list[Request]]) -> list[MoveRecord]:
        """Deal the samples to this fleet's engines."""
        by_id = {}
        for cut in requests.values():
            for request in cut:
                by_id[request.id] = request
        running = [held_of(request) for request in by_id.values()]
        records = []
        for target, group in zip(self.engines, deal(running, len(self.engines)), strict=True):
            contexts = {held.id: held.context for held in group}
            owner.resume([by_id[id] for id in sorted(contexts)], target)
            for source, cut in requests.items():
                moved = sorted(request.id for request in cut if request.id in contexts)
                tokens = sum(contexts[id] for id in moved)
                if moved:
                    records.append(MoveRecord(source, target, moved, "recompute", tokens))
        return records

    def end(self, owner: Dispatch) -> None:
        """After `generate`: wake the first fleet, if it sleeps. It serves nothing before `begin`, or a push."""
        self._count_lengths(owner)
        with self._lock:
            if not self._generates:
                return
            for name, engine in self.engines.items():
                with suppress(EngineError):
                    self._rounds.append((name, engine.stats()))
                    self._reports.append(engine.spec_rule_report())
            self._join(self.first)
            self._try(self.engines, lambda name, engine: engine.sleep())
            for name in self.engines:
                self._pool.remove(name)
            self._wake_first()
            self._pool.serve(list(self.first))

    def lost(self, name: str) -> None:
        """Have the first fleet go on, if this one was generating and has lost an engine. Blocks.

        The samples go on from the tokens that are known. A change that this loss interrupts fails by itself.
        """
        if name not in self.engines:
            return
        # Another thread's change has given this engine its samples, and ends without this thread.
        with self._lock:
            if self._generates and not self._failed:
                self._join(self.first)
                self._give_up(EngineError(f"{name}: it ended, so its whole fleet gives way"))
                self._wake_first()
                self._refresh()
                self._pool.serve(list(self.first))

    def taken(self) -> tuple[Rounds, list[dict[str, Any]]]:
        """Return and forget this fleet's rounds and rule reports, of rollouts that have ended."""
        rounds, self._rounds = self._rounds, []
        reports, self._reports = self._reports, []
        return rounds, reports

    def replace(self, name: str, engine: RolloutEngine) -> None:
        """Take a restarted engine for one of the first fleet."""
        if name in self.first and isinstance(engine, SGLangEngine):
            self.first[name] = engine

    def _wake_first(self) -> None:
        self._generates = False
        asleep = {name: self.first[name] for name in self._asleep}
        self._stale = self._stale or bool(asleep)
        self._asleep.clear()
        self._try(asleep, lambda name, engine: engine.wake())

    def _refresh(self) -> None:
        """Give the first fleet weights, if it has slept since the last push."""
        if not self._stale:
            return
        self._stale = False
        try:
            self._push(self.first)
        except EngineError:  # find out which engine fails
            self._try(self.first, lambda name, engine: self._push({name: engine}))

    def _join(self, engines: Engines) -> None:
        """Take engines that wake up among those that are awake; they are given no requests yet."""
        for name, engine in engines.items():
            self._pool.add(name, engine, spare=True)
            self._pusher.forget(name)

    def _give_up(self, error: EngineError) -> None:
        """Close this fleet for good. Its samples go on on the others."""
        self._failed = True
        for name in self.engines:
            self._pool.drop(name, error)

    def _try(self, engines: Engines, act: Callable[[str, SGLangEngine], object]) -> None:
        """Act on every engine, and leave those out that fail. Raises EngineError if none is left."""
        for name, engine in engines.items():
            try:
                act(name, engine)
            except EngineError as error:
                self._failed |= name in self.engines
                self._pool.drop(name, error)

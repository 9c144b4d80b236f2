"""The tail of rollouts, on rank 0: plans that learn from the run's rounds, moves of samples, and their record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_rlspec.config import Config
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.rollout.balancer import Balancer
from megatron_rlspec.rollout.embedded.fleet import Fleet
from megatron_rlspec.rollout.moves import Owner
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.tail.lengths import Lengths
from megatron_rlspec.tail.rebalance import Rebalancer
from megatron_rlspec.types import RoundStats


class Tail:
    """Watches every `generate` of the pool.

    planner  decides on moves between SGLang engines; None: none moves, or embedded engines plan themselves
    engines  by name, as they are at present
    sizes    their tensor-parallel sizes, where several are in use
    record   is called with what a line of `moves.jsonl` holds
    """

    def __init__(
        self,
        config: Config,
        planner: Rebalancer | None,
        pool: EnginePool,
        engines: Mapping[str, RolloutEngine],
        sizes: Mapping[str, int],
        record: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.planner = planner
        self.lengths = Lengths()  # of all responses, by which the planner predicts
        self._cap = config.rollout.max_new_tokens
        self._every = config.tail.every
        self._pool = pool
        self._engines = engines
        self._sizes = sizes
        self._record = record
        self._timed: dict[int | None, list[RoundStats]] = {}  # by size: rounds that the planner has not seen
        if planner is not None or config.tail.tp != (1,):
            pool.balance = self._balanced

    def rounds(self) -> list[tuple[str, list[RoundStats]]]:
        """Return each engine's rounds since the last call, which correct the planner's costs of its size."""
        names = {id(engine): name for name, engine in self._engines.items()}
        found = []
        for engine, stats in self._pool.everywhere(lambda engine: (engine, engine.stats())):
            name = names[id(engine)]
            found.append((name, stats))
            self._timed.setdefault(self._sizes.get(name), []).extend(stats)
        return found

    @contextmanager
    def _balanced(self, owner: Owner) -> Iterator[None]:
        """Move samples between engines during one `generate`, and record moves and changes of the size."""
        fleets = [engine for engine in self._pool.engines if isinstance(engine, Fleet)]
        if fleets:  # its ranks plan and move
            yield
            record = fleets[0].record()
            if record["moves"] or record["sizes"]:
                self._record(record)
            return
        assert self.planner is not None
        timed, self._timed = self._timed, {}
        for tp, stats in timed.items():
            self.planner.observe(stats, tp)
        serving = self._pool.engines
        engines = {name: engine for name, engine in self._engines.items() if engine in serving}
        movable = {name: engine for name, engine in engines.items() if isinstance(engine, SGLangEngine)}
        balancer = Balancer(owner, movable, self.planner, self.lengths, self._cap, self._every)
        with balancer:
            yield
        if balancer.moves:
            self._record(balancer.record())

"""Migration in a run, on rank 0: a plan that learns from the run's rounds, moves of samples, and their record.

`builders.migration` makes a `RunMigration`; `run/rollouts.py` and `run/engines.py` call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_rlspec.cotrainer.speculation import Rounds
from megatron_rlspec.extensions.migration.balancer import Balancer
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.rollout.dispatch import Dispatch
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine


class RunMigration:
    """A `run.extension.Migration`.

    planner  decides on moves between SGLang engines; None: no sample moves. Of embedded engines each rank has a planner
             of its own (`builders.member`)
    """

    def __init__(self, planner: Rebalancer | None) -> None:
        self._planner = planner

    def attach(self, pool: EnginePool, record: Callable[[Mapping[str, Any]], None]) -> None:
        self._pool = pool
        self._record = record
        pool.balance = self._balanced

    def observe(self, rounds: Rounds) -> None:
        if self._planner is not None:
            for _, stats in rounds:
                self._planner.observe(stats)

    @contextmanager
    def _balanced(self, running: Dispatch) -> Iterator[None]:
        """Move samples between engines during one `generate`, and record the moves and changes of the size.

        After an error of the `generate` nothing is written. A `Fleet` then keeps its record for the next one.
        """
        engines = dict(self._pool.engines)
        for engine in engines.values():
            if isinstance(engine, Fleet):  # the run's only engine; its ranks plan and move
                yield
                self._write(engine.record())
                return
        assert self._planner is not None
        movable = {name: e for name, e in engines.items() if isinstance(e, SGLangEngine)}
        with Balancer(running, movable, self._planner) as balancer:
            yield
        self._write({"moves": balancer.moves, "sizes": []})

    def _write(self, record: dict[str, Any]) -> None:
        """Record one `generate`, unless nothing moved. `record` has the fields of a line of `moves.jsonl`."""
        if record["moves"] or record["sizes"]:
            self._record(record)

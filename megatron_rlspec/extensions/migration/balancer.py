"""Decide, while a rollout runs, which samples move to which SGLang engine, and move them (RLHFSpec, section 6).

On rank 0. `wiring.py` makes a `Balancer` for every `generate` of the run's pool. `plans/rebalance.py` decides,
`moves.py` takes samples from their engine, and `Dispatch.resume` gives them to another. Embedded engines move samples
without this file (`embedded/`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.moves import cut_off
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer, running_sample
from megatron_rlspec.extensions.migration.plans.record import Move, MoveRecord
from megatron_rlspec.rollout.dispatch import Dispatch
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import Load

logger = logging.getLogger(__name__)
PERIOD = 0.2  # seconds between two looks at the engines


class Balancer:
    """A context manager around a `generate`: its thread looks at the engines, and moves samples as the planner decides.

    Enter it once, and make a new one for the next `generate`.

    owner    the running `generate`, which has the requests
    engines  by name
    planner  decides which samples move; `wiring.py` teaches it between rollouts
    moves    records of the moves so far, as `moves.jsonl` has them; complete after the exit
    """

    def __init__(
        self, owner: Dispatch, engines: Mapping[str, SGLangEngine], planner: Rebalancer
    ) -> None:
        self.moves: list[dict[str, Any]] = []
        self._owner = owner
        self._engines = dict(engines)
        self._planner = planner
        self._began = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="balancer", daemon=True)

    def __enter__(self) -> Balancer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until a move that has begun is done: its samples are on no engine meanwhile."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._balance()
        except BaseException as error:
            # Without this call `generate` would wait for ever for samples that have left their engine.
            self._owner.fail(error)

    def _balance(self) -> None:
        while not self._ended.wait(PERIOD):
            loads = self._loads()
            if len(loads) > 1:
                for move in self._planner.plan(loads):
                    self._move(move)

    def _loads(self) -> list[Load]:
        """Ask every engine for its load. One that does not answer is left out, for the rest of this `generate`.

        The pool learns of the failure by that engine's own `generate` call.
        """
        loads = []
        for name, engine in list(self._engines.items()):  # a copy: the loop deletes
            try:
                load = engine.progress()
            except EngineError as error:
                logger.warning("%s takes no part in moves: %s", name, error)
                del self._engines[name]
                continue
            # After `progress`: a sample that ends between the two calls has no request here, so it is left out.
            requests = dict(self._owner.on_engine(name))
            running = []
            for sample in load.running:
                request = requests.pop(sample.id, None)
                if request is not None:  # else it has ended meanwhile, or another `generate` has it
                    # SGLang continues a sample as a request whose prompt is prompt and response so far. The planner
                    # wants the length of the real prompt.
                    running.append(replace(sample, prompt=len(request.prompt.tokens)))
            for request in requests.values():
                # A sample that was moved here and is not decoded yet. Without it the next plan would send more.
                if request.partial is not None:
                    running.append(running_sample(request))
            loads.append(replace(load, engine=name, running=tuple(running)))
        return loads

    def _move(self, move: Move) -> None:
        if self._ended.is_set():  # the `generate` ends: begin no other move of this plan
            return
        began = time.perf_counter()
        # From here to `resume` the samples are on no engine: an error between the two must reach `_run`.
        requests = cut_off(self._owner, move.source, self._engines[move.source], move.ids)
        self._owner.resume(requests, move.target)
        if not requests:  # all of them ended before they could leave
            return
        record = MoveRecord(
            source=move.source,
            target=move.target,
            ids=sorted(request.id for request in requests),
            how="recompute",
            tokens=sum(running_sample(request).context for request in requests),
            ms=1e3 * (time.perf_counter() - began),
        )
        # `began`: seconds since this Balancer was made, at the start of the `generate`
        self.moves.append(asdict(record) | {"began": began - self._began})

"""What one rank of the tests of a fleet does."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import embedded_oracle as oracle
import torch

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet, Follower
from megatron_rlspec.extensions.migration.embedded.member import Member, Tick
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.push.bucket import Bucket
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Sampling, SpecConfig

PROMPTS = [[7, 3, 9, 4, 4, 21], [5], [11, 2], [30, 1, 1, 8, 19, 25, 6, 13, 14, 2, 9]]
LONG = Sampling(max_new_tokens=60, ignore_eos=True)
STEEP = Roofline(1.0, 0.3, 1e-4, 0.1, host_ms=0.1)
MODEL: dict[str, Any] = {"drafter": "close", "sharpness": 2.0}


def requests(group: int = 3):
    return oracle.requests(PROMPTS, group=group)


def engine(**options: Any) -> Any:
    known = {"dtype": torch.float64, "max_length": 128, "version": 1}
    made = oracle.engine_of(*oracle.tiny(**MODEL), OFF, MigratableEmbeddedEngine, **known, **options)
    made.set_config(SpecConfig(3))
    return made


def scenario(meeting: str) -> Any:
    """Join the job. Rank 0 drives the fleet and returns what it saw; the others follow."""
    rank, _ = oracle.meet(meeting)
    torch.set_num_threads(1)
    planner = Rebalancer(STEEP, (SpecConfig(3),))
    plans = []
    plan = planner.plan
    planner.plan = lambda loads: plans.append(plan(loads)) or plans[-1]
    member = Member(engine(), Ranks(), planner)
    if rank:
        Follower(member).close()
        oracle.audit(member.engine.cache)
        return [str(p) for p in plans if p]
    fleet = Fleet(member, every=4)
    found = lead(fleet)
    found["plans"] = [str(p) for p in plans if p]
    fleet.close()
    return found


def lead(fleet: Fleet) -> dict[str, Any]:
    """Draw, push, draw while another thread asks and aborts, and provoke errors."""
    found: dict[str, Any] = {}
    deal = fleet._deal
    # All to rank 0, so that samples must move.
    fleet._deal = lambda: [
        [request for part in deal() for request in part],
        *([] for _ in range(1, fleet.member.ranks.size)),
    ]
    seen: list[str] = []
    first = fleet.generate(requests(), LONG, lambda sample: seen.append(sample.request_id))
    found["texts"] = [s.tokens.tolist() for s in first]
    found["versions"] = [s.policy_versions for s in first]
    found["seen"] = sorted(seen) == sorted(r.id for r in requests())
    found["moved"] = fleet.record()
    found["rounds"] = sum(stats.rounds for stats in fleet.stats())

    fleet.update_weights(2, oracle.tiny(**MODEL)[1].items())
    try:
        fleet.update_weights(3, [("model.norm.weight", torch.ones(3))])
    except EngineError as error:
        found["refused"] = str(error)
    try:
        fleet.generate(requests()[:1], LONG)
    except EngineError as error:
        found["broken"] = str(error)
    fleet.begin_update(4)
    waited: list[Any] = []
    thread = threading.Thread(target=lambda: waited.extend(fleet.generate(requests()[:1], LONG)))
    thread.start()
    while not fleet._open:
        time.sleep(0.001)
    fleet.send(Bucket(list(oracle.tiny(**MODEL)[1].items())))
    fleet.end_update()
    thread.join()
    found["waited"] = [version for sample in waited for version, *_ in sample.policy_versions]
    found["same"] = fleet.fingerprints() == engine().fingerprints()

    later: list[Any] = []
    other = [replace(r, id=f"b{r.id}") for r in requests()]
    threads = [
        threading.Thread(target=lambda r=r: later.append([s.tokens.tolist() for s in fleet.generate(r, LONG)]))
        for r in (requests(), other)
    ]
    for thread in threads:
        thread.start()
    fleet.fingerprints()
    for thread in threads:
        thread.join()
    found["again"] = later
    early: list[Any] = []
    thread = threading.Thread(target=lambda: early.extend(fleet.generate(requests(), LONG)))
    with fleet._lock:  # no tick begins
        thread.start()
        while len(fleet._open) < len(requests()):
            time.sleep(0.001)
        fleet.abort()
    thread.join()
    found["early"] = [(s.status, len(s.response)) for s in early]

    endless = replace(LONG, max_new_tokens=110)
    tick, ticks = fleet._tick, itertools.count()

    def aborts_the_third() -> Tick:
        if next(ticks) == 2:  # each of the others has drawn 32 tokens at most
            fleet.abort()
        return tick()

    fleet._tick = aborts_the_third
    found["aborted"] = sorted({s.status for s in fleet.generate(requests(), endless)})
    try:
        fleet.generate([replace(requests()[0], id="x"), replace(requests()[0], id="x")], LONG)
    except EngineError as error:
        found["twice"] = str(error)
    oracle.audit(fleet.member.engine.cache)
    found["left"] = fleet.member.engine.cache.left == fleet.member.engine.cache.total
    return found

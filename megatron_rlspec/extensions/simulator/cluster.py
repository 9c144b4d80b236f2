"""A cluster, a workload and policies, and one simulated rollout of them:

    cluster = Cluster(hardware_table("H100", ModelSizes(), (1, 2, 4)))
    trace = Simulation(cluster, Workload(lengths, acceptance), Policies(), seed).run()

Policies are made of the live decision objects, which engines and runs use, too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import WAYS, How, Rebalancer, Transport
from megatron_rlspec.extensions.migration.plans.tp_planner import SwitchCosts, TPPlanner
from megatron_rlspec.extensions.simulator.run_engines import EngineRun, MoveCost, Resizing, Trace
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, LengthModel
from megatron_rlspec.extensions.simulator.sim_engine import CHUNK, Durations, SimEngine, SimSample
from megatron_rlspec.extensions.trees.tree import TreeBudget
from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

Made = TypeVar("Made")
DOWNTIME = 2  # rounds that a moved sample misses
CONFIG = re.compile(r"k(\d{1,3})(?:t(\d{1,3})n(\d{1,4}))?")  # as `SpecConfig` prints itself
# tokens to verify, between which a tree's cost is interpolated
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
PAST = 2000  # responses of earlier rollouts that the planners have seen


@dataclass(frozen=True)
class Cluster:
    """Engines of one kind.

    cost            of rounds and prefills at every tensor-parallel size in question: what happens
    engines, tp     at the start of a rollout; `engines` x `tp` ranks in all
    max_running     samples that an engine decodes at once
    max_tokens      room in the KV cache of an engine of size `tp`; 0: any number
    token_bytes     of one token in the KV caches, over all ranks of an engine
    link            GB/s out of an engine, and into one; 0: moves take no time
    switch          what a change of the tensor-parallel size costs
    pause_ms        between two decisions of planners, at least
    """

    cost: CostTable
    engines: int = 8
    tp: int = 1
    max_running: int = 256
    max_tokens: int = 0
    token_bytes: int = 131_072
    link: float = 25.0
    chunk: int = CHUNK
    switch: SwitchCosts = SwitchCosts(1000.0)
    pause_ms: float = 1000.0
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return self.engines * self.tp

    def durations(self, tp: int, configs: Sequence[SpecConfig]) -> Durations:
        """Return the durations of rounds at a size, tabulated once."""
        return self._once((tp, tuple(configs)), lambda: Durations(self.cost.at(tp), configs))

    def believed(self, tp: int) -> CostTable:
        """Return the cost at a size by which policies decide."""
        return self._once(tp, lambda: self.cost.at(tp))

    def _once(self, key: Any, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def prefill_ms(self, tp: int, tokens: int) -> float:
        """Return the ms of a prefill pass; 0 if none was measured."""
        measured = any(row.tp == tp for row in self.cost.prefill)
        return self.cost.prefill_ms(tokens, 1, tp) if measured else 0.0


@dataclass(frozen=True)
class Workload:
    """The samples of one rollout: `prompts` x `samples` responses of at most `cap` tokens."""

    lengths: LengthModel
    acceptance: AcceptanceModel
    prompts: int = 32
    samples: int = 8
    prompt_tokens: int = 256
    cap: int = 8192


@dataclass(frozen=True)
class Policies:
    """How a rollout is drawn.

    speculation  "off", "k3" (or another chain), "k5t4n24" (a tree: steps, branches, verified tokens) or "adaptive", the
                 live `SpecRule`
    budget       whether the live `TreeBudget` says how much is verified of trees, and not the configuration
    in_flight    engines take requests as samples end, instead of an even deal at the start
    ways         in which the live `Rebalancer` may move samples; empty: none moves
    resize       whether the live `TPPlanner` may change the tensor-parallel size
    every        rounds of an engine between two decisions of these planners
    trained      in RL steps, whether the drafter is trained in every one
    overlap      whether that runs beside the next rollout
    """

    speculation: str = "adaptive"
    budget: bool = False
    in_flight: bool = False
    ways: tuple[How, ...] = ()
    resize: bool = False
    every: int = 32
    trained: bool = False
    overlap: bool = False

    @classmethod
    def of(cls, name: str) -> Policies:
        """Read a name such as adaptive+in_flight+kv+tp+kd+overlap. Raises ValueError."""
        speculation, *extras = name.split("+")
        known = speculation in ("off", "adaptive") or CONFIG.fullmatch(speculation)
        moves = [extra for extra in extras if extra in WAYS]
        rest = set(extras) - {*moves, "sample", "in_flight", "tp", "kd", "overlap"}
        several = len(moves) > 1 or len(set(extras)) < len(extras)
        if not known or rest or several or ("overlap" in extras and "kd" not in extras):
            raise ValueError(
                f"{name}: expected off, k3, a tree such as k5t4n24 or adaptive, perhaps with +in_flight, +tp, one of "
                "+kv, +recompute, +auto, +sample after a tree, and +kd, perhaps with +overlap"
            )
        try:
            config = cls(speculation).config
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if "sample" in extras and (config is None or config.topk <= 1):
            raise ValueError(f"{name}: +sample is for trees such as k5t4n24")
        return cls(
            speculation,
            "sample" in extras,
            "in_flight" in extras,
            WAYS[moves[0]] if moves else (),
            "tp" in extras,
            trained="kd" in extras,
            overlap="overlap" in extras,
        )

    @property
    def config(self) -> SpecConfig | None:
        """Return what a fixed policy runs; None for the adaptive one."""
        found = CONFIG.fullmatch(self.speculation)
        if found is None:
            return OFF if self.speculation == "off" else None
        return SpecConfig(*(int(number) for number in found.groups() if number is not None))

    @property
    def shapes(self) -> list[SpecConfig]:
        """Return the sizes of tree of which a budget needs the costs."""
        largest = self.config
        if largest is None or largest.topk <= 1:
            return []
        sizes = {n for n in SIZES if n < largest.num_draft_tokens} if self.budget else set()
        return [
            replace(largest, num_draft_tokens=n) for n in sorted({*sizes, largest.num_draft_tokens})
        ]

    def candidates(self, cost: CostTable, depth: int) -> tuple[SpecConfig, ...]:
        """Return what this policy may run, by the table at hand, the largest last. Raises CostTableError.

        depth  drafts for which acceptance is known; deeper ones do not count for the adaptive policy
        """
        wanted = self.config
        if wanted is None:  # the live rule chooses among chains
            return tuple(
                config
                for config in cost.configs()
                if config.topk <= 1 and config.num_steps <= depth
            )
        if wanted != OFF and wanted not in cost.configs():
            raise CostTableError(
                f"{wanted}: the cost table holds {', '.join(map(str, cost.configs()))}"
            )
        if not self.budget:
            return (wanted,)
        alike = [
            c for c in cost.configs() if (c.num_steps, c.topk) == (wanted.num_steps, wanted.topk)
        ]
        return tuple(c for c in alike if c.num_draft_tokens <= wanted.num_draft_tokens)


class Simulation:
    """One simulated rollout. The engines, `trace` aside, tell what a real run would learn from.

    rule  of `speculation.learning.Learning.rule`: what an adaptive policy has learned; None: nothing yet

    Equal seeds give equal lengths under all policies. Raises CostTableError, and ValueError for trees without the
    acceptance of siblings.
    """

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        policies: Policies,
        seed: int,
        rule: Mapping[str, Any] | None = None,
    ) -> None:
        self.cluster = cluster
        self.workload = workload
        self.policies = policies
        self.seed = seed
        self.learned = rule
        self.candidates = policies.candidates(
            cluster.believed(cluster.tp), workload.acceptance.rates.shape[1]
        )
        if any(config.topk > 1 for config in self.candidates):
            workload.acceptance.tree(0, 1, 2)  # raises ValueError
        self.engines: list[SimEngine] = []

    def run(self) -> Trace:
        """Simulate the rollout."""
        cluster, work, policies = self.cluster, self.workload, self.policies
        samples = self._samples()
        engines = self._fleet(cluster.tp)
        # half of an even share: the rest goes where samples end early
        held = len(samples) // cluster.engines // 2
        downtime = DOWNTIME * engines[0].durations.ms(self.candidates[-1], 1, work.prompt_tokens)[0]
        run = EngineRun(
            engines,
            work.cap,
            in_flight=min(cluster.max_running, max(work.samples, held))
            if policies.in_flight
            else 0,
            rebalancer=self._rebalancer() if policies.ways else None,
            resizing=self._resizing() if policies.resize else None,
            every=policies.every,
            pause_ms=cluster.pause_ms,
            cost=MoveCost(cluster.token_bytes, cluster.link, downtime),
            lengths=self._past(),
        )
        return run.finish(samples)

    def _rng(self, *part: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *part])

    def _samples(self) -> list[SimSample]:
        work = self.workload
        lengths = (
            work.lengths.draw(work.prompts, work.samples, work.cap, self._rng(0)).ravel().tolist()
        )
        shares, regimes = work.acceptance.begin(len(lengths), self._rng(2))
        samples = []
        for i, length in enumerate(lengths):
            noise = random.Random((self.seed << 32) + i).random
            group, share, regime = i // work.samples, float(shares[i]), int(regimes[i])
            samples.append(
                SimSample(
                    f"s{i:06d}", work.prompt_tokens, length, group, share, regime, noise=noise
                )
            )
        return samples

    def _past(self) -> Lengths:
        work = self.workload
        earlier = work.lengths.draw(PAST, 1, work.cap, self._rng(4)).ravel()
        past = Lengths()
        past.observe(earlier.tolist(), (earlier >= work.cap).tolist())
        return past

    def _fleet(self, tp: int) -> list[SimEngine]:
        """Make the engines of a size, on all ranks."""
        cluster = self.cluster
        room = cluster.max_tokens * tp // cluster.tp or 1 << 50
        names = [f"tp{tp}-e{i:04d}" for i in range(cluster.ranks // tp)]
        engines = [
            SimEngine(
                name,
                cluster.durations(tp, self.candidates),
                self._policy(tp),
                self.workload.acceptance,
                self._rng(3, tp, i),
                prefill=partial(cluster.prefill_ms, tp),
                chunk=cluster.chunk,
                max_running=cluster.max_running,
                max_tokens=room,
                ranks=tp,
                budget=TreeBudget() if self.policies.budget else None,
            )
            for i, name in enumerate(names)
        ]
        self.engines += engines
        return engines

    def _policy(self, tp: int) -> SpecRule | SpecSchedule:
        if self.policies.speculation != "adaptive":
            return SpecSchedule.fixed(self.candidates[-1])
        if self.learned is None:
            return SpecRule(self.candidates, self.cluster.believed(tp))
        triples = [[c.num_steps, c.topk, c.num_draft_tokens] for c in self.candidates]
        rule = SpecRule.from_json({**self.learned, "candidates": triples})
        rule.update(cost=self.cluster.believed(tp))
        return rule

    def _rebalancer(self) -> Rebalancer:
        cluster = self.cluster
        transport = Transport(cluster.link, cluster.token_bytes)
        return Rebalancer(
            cluster.believed(cluster.tp), self.candidates, transport, modes=self.policies.ways
        )

    def _resizing(self) -> Resizing:
        cluster = self.cluster
        rates = Acceptance(max(1, *(config.num_steps for config in self.candidates))).rates
        planner = TPPlanner(cluster.cost, self.candidates, rates, cluster.switch, cluster.ranks)
        return Resizing(planner, cluster.tp, self._fleet, cluster.switch)

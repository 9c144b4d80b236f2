"""Simulated RL steps: rollouts, rewards, training, pushes, and a drafter that drifts and learns.

The live `speculation.learning` decides with which acceptance the engines' rules begin. A policy's step makes the
drafter worse, an update makes it better; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rlspec.extensions.simulator.cluster import Cluster, Policies, Simulation, Workload
from megatron_rlspec.extensions.simulator.run_engines import Trace
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule

STRIDE = 1_000_003  # between the seeds of two runs' steps


@dataclass(frozen=True)
class Training:
    """What a step takes besides its rollout. Seconds are those of all the trainer's GPUs together.

    colocated      the trainer has the engines' GPUs: nothing overlaps with a rollout, and the engines sleep meanwhile
    staleness      1: a step is trained while the next rollout is drawn
    score, train   µs a token, for rewards and log-probabilities, and for the policy's update
    push           seconds to bring the weights to the engines
    wake           seconds in which colocated engines give their memory back, and get it again
    update         time of a drafter update in the policy's step, as a share of `train`
    again          the same for the policy's forward pass, which an overlapped update needs
    drift          log-odds of acceptance that one step of the policy costs
    behind         log-odds that a drafter which is never trained has lost before the first step
    repair         share of what was lost that an update regains
    """

    colocated: bool = False
    staleness: int = 0
    score: float = 6.0
    train: float = 45.0
    push: float = 2.0
    wake: float = 5.0
    update: float = 0.2
    again: float = 0.33
    drift: float = 0.03
    behind: float = 0.0
    repair: float = 0.7


@dataclass(frozen=True)
class Step:
    """One step.

    generate, seconds  of its rollout, and of the whole step
    updated            whether the drafter was trained
    """

    generate: float
    seconds: float
    updated: bool
    trace: Trace


@dataclass(frozen=True)
class Steps:
    """All steps of a run, and their means."""

    steps: Sequence[Step]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        return sum(step.trace.tokens for step in self.steps) / sum(
            step.seconds for step in self.steps
        )

    @property
    def share(self) -> float:
        """Return the share of the time that rollouts take."""
        return sum(step.generate for step in self.steps) / sum(step.seconds for step in self.steps)

    @property
    def traces(self) -> list[Trace]:
        return [step.trace for step in self.steps]


def steps(
    cluster: Cluster,
    workload: Workload,
    policies: Policies,
    training: Training,
    count: int,
    seed: int,
) -> Steps:
    """Simulate `count` RL steps. Equal seeds give equal lengths under all policies.

    Raises CostTableError, and ValueError for an overlapped update where no GPU is idle meanwhile.
    """
    if policies.overlap and (training.colocated or training.staleness):
        raise ValueError(
            "an overlapped drafter update needs GPUs that wait: expected colocated=false and staleness=0"
        )
    run = _Run(cluster, workload, policies, training)
    return Steps([run.step(seed * STRIDE + i) for i in range(count)])


class _Run:
    """The state of `steps`."""

    def __init__(
        self, cluster: Cluster, workload: Workload, policies: Policies, training: Training
    ) -> None:
        self.cluster = cluster
        self.workload = workload
        self.policies = policies
        self.training = training
        depth = workload.acceptance.rates.shape[1]
        candidates = policies.candidates(cluster.believed(cluster.tp), depth)
        chains = list(dict.fromkeys(config.num_steps for config in candidates))
        self.learning = Learning(chains, "", Roofline.of_layers(32), learn=False)
        # log-odds that the drafter is behind
        self.gap = 0.0 if policies.trained else training.behind
        self.beside = 0.0  # seconds of an update that runs beside the next rollout

    def step(self, seed: int) -> Step:
        training = self.training
        workload = replace(self.workload, acceptance=self.workload.acceptance.shifted(-self.gap))
        adaptive = self.policies.speculation == "adaptive"
        self.learning.expect(None)
        rollout = Simulation(
            self.cluster, workload, self.policies, seed, self.learning.rule() if adaptive else None
        )
        trace = rollout.run()
        rounds = [found for engine in rollout.engines for found in engine.stats()]
        reports = [
            engine.policy.report()
            for engine in rollout.engines
            if isinstance(engine.policy, SpecRule)
        ]
        self.learning.observe(rounds, reports)

        generate = trace.makespan_ms / 1e3
        waited = max(self.beside - generate, 0.0)  # for the update that began before this rollout
        tokens = trace.tokens + workload.prompts * workload.samples * workload.prompt_tokens
        score, train = (tokens * value / 1e6 for value in (training.score, training.train))
        updated = self.policies.trained
        joined = training.update * train if updated and not self.policies.overlap else 0.0
        self.beside = (
            (training.update + training.again) * train if updated and self.policies.overlap else 0.0
        )
        self.gap += training.drift
        if updated:
            self.gap *= 1 - training.repair
        seconds = generate + waited + score + train + joined
        if training.staleness:
            seconds = max(generate, score + train + joined)
        seconds += training.push + (training.wake if training.colocated else 0.0)
        return Step(generate, seconds, updated, trace)

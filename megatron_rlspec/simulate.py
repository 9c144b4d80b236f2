"""`rlspec simulate`: what a rollout would take on a cluster that is not at hand, under several policies.

The engines' rounds and the lengths of responses are simulated. The decisions are those of the live objects: the rule of
speculation, and the rebalancer. Every result says that it is simulated, and how much of its costs was extrapolated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator
from rich.console import Console
from rich.progress import track

from megatron_rlspec import arguments, files
from megatron_rlspec.config.base import ConfigError, Count, Positive, Section, Text, Tokens
from megatron_rlspec.sim.engine import Durations, SimEngine, SimSample
from megatron_rlspec.sim.rollout import MoveCost, Trace, rollout
from megatron_rlspec.sim.samples import AcceptanceModel, LengthModel
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.roofline import HARDWARE, Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.tail.lengths import Lengths
from megatron_rlspec.tail.rebalance import Rebalancer, Transport
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

EXAMPLE = """\
example, cluster.toml:

  [cluster]
  engines = 8
  hardware = "H100"          # or table = "costs.json", written by `rlspec profile`
  parameters = 8e9
  [workload]
  prompts = 32
  samples = 8
  median = 2000              # response tokens
  p95 = 12000
  cap = 16384
  [acceptance]
  easy = [0.9, 0.85, 0.8]    # by depth, in easy and in hard stretches
  hard = [0.5, 0.4, 0.3]

  rlspec simulate cluster.toml --policies off,k3,adaptive,adaptive+in_flight,adaptive+kv
"""
Share = Annotated[float, Field(ge=0, le=1)]
Rates = Annotated[tuple[Share, ...], Field(min_length=1, max_length=64)]
How = Literal["kv", "recompute"]
DOWNTIME = 3  # rounds that a moved sample misses
PAST = 2000  # responses of earlier rollouts that the rebalancer has seen


class ClusterConfig(Section):
    engines: Annotated[int, Field(gt=0, le=4096)] = Field(8, description="engines, each with its own copy of the model")
    table: Text = Field("", description="cost table of one engine, written by `rlspec profile`")
    tp: Positive = Field(1, description="tensor parallel size of an engine: the rows of the table that count")
    hardware: Literal["", "A40", "L40S", "A100", "H100", "H20", "H200"] = Field(
        "", description="without a table: a GPU whose data sheet gives a roofline"
    )
    parameters: float = Field(7.6e9, gt=1e3, le=1e13, description="of the model, for the roofline")
    context_bytes: float = Field(147_456.0, gt=0, le=1e9, description="of one token in the KV cache")
    max_running: Positive = Field(256, description="samples that one engine decodes at once")
    max_tokens: Count = Field(0, description="room of one engine's KV cache; 0: any number")
    link: float = Field(25.0, ge=0, le=1e5, description="GB/s between two engines, for moves; 0: not charged")

    @model_validator(mode="after")
    def _one_cost(self) -> ClusterConfig:
        if bool(self.table) == bool(self.hardware):
            raise ValueError("expected either table or hardware")
        return self


class WorkloadConfig(Section):
    prompts: Positive = Field(32, description="prompts of the rollout")
    samples: Positive = Field(8, description="responses to each")
    prompt_tokens: Tokens = Field(256, description="tokens of a prompt")
    median: Annotated[float, Field(gt=1, le=1e7)] = Field(512.0, description="median response length, in tokens")
    p95: Annotated[float, Field(gt=1, le=1e7)] = Field(2048.0, description="length that 5 % of responses exceed")
    cap: Tokens = Field(8192, description="longest response")
    group: Share = Field(0.5, description="share of the lengths' variance that responses to one prompt have in common")

    @model_validator(mode="after")
    def _ordered(self) -> WorkloadConfig:
        if self.p95 <= self.median:
            raise ValueError(f"p95={self.p95:g}: expected more than median={self.median:g}")
        return self


class AcceptanceConfig(Section):
    easy: Rates = Field((0.85, 0.8, 0.75), description="acceptance rate by depth in easy stretches")
    hard: Rates = Field((0.55, 0.45, 0.4), description="the same in hard ones")
    persistence: Annotated[float, Field(ge=0, lt=1)] = Field(0.8, description="how long stretches last; 0: one token")
    share: Share = Field(0.6, description="of tokens in easy stretches, on average over samples")
    spread: Share = Field(0.15, description="standard deviation of that share between samples")

    @model_validator(mode="after")
    def _same_depth(self) -> AcceptanceConfig:
        if len(self.easy) != len(self.hard):
            raise ValueError(f"easy has {len(self.easy)} rates and hard {len(self.hard)}; expected as many")
        return self


class SimulationConfig(Section):
    """The whole file."""

    cluster: ClusterConfig
    workload: WorkloadConfig = WorkloadConfig()
    acceptance: AcceptanceConfig = AcceptanceConfig()


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print. Raises ConfigError, CostTableError and FileError, which `rlspec` prints as one line."""
    args = parser().parse_args(argv)
    if args.json:
        files.check_output(args.json)
    policies = [Policy.of(name) for name in args.policies.split(",")]
    config = read(args.config)
    cost = _cost(config.cluster)
    bar = Console(stderr=True)
    traces: dict[str, list[Trace]] = {policy.name: [] for policy in policies}
    for policy, seed in track(
        list(itertools.product(policies, range(args.seeds))), "simulate", console=bar, transient=True
    ):
        traces[policy.name].append(one(config, cost, policy, seed))
    print(table(config, traces))
    if args.json:
        files.write_output(args.json, json.dumps(summary(config, traces), indent=1) + "\n")
        print(f"wrote {args.json}")
    return 0


def read(path: Path) -> SimulationConfig:
    """Read the TOML file. Raises ConfigError: one line with the file, the option and what was expected."""
    try:
        tree = tomllib.loads(files.read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        return SimulationConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


@dataclass(frozen=True)
class Policy:
    """How a rollout is drawn: `speculation` is off, k<n> or adaptive; `ways` in which samples may move, if they do."""

    name: str
    speculation: str
    in_flight: bool
    ways: tuple[How, ...]

    @classmethod
    def of(cls, name: str) -> Policy:
        """Read a name such as adaptive+in_flight+kv. Raises ConfigError."""
        ways: dict[str, tuple[How, ...]] = {"kv": ("kv",), "recompute": ("recompute",), "auto": ("kv", "recompute")}
        speculation, *extras = name.split("+")
        known = speculation in ("off", "adaptive") or (speculation[:1] == "k" and speculation[1:].isdigit())
        moves = [extra for extra in extras if extra in ways]
        if not known or len(moves) > 1 or set(extras) - {*moves, "in_flight"}:
            raise ConfigError(
                f"--policies {name}: expected off, k3 or adaptive, perhaps with +in_flight and with one of "
                "+kv, +recompute, +auto"
            )
        return cls(name, speculation, "in_flight" in extras, ways[moves[0]] if moves else ())


def _cost(cluster: ClusterConfig) -> CostTable | Roofline:
    if cluster.table:
        return CostTable.load(cluster.table).at(cluster.tp)
    bandwidth, tflops = HARDWARE[cluster.hardware]
    return Roofline.of_hardware(bandwidth, tflops, parameters=cluster.parameters, context_bytes=cluster.context_bytes)


def one(config: SimulationConfig, cost: CostTable | Roofline, policy: Policy, seed: int) -> Trace:
    """Simulate one rollout under one policy. Equal seeds give equal lengths under all policies."""
    work = config.workload
    cluster = config.cluster
    lengths = LengthModel.of_quantiles((0.5, work.median), (0.95, work.p95), work.group)
    acceptance = _acceptance(config.acceptance, seed)
    candidates = _candidates(cost, policy, len(config.acceptance.easy))
    engines = [_engine(i, cluster, cost, policy, candidates, acceptance, seed) for i in range(cluster.engines)]
    drawn = lengths.draw(work.prompts, work.samples, work.cap, np.random.default_rng([seed, 0])).ravel()
    shares, regimes = acceptance.begin(len(drawn), np.random.default_rng([seed, 2]))
    samples = [
        SimSample(f"s{i:06d}", work.prompt_tokens, int(n), i // work.samples, float(shares[i]), int(regimes[i]))
        for i, n in enumerate(drawn)
    ]
    rebalancer = None
    past = Lengths()
    if policy.ways:
        rebalancer = Rebalancer(
            cost, candidates, Transport(cluster.link, int(cluster.context_bytes)), modes=list(policy.ways)
        )
        earlier = lengths.draw(PAST, 1, work.cap, np.random.default_rng([seed, 4])).ravel()
        past.observe(earlier.tolist(), (earlier >= work.cap).tolist())
    held = len(drawn) // cluster.engines // 2  # half of an even share: the rest goes where samples end early
    room = min(cluster.max_running, max(work.samples, held)) if policy.in_flight else 0
    downtime = DOWNTIME * engines[0].durations.ms(candidates[-1], 1, work.prompt_tokens)
    move = MoveCost(int(cluster.context_bytes), cluster.link, downtime)
    return rollout(samples, engines, work.cap, in_flight=room, rebalancer=rebalancer, cost=move, lengths=past)


def _acceptance(given: AcceptanceConfig, seed: int) -> AcceptanceModel:
    shares = np.random.default_rng([seed, 1]).normal(given.share, given.spread, 256)
    return AcceptanceModel(np.array([given.easy, given.hard]), given.persistence, np.clip(shares, 0.02, 0.98))


def _engine(
    number: int,
    cluster: ClusterConfig,
    cost: CostTable | Roofline,
    policy: Policy,
    candidates: Sequence[SpecConfig],
    acceptance: AcceptanceModel,
    seed: int,
) -> SimEngine:
    adaptive = policy.speculation == "adaptive"
    return SimEngine(
        f"e{number:04d}",
        Durations(cost, candidates),
        SpecRule(candidates, cost) if adaptive else SpecSchedule.fixed(candidates[-1]),
        acceptance,
        np.random.default_rng([seed, 3, number]),
        prefill_ms=_prefill_ms(cost),
        max_running=cluster.max_running,
        max_tokens=cluster.max_tokens or 1 << 50,
    )


def _candidates(cost: CostTable | Roofline, policy: Policy, depth: int) -> list[SpecConfig]:
    """Return the configurations of a policy. Raises ConfigError for one that the table lacks."""
    if policy.speculation == "off":
        return [OFF]
    known = list(cost.configs()) if isinstance(cost, CostTable) else [OFF, *(SpecConfig(k) for k in (1, 2, 3, 5, 7))]
    if policy.speculation != "adaptive":
        wanted = SpecConfig(int(policy.speculation[1:]))
        if isinstance(cost, CostTable) and wanted not in known:
            raise ConfigError(f"--policies {policy.name}: the cost table holds {', '.join(map(str, known))}")
        return [wanted]
    return [config for config in known if config.num_steps <= max(depth, 1) or config.off]


def _prefill_ms(cost: CostTable | Roofline) -> float:
    """Return the ms that one more prompt token takes."""
    if isinstance(cost, Roofline):
        return cost.token_ms
    return cost.prefill_ms(1024) / 1024 if cost.prefill else 0.0


def table(config: SimulationConfig, traces: Mapping[str, Sequence[Trace]]) -> str:
    """Format the comparison: medians over seeds, and the range of the ratio to the first policy."""
    cluster = config.cluster
    work = config.workload
    source = (
        cluster.table or f"roofline of {cluster.hardware} (data sheet), {cluster.parameters / 1e9:.3g} B parameters"
    )
    first = next(iter(traces.values()))
    lines = [
        f"simulated: {cluster.engines} engines, {work.prompts} x {work.samples} samples, cap {work.cap}",
        f"costs: {source}",
        f"{'policy':>24} {'seconds':>9} {'tokens/s':>10} {'ratio, worst and best seed':>28} {'busy':>6} {'moves':>6}",
    ]
    for name, runs in traces.items():
        ratios = [base.makespan_ms / run.makespan_ms for base, run in zip(first, runs, strict=True)]
        busy = float(np.median([np.mean(list(run.utilisation.values())) for run in runs]))
        ratio = f"{np.median(ratios):.2f} x [{min(ratios):.2f}, {max(ratios):.2f}]"
        seconds = float(np.median([run.makespan_ms for run in runs])) / 1e3
        rate = float(np.median([run.tokens_per_second for run in runs]))
        moves = float(np.median([len(run.moves) for run in runs]))
        lines.append(f"{name:>24} {seconds:9.1f} {rate:10.0f} {ratio:>28} {busy:6.0%} {moves:6.0f}")
    doubtful = max(run.extrapolated for runs in traces.values() for run in runs)
    if cluster.table:
        lines.append(f"{doubtful:.0%} of the cost lookups lie outside the table's measurements")
    return "\n".join(lines)


def summary(config: SimulationConfig, traces: Mapping[str, Sequence[Trace]]) -> dict[str, Any]:
    """Return the result as JSON."""
    runs = {
        name: [
            {
                "makespan_ms": run.makespan_ms,
                "tokens": run.tokens,
                "rounds": run.rounds,
                "moves": len(run.moves),
                "utilisation": run.utilisation,
                "extrapolated": run.extrapolated,
            }
            for run in found
        ]
        for name, found in traces.items()
    }
    return {"simulated": True, "config": config.model_dump(), "policies": runs}


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec simulate",
        description=__doc__.partition(": ")[2],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        example="rlspec simulate examples/simulate/h100.toml --policies off,k3,adaptive",
        first=("--policies", "--seeds"),
    )
    add = p.add_argument
    add("config", type=Path, help="TOML file: [cluster], [workload], [acceptance]")
    add(
        "--policies",
        default="off,k3,adaptive,adaptive+in_flight,adaptive+auto",
        help="what to compare; the first one is the base of the ratios (default %(default)s)",
    )
    add("--seeds", type=arguments.integer(1, 1000), default=5, help="rollouts of each policy (default 5)")
    add("--json", type=Path, metavar="FILE", help="write the result here")
    return p


if __name__ == "__main__":
    sys.exit(main())

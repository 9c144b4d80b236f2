"""Simulate how long the rollouts of a cluster take, under several policies. It needs no GPU and no model.

Lengths and acceptance come from the file, durations of rounds from a cost table or from a GPU's data sheet. What
decides are the live objects: the speculation rule of the engines, the rebalancer and the planner of tensor-parallel
sizes. All results are simulated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator
from rich.console import Console
from rich.progress import track

from megatron_rlspec import arguments, files
from megatron_rlspec.config.base import (
    ConfigError,
    Count,
    Positive,
    Section,
    Text,
    Tokens,
    first_mistake,
)
from megatron_rlspec.extensions.migration.plans.tp_planner import SwitchCosts
from megatron_rlspec.extensions.simulator.cluster import Cluster, Policies, Simulation, Workload
from megatron_rlspec.extensions.simulator.hardware import ModelSizes, hardware_table
from megatron_rlspec.extensions.simulator.run_engines import Trace
from megatron_rlspec.extensions.simulator.samples import AcceptanceModel, LengthModel
from megatron_rlspec.extensions.simulator.step import Training, steps
from megatron_rlspec.speculation.cost_table import CostTable

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
  sibling = 0.4              # for trees: of a further child, if those before it were refused

  rlspec simulate cluster.toml --policies off,k3,adaptive,adaptive+in_flight,adaptive+kv
"""
Share = Annotated[float, Field(ge=0, le=1)]
RESAMPLES = 2000  # of the bootstrap
Duration = Annotated[float, Field(ge=0, le=1e6)]
Rates = Annotated[tuple[Share, ...], Field(min_length=1, max_length=64)]


class ClusterConfig(Section):
    engines: Annotated[int, Field(gt=0, le=4096)] = Field(
        8, description="engines, each with its own copy of the model"
    )
    table: Text = Field("", description="cost table of one engine, written by `rlspec profile`")
    tp: Positive = Field(1, description="tensor-parallel size of an engine")
    sizes: tuple[Positive, ...] = Field(
        (), description="sizes that +tp may change to; empty: all of the table"
    )
    hardware: Literal["", "A40", "L40S", "A100", "H100", "H20", "H200"] = Field(
        "", description="without a table: a GPU whose data sheet gives a roofline"
    )
    parameters: float = Field(7.6e9, gt=1e3, le=1e13, description="of the model, for the roofline")
    layers: Positive = Field(
        32, description="of the model: two all-reduces each, for engines of several GPUs"
    )
    hidden: Positive = Field(4096, description="its hidden size")
    drafter: Annotated[float, Field(gt=0, le=10)] = Field(
        0.1, description="duration of a drafter pass, as a share of a target pass, for the roofline"
    )
    context_bytes: float = Field(
        131_072.0, gt=0, le=1e9, description="of one token in the KV cache"
    )
    max_running: Positive = Field(256, description="samples that one engine decodes at once")
    max_tokens: Count = Field(0, description="room of one engine's KV cache; 0: any number")
    chunk: Positive = Field(8192, description="tokens of a prefill pass, at most")
    link: float = Field(
        25.0, ge=0, le=1e5, description="GB/s out of an engine, and into one; 0: not charged"
    )
    pause: Duration = Field(
        1.0, description="seconds between two decisions of the planners, at least"
    )
    switch: float = Field(
        1.0,
        ge=0,
        le=1e5,
        description="seconds of a change of the tensor-parallel size, caches aside",
    )

    @model_validator(mode="after")
    def _one_cost(self) -> ClusterConfig:
        if bool(self.table) == bool(self.hardware):
            raise ValueError("expected either table or hardware")
        if self.table and (
            unused := sorted({"parameters", "layers", "hidden", "drafter"} & self.model_fields_set)
        ):
            raise ValueError(
                f"{unused[0]} is for the roofline of hardware; with table it has no effect"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> ClusterConfig:
        if len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"sizes={','.join(map(str, self.sizes))}: expected each size once")
        gpus = self.engines * self.tp
        for size in self.sizes:
            if gpus % size:
                raise ValueError(
                    f"sizes holds {size}, but engines={self.engines} of tp={self.tp} are {gpus} GPUs"
                )
        return self


class WorkloadConfig(Section):
    prompts: Positive = Field(32, description="prompts of the rollout")
    samples: Positive = Field(8, description="responses to each")
    prompt_tokens: Tokens = Field(256, description="tokens of a prompt")
    median: Annotated[float, Field(gt=1, le=1e7)] = Field(
        512.0, description="median response length, in tokens"
    )
    p95: Annotated[float, Field(gt=1, le=1e7)] = Field(
        2048.0, description="length that 5 % of responses exceed"
    )
    cap: Tokens = Field(8192, description="longest response")
    group: Share = Field(
        0.5,
        description="share of the lengths' variance that responses to one prompt have in common",
    )

    @model_validator(mode="after")
    def _ordered(self) -> WorkloadConfig:
        if self.p95 <= self.median:
            raise ValueError(f"p95={self.p95:g}: expected more than median={self.median:g}")
        return self


class AcceptanceConfig(Section):
    easy: Rates = Field((0.85, 0.8, 0.75), description="acceptance rate by depth in easy stretches")
    hard: Rates = Field((0.55, 0.45, 0.4), description="the same in hard ones")
    persistence: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.8, description="how long stretches last; 0: one token"
    )
    share: Share = Field(0.6, description="of tokens in easy stretches, on average over samples")
    spread: Share = Field(0.15, description="standard deviation of that share between samples")
    sibling: Share | None = Field(
        None,
        description="rate of a tree's further child, if those before it were refused; trees need it",
    )

    @model_validator(mode="after")
    def _same_depth(self) -> AcceptanceConfig:
        if len(self.easy) != len(self.hard):
            raise ValueError(
                f"easy has {len(self.easy)} rates and hard {len(self.hard)}; expected as many"
            )
        return self


class TrainingConfig(Section):
    """What a step takes besides its rollout: `simulator.step.Training`. A token takes the seconds of all GPUs."""

    steps: Annotated[int, Field(gt=0, le=10_000)] = Field(8, description="steps of a run")
    colocated: bool = Field(
        False, description="the trainer has the engines' GPUs: nothing runs beside a rollout"
    )
    staleness: Annotated[int, Field(ge=0, le=1)] = Field(
        0, description="1: train while the next rollout is drawn"
    )
    score: Duration = Field(6.0, description="µs a token, for rewards and log-probabilities")
    train: Duration = Field(45.0, description="µs a token, for the policy's update")
    push: Duration = Field(2.0, description="seconds to bring weights to the engines")
    wake: Duration = Field(
        5.0, description="seconds in which colocated engines give memory back and get it again"
    )
    update: Share = Field(
        0.2, description="time of a drafter update in the policy's step, as a share of train"
    )
    again: Share = Field(
        0.33,
        description="of the policy's forward pass, which a drafter update beside a rollout needs",
    )
    drift: Share = Field(
        0.03, description="log-odds of acceptance that one step of the policy costs"
    )
    behind: Duration = Field(
        0.0,
        description="log-odds that a drafter which is never trained has lost before the first step",
    )
    repair: Share = Field(0.7, description="share of what was lost that a drafter update regains")

    @model_validator(mode="after")
    def _apart_if_stale(self) -> TrainingConfig:
        if self.colocated and self.staleness:
            raise ValueError(
                "colocated=true trains while engines sleep, and staleness=1 while they run; expected one"
            )
        if "wake" in self.model_fields_set and not self.colocated:
            raise ValueError(
                f"wake={self.wake:g} has no effect while colocated=false: only then do engines sleep"
            )
        return self


class SimulationConfig(Section):
    """The whole file."""

    cluster: ClusterConfig
    workload: WorkloadConfig = WorkloadConfig()
    acceptance: AcceptanceConfig = AcceptanceConfig()
    training: TrainingConfig | None = None

    @model_validator(mode="after")
    def _sample_fits(self) -> SimulationConfig:
        longest = self.workload.prompt_tokens + self.workload.cap
        if 0 < self.cluster.max_tokens < longest:
            raise ValueError(
                f"cluster.max_tokens={self.cluster.max_tokens} cannot hold one sample: workload.prompt_tokens + cap "
                f"are {longest}"
            )
        return self

    @property
    def what(self) -> str:
        return "a rollout" if self.training is None else f"a step, mean of {self.training.steps}"


@dataclass(frozen=True)
class Outcome:
    """One run: a rollout, or RL steps.

    seconds  of the rollout, or of a step; `share`: the part of them in which engines generate
    """

    seconds: float
    tokens_per_second: float
    share: float
    updates: float
    traces: Sequence[Trace]

    @property
    def busy(self) -> float:
        return float(np.mean([trace.busy for trace in self.traces])) * self.share

    @property
    def moves(self) -> float:
        return float(np.mean([len(trace.moves) for trace in self.traces]))


@dataclass(frozen=True)
class Ratio:
    """A mean over seeds, with the bounds of its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        drawn = (
            np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values))).mean(1)
        )
        low, high = np.quantile(drawn, (0.025, 0.975))
        return cls(float(np.mean(values)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print. Raises ConfigError, CostTableError and FileError, which `rlspec` prints as one line."""
    args = parser().parse_args(argv)
    config = read(args.config)
    reads = {"the configuration": args.config, "its cost table": config.cluster.table or None}
    files.check_outputs({"--json": args.json}, reads)
    names = args.policies.split(",")
    if len(set(names)) < len(names):
        raise ConfigError(f"--policies {args.policies}: expected each policy once")
    policies = {name: policy(name, config) for name in names}
    found = {
        label: compare(changed, policies, args.seeds)
        for label, changed in sweep(config, args.sweep).items()
    }
    print(report(config, found))
    if args.json:
        files.write_output(args.json, json.dumps(summary(config, found), indent=1) + "\n")
        print(f"wrote {args.json}")
    return 0


def policy(name: str, config: SimulationConfig) -> Policies:
    """Read the name of a policy. Raises ConfigError."""
    try:
        found = Policies.of(name)
    except ValueError as error:
        raise ConfigError(f"--policies {error}") from None
    if found.trained and config.training is None:
        raise ConfigError(
            f"--policies {name}: a drafter learns in RL steps; expected a [training] section"
        )
    return found


def read(path: Path) -> SimulationConfig:
    """Read the TOML file. Raises ConfigError: one line with the file, the option and what was expected."""
    try:
        tree = tomllib.loads(files.read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    return validated(tree, str(path))


def validated(tree: Mapping[str, Any], source: str) -> SimulationConfig:
    """Check options. Raises ConfigError."""
    try:
        return SimulationConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_mistake(error).removeprefix(': ')}") from None


def sweep(config: SimulationConfig, change: str) -> dict[str, SimulationConfig]:
    """Return the configurations of `--sweep cluster.engines=4,8,16` by what changes. Raises ConfigError."""
    if not change:
        return {"": config}
    where, _, values = change.partition("=")
    section, _, key = where.partition(".")
    if section not in SimulationConfig.model_fields or not values:
        raise ConfigError(
            f"--sweep {change}: expected SECTION.OPTION=VALUE,VALUE such as cluster.engines=4,8"
        )
    if getattr(config, section) is None:
        raise ConfigError(f"--sweep {change}: the file has no [{section}] section")
    found: dict[str, SimulationConfig] = {}
    for value in values.split(","):
        tree = config.model_dump(exclude_unset=True)
        tree.setdefault(section, {})
        try:
            tree[section][key] = tomllib.loads(f"x = {value}")["x"]
        except (tomllib.TOMLDecodeError, RecursionError):
            tree[section][key] = value
        changed = validated(tree, f"--sweep {change}")
        if changed in found.values():
            raise ConfigError(f"--sweep {change}: {value} comes twice; expected each value once")
        found[f"{where}={value}"] = changed
    return found


def build(config: SimulationConfig, policies: Mapping[str, Policies]) -> tuple[Cluster, Workload]:
    """Return what the file describes, without the seed's part of acceptance. Raises ConfigError, CostTableError."""
    given, work, accept = config.cluster, config.workload, config.acceptance
    if given.table:
        cost = CostTable.load(given.table).check(given.tp)
        cost = cost.of_sizes({*given.sizes, given.tp}) if given.sizes else cost
    else:
        ranks = given.engines * given.tp
        sizes = {*(given.sizes or [tp for tp in (1, 2, 4, 8) if ranks % tp == 0]), given.tp}
        fixed = [p.config for p in policies.values() if p.config is not None]
        steps = {1, 2, 3, 5, 7} | {config.num_steps for config in fixed if config.topk == 1}
        trees = sorted({shape for p in policies.values() for shape in p.shapes})
        model = ModelSizes(
            given.parameters, given.context_bytes, given.layers, given.hidden, given.drafter
        )
        cost = hardware_table(given.hardware, model, sorted(sizes), sorted(steps - {0}), trees)
    cluster = Cluster(
        cost,
        given.engines,
        given.tp,
        max_running=given.max_running,
        max_tokens=given.max_tokens,
        token_bytes=int(given.context_bytes),
        link=given.link,
        chunk=given.chunk,
        pause_ms=1e3 * given.pause,
        switch=SwitchCosts(1e3 * given.switch, int(given.context_bytes), given.link),
    )
    lengths = LengthModel.of_quantiles((0.5, work.median), (0.95, work.p95), work.group)
    rates = np.array([accept.easy, accept.hard])
    acceptance = AcceptanceModel(
        rates, accept.persistence, np.array([accept.share]), accept.sibling
    )
    return cluster, Workload(
        lengths, acceptance, work.prompts, work.samples, work.prompt_tokens, work.cap
    )


def compare(
    config: SimulationConfig, policies: Mapping[str, Policies], seeds: int
) -> dict[str, list[Outcome]]:
    """Simulate every policy. Equal seeds give equal lengths and samples under all of them. Raises ConfigError."""
    cluster, workload = build(config, policies)
    for name, chosen in policies.items():
        with _naming(name):
            Simulation(cluster, workload, chosen, 0)  # before the progress bar
    outcomes: dict[str, list[Outcome]] = {name: [] for name in policies}
    runs = list(itertools.product(range(seeds), policies))
    for seed, name in track(runs, "simulate", console=Console(stderr=True), transient=True):
        drawn = replace(
            workload, acceptance=_spread(workload.acceptance, config.acceptance.spread, seed)
        )
        with _naming(name):
            outcomes[name].append(_outcome(config, cluster, drawn, policies[name], seed))
    return outcomes


@contextmanager
def _naming(policy: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{policy}: {error}") from None


def _outcome(
    config: SimulationConfig, cluster: Cluster, workload: Workload, policies: Policies, seed: int
) -> Outcome:
    if config.training is None:
        trace = Simulation(cluster, workload, policies, seed).run()
        return Outcome(trace.makespan_ms / 1e3, trace.tokens_per_second, 1.0, 0.0, [trace])
    options = config.training.model_dump()
    count = options.pop("steps")
    found = steps(cluster, workload, policies, Training(**options), count, seed)
    updates = sum(step.updated for step in found.steps) / count
    return Outcome(found.seconds, found.tokens_per_second, found.share, updates, found.traces)


def _spread(mean: AcceptanceModel, spread: float, seed: int) -> AcceptanceModel:
    shares = np.random.default_rng([seed, 1]).normal(mean.shares.mean(), spread, 256)
    return replace(mean, shares=np.clip(shares, 0.02, 0.98))


def report(config: SimulationConfig, found: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> str:
    """Format the comparison: means over seeds, and the ratio to the first policy with its 95 % interval."""
    cluster, work = config.cluster, config.workload
    source = (
        cluster.table
        or f"roofline of {cluster.hardware}'s data sheet, {cluster.parameters / 1e9:.3g} B parameters"
    )
    seeds = len(next(iter(next(iter(found.values())).values())))
    lines = [
        f"simulated: {cluster.engines} engines of tp={cluster.tp}, {work.prompts} x {work.samples} samples, "
        f"cap {work.cap}; {config.what}, {seeds} seed{'s' if seeds > 1 else ''}",
        f"costs: {source}",
    ]
    for label, outcomes in found.items():
        lines += table(label, outcomes)
    runs = [
        trace
        for outcomes in found.values()
        for some in outcomes.values()
        for run in some
        for trace in run.traces
    ]
    measured = "measurements" if cluster.table else "computed points"
    doubtful = max(trace.extrapolated for trace in runs)
    lines.append(
        f"at most {doubtful:.0%} of a rollout's cost lookups lie outside the table's {measured}"
    )
    return "\n".join(lines)


def table(label: str, found: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Format a head and one line for each policy.

    times       how many times as fast as the first policy; with several seeds with its 95 % interval
    generating  share of the time in which engines generate, of whole RL steps
    busy        share of the time in which the GPUs of the engines work
    moves       of samples in a rollout, and tp, the sizes that engines changed to: only if there were any
    """
    # a column of nothing else says nothing
    usual = {"generating": {"100%"}, "moves": {"0.0"}, "tp": {""}}
    first, baseline = next(iter(found.items()))
    rows = [(label, "seconds", "tokens/s", f"times {first}", "generating", "busy", "moves", "tp")]
    for name, runs in found.items():
        ratio = Ratio.of(
            [base.seconds / run.seconds for base, run in zip(baseline, runs, strict=True)]
        )
        seconds, rate, share, busy, moves = (
            float(np.mean([getattr(run, field) for run in runs]))
            for field in ("seconds", "tokens_per_second", "share", "busy", "moves")
        )
        sizes = sorted(
            {change.tp for run in runs for trace in run.traces for _, change, _ in trace.changes}
        )
        times = f"{ratio}" if len(runs) > 1 else f"{ratio.mean:.2f}"
        rows.append(
            (
                name,
                f"{seconds:.1f}",
                f"{rate:.0f}",
                times,
                f"{share:.0%}",
                f"{busy:.0%}",
                f"{moves:.1f}",
            )
            + (",".join(map(str, sizes)),)
        )
    columns = [
        column
        for column in zip(*rows, strict=True)
        if set(column[1:]) - usual.get(column[0], set())
    ]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in zip(*columns, strict=True):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return lines


def summary(
    config: SimulationConfig, found: Mapping[str, Mapping[str, Sequence[Outcome]]]
) -> dict[str, Any]:
    """Return the result as JSON."""
    sweeps = {
        label: {name: [_run(run) for run in runs] for name, runs in outcomes.items()}
        for label, outcomes in found.items()
    }
    return {"simulated": True, "config": config.model_dump(), "sweep": sweeps}


def _run(run: Outcome) -> dict[str, Any]:
    return {**vars(run), "traces": [_rollout(trace) for trace in run.traces]}


def _rollout(trace: Trace) -> dict[str, Any]:
    return {
        "makespan_ms": trace.makespan_ms,
        "tokens": trace.tokens,
        "rounds": trace.rounds,
        "configs": {str(config): count for config, count in sorted(trace.configs.items())},
        "moves": len(trace.moves),
        "refused": trace.refused,
        "retracted": trace.retracted,
        "tp_changes": [
            {"ms": at, "tp": change.tp, "took_ms": took} for at, change, took in trace.changes
        ],
        "utilisation": trace.utilisation,
        "extrapolated": trace.extrapolated,
    }


def parser() -> arguments.Parser:
    p = arguments.Parser(
        prog="rlspec simulate",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        example="rlspec simulate examples/simulate/h100.toml --policies off,k3,adaptive",
        first=("--policies", "--seeds", "--sweep"),
    )
    add = p.add_argument
    add(
        "config",
        type=Path,
        help="TOML file: [cluster], [workload], [acceptance], and [training] for RL steps",
    )
    add(
        "--policies",
        default="off,k3,adaptive,adaptive+in_flight,adaptive+auto",
        help="what to compare, trees such as k5t4n48+sample too; the first one is the base of the ratios "
        "(default %(default)s)",
    )
    add(
        "--seeds",
        type=arguments.integer(1, 1000),
        default=5,
        help="rollouts of each policy (default 5)",
    )
    add(
        "--sweep",
        default="",
        metavar="SECTION.OPTION=A,B",
        help="what if: repeat it with these values of an option",
    )
    add("--json", type=Path, metavar="FILE", help="write the result here")
    return p

"""Start the engines that the configuration asks for, or connect to running ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlspec import files
from megatron_rlspec.checkpoint.drafter_files import read_model, weights_of, words
from megatron_rlspec.config import Config, ConfigError, PushConfig
from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.embedded import link
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.extensions.migration.embedded.member import Member
from megatron_rlspec.extensions.migration.plans import rebalance
from megatron_rlspec.extensions.migration.plans.tp_planner import SwitchCosts, TPPlanner
from megatron_rlspec.extensions.migration.turns import Turns, calls
from megatron_rlspec.extensions.trees.tree import TreeBudget
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.models.config import DRAFTER, check_drafter_config
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.parallel import Groups
from megatron_rlspec.rollout.embedded.rounds import scratch
from megatron_rlspec.rollout.placement import Layout, token_bytes
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.rollout.sglang.client.transport import Files, GroupBroadcast, Http, Transport
from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.adapt import Adapter
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.sync.fingerprint import fingerprint
from megatron_rlspec.sync.health import Health
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

_NAME = "engine-"
LANE = "lane"  # the engine of tail.lane
_SECOND = "second-"  # engines of the second size of tail.tp


class StartingEngines:
    """The engines of a run. `launch` starts them in the background, and `wait` returns them once all of them answer.

    Raises ConfigError if no engine answers at one of `rollout.urls`.
    """

    def __init__(self, config: Config, run_dir: Path, layout: Layout | None = None) -> None:
        self._config = config
        self._timeout = config.rollout.timeout_seconds
        self._layout = layout or Layout()
        self._transport = _transport(config.push, self._layout)
        self._logs = run_dir / "logs"
        self._processes: dict[str, EngineProcess] = {}
        self._closed = False
        self._client = SGLangEngine if config.tail.rebalance == "off" else MigratableSGLangEngine
        self._attached: dict[str, RolloutEngine] = {}
        self.lanes: list[str] = []  # names of the engines of tail.lane
        self.sizes: dict[str, int] = {}  # tensor-parallel sizes by name, of engines that are launched, or have a lane
        self._fleet: Fleet | None = None
        self._turning: tuple[dict[str, MigratableSGLangEngine], dict[str, MigratableSGLangEngine]] | None = None
        tensor = config.placement.tensor
        if config.rollout.engine == "sglang" and not config.rollout.urls:
            self.sizes = {f"{_NAME}{index}": tensor for index in range(config.rollout.engines)}
            if config.tail.lane:
                self.lanes = [LANE]
                self.sizes[LANE] = config.tail.lane
            number = config.rollout.engines * tensor // config.second if config.second else 0
            self.sizes |= {f"{_SECOND}{index}": config.second for index in range(number)}
        elif config.rollout.engine == "sglang":
            self._attached = {url: self._attach(url) for url in config.rollout.urls}
            self.lanes = self._of_lane()

    def launch(self) -> None:
        """Start the processes of the engines, except those of the second fleet."""
        for name in self.sizes:
            if name not in self._attached and not name.startswith(_SECOND):
                self._launch(name)

    @property
    def own(self) -> Collection[str]:
        """Return the names of the engines that `again` can restart: those launched, without the second fleet."""
        return [name for name in self._processes if not name.startswith(_SECOND)]

    def again(self, name: str, number: int) -> RolloutEngine:
        """Launch an engine in place of the lost engine `name`, with the weights of `model.path`.

        `number` counts its restarts and names its log. Raises EngineError if it does not start.
        """
        process = self._launch(name, f".{number}")
        if self._closed:
            process.close()
        return self._connected(process.wait(self._config.placement.startup_seconds))

    def _attach(self, url: str) -> RolloutEngine:
        """Connect to a running engine. Raises ConfigError if no engine answers at `url`."""
        engine = self._client(url, timeout=self._timeout, transport=self._transport)
        try:
            described = engine.describe()
        except EngineError as error:
            raise ConfigError(f"rollout.urls={url}: no engine of `rlspec serve` answers there: {error}") from None
        if self._config.spec.mode == "off":
            return engine
        held = described["draft_vocabulary"]
        if self._config.drafter.vocabulary != held:
            raise ConfigError(
                f"drafter.vocabulary={self._config.drafter.vocabulary}, but the engine at {url} was started with "
                f"--draft-vocabulary {held}; SGLang fixes the size when it starts"
            )
        drafter = describe_drafter(self._config)
        theirs = described.get("eagle3", {})
        if drafter != theirs:
            raise ConfigError(
                f"drafter.kind={self._config.drafter.kind} is {_shown(drafter)}, but the engine at {url} was started "
                f"with {_shown(theirs)}; its option is --draft-model"
            )
        return engine

    def _of_lane(self) -> list[str]:
        """Return which running engines are the fast lane. Raises ConfigError unless all have one of the two sizes."""
        lane, tensor = self._config.tail.lane, self._config.placement.tensor
        if lane:
            self.sizes = {url: engine.describe()["tensor_parallel"] for url, engine in self._attached.items()}
        if lane and set(self.sizes.values()) != {lane, tensor}:
            held = ", ".join(f"{url} has {size}" for url, size in self.sizes.items())
            raise ConfigError(
                f"tail.lane={lane}: expected engines of this tensor-parallel size in rollout.urls, and others of "
                f"placement.tensor={tensor}; {held}"
            )
        return [url for url, size in self.sizes.items() if size == lane]

    def _launch(self, name: str, suffix: str = "") -> EngineProcess:
        log = self._logs / f"{name}{suffix}.log"
        index = list(self.sizes).index(name)
        environment = self._layout.environment(index)
        arguments = engine_arguments(self._config, self._layout, index)
        tp = self.sizes[name] if name == LANE or self._config.second else 1
        if tp > 1 and not self._layout.engines:
            arguments += ["--tp", str(tp)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = _cores(tp)
        self._processes[name] = launch(self._config.model.path, log, arguments=arguments, environment=environment)
        return self._processes[name]

    def wait(self) -> Mapping[str, RolloutEngine]:
        """Wait until all engines answer and return them by name.

        Raises EngineError, with the last line of its log, if one does not start; the others are then stopped.
        """
        if self._config.rollout.engine == "embedded":
            if not dist.is_initialized() or dist.get_world_size() == 1:
                return {"embedded": _embedded(self._config)}
            self._fleet = Fleet(member(self._config), self._config.tail.every)
            return {"embedded": self._fleet}
        try:
            started = {
                name: process.wait(self._config.placement.startup_seconds) for name, process in self._processes.items()
            }
        except BaseException:
            self.close()
            raise
        return self._attached | {name: self._connected(process) for name, process in started.items()}

    def start_second(self, engines: Mapping[str, RolloutEngine]) -> None:
        """Start the second fleet, if one is wanted, on the devices of `engines`, which sleep meanwhile; then it sleeps.

        It starts after them, because SGLang takes its share of the memory that is free then. Raises EngineError as
        `wait`.
        """
        if not self._config.second:
            return
        first = {
            name: engine
            for name, engine in engines.items()
            if isinstance(engine, MigratableSGLangEngine) and name not in self.lanes
        }
        second: dict[str, MigratableSGLangEngine] = {}
        try:
            for engine in first.values():
                engine.sleep()
            for name in self.sizes:
                if name.startswith(_SECOND):
                    self._launch(name)
            for name, process in self._processes.items():
                if name.startswith(_SECOND):
                    second[name] = MigratableSGLangEngine.of(
                        process.wait(self._config.placement.startup_seconds),
                        timeout=self._timeout,
                        transport=self._transport,
                    )
            for engine in second.values():
                engine.sleep()
            for engine in first.values():
                engine.wake()
        except BaseException:
            self.close()
            raise
        self._turning = first, second

    def turns(self, planner: TPPlanner | None, pool: EnginePool, health: Health) -> Turns | None:
        """Return what has two fleets take turns; None without a second one. Raises ConfigError for lack of memory."""
        if self._turning is None or planner is None:
            return None
        try:
            steps = calls(self._layout, *self._turning, self.sizes)
        except ValueError as error:
            raise ConfigError(f"tail.tp={','.join(map(str, self._config.tail.tp))}: {error}") from None
        return Turns(planner, *self._turning, steps, pool, health.pusher, health.speculate)

    def _connected(self, process: EngineProcess) -> SGLangEngine:
        return self._client.of(process, timeout=self._timeout, transport=self._transport)

    def close(self) -> None:
        """End the engines that this object launched."""
        self._closed = True
        if self._fleet is not None:
            self._fleet.close()
        for process in self._processes.values():
            process.close()


def describe_drafter(config: Config) -> dict[str, Any]:
    """Return what an engine's `describe` says of the EAGLE-3 drafter of this configuration; {} if it has none.

    An engine fixes the layers that the drafter reads, and the tokens that it drafts, when it starts. A push changes
    neither.
    """
    if config.drafter.kind != "eagle3":
        return {}
    hf_config, tensors = read_model(config.model.path, config.drafter.path)
    typed = check_drafter_config(hf_config[DRAFTER], config.drafter.path)
    taps = typed.taps(hf_config["num_hidden_layers"])
    return {"taps": list(taps), "words": fingerprint(words(tensors, hf_config))}


def _shown(drafter: Mapping[str, Any]) -> str:
    if not drafter:
        return "no EAGLE-3 drafter"
    return f"an EAGLE-3 drafter on the inputs of layers {drafter['taps']} and on the tokens {drafter['words']:016x}"


def learning(config: Config, hf_config: Mapping[str, Any]) -> Learning:
    """Return the learning of speculation that a run begins with. Raises CostTableError."""
    spec = config.spec
    adapter = Adapter(
        spec.candidate_steps,
        spec.cost_table,
        Roofline.of_model(hf_config, spec.ridge_tokens, config.drafter.vocabulary),
        margin=spec.switching_margin,
        probe_share=spec.probe_share,
        catch_up_share=spec.catch_up_share,
        learn=spec.learn_costs,
        tp=config.placement.tensor,
    )
    return Learning(adapter, spec.num_steps, adaptive=spec.mode == "adaptive")


def rebalancer(config: Config, hf_config: Mapping[str, Any]) -> rebalance.Rebalancer | None:
    """Return what decides on moves between the run's engines; None if none are wanted. Raises CostTableError."""
    tail, spec = config.tail, config.spec
    if tail.rebalance == "off":
        return None
    cost: CostTable | LearntCost
    if tail.lane or config.second:
        cost = CostTable.load(Path(tail.cost_table)).of_sizes(config.sizes)
    elif spec.cost_table:
        cost = CostTable.load(Path(spec.cost_table)).of_engine(config.placement.tensor)
    else:
        cost = LearntCost(Roofline.of_model(hf_config, spec.ridge_tokens, config.drafter.vocabulary))
    return rebalance.Rebalancer(
        cost,
        _candidates(config),
        rebalance.Transport(token_bytes=token_bytes(config, hf_config)),
        gain=tail.gain,
        rule=tail.rule,
        modes=rebalance.WAYS[tail.rebalance],
    )


def _candidates(config: Config) -> list[SpecConfig]:
    """Return the configurations that the run's engines choose from."""
    if config.spec.mode == "adaptive":
        return [SpecConfig(k) if k else OFF for k in config.spec.candidate_steps]
    return [config.spec.config()]


def _transport(push: PushConfig, layout: Layout) -> Transport:
    """Make the weight transport of all engines."""
    way = push.transport
    if way == "auto":  # NCCL refuses two processes on one GPU
        way = "files" if layout.together or layout.second else "group" if layout.engines else "http"
    if way == "group":
        return GroupBroadcast(push.address)
    return Files(push.directory) if way == "files" else Http()


def member(config: Config) -> Member:
    """Return this rank's part of the fleet of embedded engines. All ranks call it."""
    hf_config = files.read_json(Path(config.model.path) / "config.json")
    ranks = Ranks()
    engine = _embedded(config)
    sizes = None
    groups = Groups()
    for tp in config.tail.tp[1:]:
        groups.of(tp)  # here, where all ranks come together
    planner = rebalancer(config, hf_config)
    wire = rebalance.WIRE
    if planner is not None and config.tail.rebalance == "auto":
        known = link.once(Path(config.train.run_dir) / "link.json", ranks, engine, planner.cost)
        wire = known.gigabytes_per_second
        planner.transport = replace(planner.transport, gigabytes_per_second=wire)
        planner.ms_per_unit = planner.ms_per_unit or known.ms_per_unit
    if config.tail.tp != (1,):
        sizes = _sizes(config, hf_config, engine, ranks.size, wire)
    return Member(engine, ranks, planner, sizes, groups)


def _sizes(config: Config, hf_config: Mapping[str, Any], engine: EmbeddedEngine, ranks: int, wire: float) -> TPPlanner:
    """Return what decides on the fleet's tensor-parallel size. Raises CostTableError and ConfigError.

    wire  GB/s that a rank sends
    """
    for tp in config.tail.tp:
        try:
            engine.arch.check_size(tp)
        except ValueError as error:
            raise ConfigError(f"tail.tp: {error}") from None
    size = sum(shard.view.nbytes for shard in engine.model.tensors.values())
    costs = SwitchCosts(size / wire / 1e6, token_bytes=token_bytes(config, hf_config), gigabytes_per_second=wire)
    return sizes_planner(config, costs, ranks)


def sizes_planner(config: Config, costs: SwitchCosts, ranks: int) -> TPPlanner:
    """Return what decides at which size of tail.tp `ranks` ranks draw. Raises CostTableError."""
    candidates = _candidates(config)
    rates = Acceptance(max(1, *(candidate.num_steps for candidate in candidates))).rates
    table = CostTable.load(Path(config.tail.cost_table)).of_sizes(config.tail.tp)
    return TPPlanner(table, candidates, rates, costs, ranks, gain=config.tail.gain)


def _embedded(config: Config) -> EmbeddedEngine:
    """Build an embedded engine in this process. Raises ConfigError for a model that it does not run."""
    hf_config, tensors = read_model(config.model.path, config.drafter.path)
    share = config.spec.tree_budget
    spec = config.spec.config()
    try:
        return EmbeddedEngine(
            hf_config,
            weights_of(tensors),
            dtype=getattr(torch, config.model.dtype),
            device="cuda" if torch.cuda.is_available() else "cpu",
            verifier=config.spec.verifier,
            drafts=config.spec.drafts,
            schedule=SpecSchedule.fixed(spec),
            budget=TreeBudget(share=share) if share != "none" else None,
            candidates=[SpecConfig(k) if k else OFF for k in config.spec.candidate_steps],
            max_running_requests=config.rollout.max_running_requests,
            max_total_tokens=config.rollout.max_total_tokens or 65536,
            max_length=config.model.max_length,
            max_draft_tokens=max(64, scratch(spec)),
            draft_words=words(tensors, hf_config) if DRAFTER in hf_config else None,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _cores(ranks: int) -> str:
    """Return SGLang's binding of an engine's ranks to CPU cores: all ranks share those of this process."""
    return "|".join([",".join(map(str, sorted(os.sched_getaffinity(0))))] * ranks)


def engine_arguments(config: Config, layout: Layout, index: int = 0) -> list[str]:
    """Return the command-line options of `rlspec serve` for one of this run's engines."""
    options: dict[str, str | int | float] = {
        "dtype": config.model.dtype,
        "spec": config.spec.mode,
        "num-steps": config.spec.num_steps,
        "candidate-steps": ",".join(map(str, config.spec.candidate_steps)),
        "verifier": config.spec.verifier,
        "drafts": config.spec.drafts,
        "max-running-requests": config.rollout.max_running_requests,
        "max-total-tokens": config.rollout.max_total_tokens or layout.tokens,
        "draft-vocabulary": config.drafter.vocabulary,
    }
    if config.drafter.kind == "eagle3":
        options["draft-model"] = config.drafter.path
    if layout.engines:
        options["tp"] = len((*layout.engines, *layout.second)[index])
    if layout.engines or torch.cuda.is_available():
        options["mem-fraction-static"] = layout.mem_fraction or config.rollout.mem_fraction
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    lane = config.tail.lane and index == config.rollout.engines
    if layout.engines and (layout.together or (layout.second and not lane)):
        # Released memory comes back empty. The push restores the target; SGLang keeps the target's buffers only.
        arguments.append("--enable-memory-saver")
        if config.spec.mode != "off":
            arguments.append("--enable-draft-weights-cpu-backup")
    return arguments

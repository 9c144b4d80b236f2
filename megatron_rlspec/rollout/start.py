"""Start the engines that the configuration asks for, or connect to running ones.

`engine_kinds()` is the core's table of kinds: SGLang's, each a process or at a URL, and an embedded one for a run of
one rank. `extensions/migration/builders.py` has a table with the same names. `commands/answer.py` uses that one, and
`commands/training.py` too if samples move or embedded engines have several ranks.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.conversion.drafter_files import read_model, weights_of, words
from megatron_rlspec.engine import EngineDescription, EngineError, RolloutEngine
from megatron_rlspec.files import tell
from megatron_rlspec.memory_estimate import engine_context
from megatron_rlspec.models.config import DRAFTER, sharpness_of
from megatron_rlspec.models.directory import ends_of_text
from megatron_rlspec.models.drafter_config import check_drafter_config
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.placement import GpuLayout, devices
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import EngineProcess, launch
from megatron_rlspec.rollout.sglang.client.transport import GroupBroadcast, Handles, Http, Transport
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.tasks.data import load_tokenizer
from megatron_rlspec.tasks.order import DataError
from megatron_rlspec.types import SpecConfig, Verifier

# SGLang's mem-fraction-static if the layout does not state the engine's share of a GPU's memory.
UNPLACED_MEM_FRACTION = 0.7
# An engine has at least this many seconds to start. A short rollout.timeout_seconds finds an engine that hangs soon,
# but would end engines that are still loading.
LEAST_STARTUP = 600.0


class StartingEngines(Protocol):
    """The engines of a run, on rank 0: `launch`, then `wait`, once each. `run/engines.py` calls `again` and `close`.

    With `rollout.urls` there is nothing to launch, and `wait` alone is enough (`commands/answer.py`).
    """

    @property
    def restartable(self) -> Collection[str]:
        """Return the names of the engines that `again` can restart."""

    def launch(self) -> None:
        """Start the engines' processes in the background."""

    def wait(self) -> Mapping[str, RolloutEngine]:
        """Wait until all engines answer and return them by name.

        Raises EngineError, with the last line of its log, if one does not start; the others are then stopped.
        """

    def again(self, name: str, number: int) -> RolloutEngine:
        """Launch an engine in place of the lost engine `name`, with the weights of `model.path`.

        Blocks until the new engine answers. Raises EngineError if it does not start.

        number  the number of this start, from 1, over all engines of the run; the name of its log has it
        """

    def close(self) -> None:
        """End the engines that this object launched. Repeatable."""


class Kind(NamedTuple):
    """One kind of engines, as two functions. `run/loading.py`, `run/session.py` and `commands/answer.py` call them.

    start   for rank 0: (config, run directory, layout) -> engines that are not launched yet. Raises ConfigError if no
            engine answers at one of `rollout.urls`
    follow  for the other ranks, if engines need them: (config) -> the function that ends their part. None: they do not
    """

    start: Callable[[Config, Path, GpuLayout], StartingEngines]
    follow: Callable[[Config], Callable[[], None]] | None = None


def engine_kinds() -> dict[str, Kind]:
    """Return the kinds of engines, by the value of the option `rollout.engine`."""
    return {
        "sglang": Kind(ServedEngines),
        "embedded": Kind(lambda config, run_dir, layout: EmbeddedEngines(config)),
    }


class EmbeddedEngines:
    """The engine of a run of one rank, in this process. See `StartingEngines`."""

    restartable: Collection[str] = ()

    def __init__(self, config: Config) -> None:
        self._config = config

    def launch(self) -> None:
        """Do nothing: `wait` makes the engine."""

    def wait(self) -> Mapping[str, RolloutEngine]:
        return {"embedded": embedded(self._config)}

    def again(self, name: str, number: int) -> RolloutEngine:
        raise EngineError(f"{name}: an engine of this process is not started again")

    def close(self) -> None:
        """Do nothing: the engine ends with the process."""


class ServedEngines:
    """SGLang's engines: processes that `launch` starts, or running ones at `rollout.urls`. See `StartingEngines`.

    names  of the engines that are launched, in the order of `GpuLayout.engines`; none with `rollout.urls`

    Running engines are named by their URLs. They are neither restarted nor closed here: `restartable` has launched ones
    only. `again` runs in threads of `rollout/restart.py`, also while `close` runs.
    """

    def __init__(self, config: Config, run_dir: Path, layout: GpuLayout) -> None:
        self._config = config
        self._timeout = config.rollout.timeout_seconds
        self._startup = max(self._timeout, LEAST_STARTUP)
        self._layout = layout
        self._transport = _transport(config, layout)
        self._logs = run_dir / "logs"
        self._processes: dict[str, EngineProcess] = {}
        self._closed = False
        self._attached: dict[str, RolloutEngine] = {}
        for url in config.rollout.urls:
            self._attached[url] = self._attach(url)
        launched = 0 if config.rollout.urls else config.rollout.engines
        self.names = [f"engine-{index}" for index in range(launched)]

    @property
    def restartable(self) -> Collection[str]:
        return list(self._processes)

    def launch(self) -> None:
        for name in self.names:
            self._launch(name)

    def wait(self) -> Mapping[str, RolloutEngine]:
        try:
            started = {}
            for name, process in self._processes.items():
                started[name] = self._connected(process)
        except BaseException:
            # also an interruption: no process may outlive a run that did not start
            self.close()
            raise
        return self._attached | started

    def again(self, name: str, number: int) -> RolloutEngine:
        process = self._launch(name, f".{number}")
        # This runs in a thread of `Restarts`. If `close` ran before the new process was in `_processes`,
        # `close` did not end this process.
        if self._closed:
            process.close()  # `_connected` then raises EngineError
        return self._connected(process)

    def close(self) -> None:
        self._closed = True  # first: `again` looks at it after it has entered its process
        for process in self._processes.values():
            process.close()

    def _attach(self, url: str) -> RolloutEngine:
        """Connect to a running engine. Raises ConfigError if none answers at `url`, or it was started otherwise.

        What SGLang fixes when it starts must be as the configuration says.
        """
        engine = SGLangEngine(url, timeout=self._timeout, transport=self._transport)
        try:
            described = engine.describe()
        except EngineError as error:
            raise ConfigError(
                f"rollout.urls={url}: no engine of `rlspec serve` answers there: {error}"
            ) from None
        spec = self._config.spec
        candidates = spec.candidate_steps if spec.mode == "adaptive" else None
        check_served_speculation(url, described, spec.verifier, candidates)
        if spec.mode == "off":
            return engine
        options = self._config.drafter
        vocabulary = described["draft_vocabulary"]
        if options.vocabulary != vocabulary:
            raise ConfigError(
                f"drafter.vocabulary={options.vocabulary}, but the engine at {url} was started with "
                f"--draft-vocabulary {vocabulary}; SGLang fixes the size when it starts"
            )
        check_served_drafter({url: described}, self._config.model.path, options.path)
        return engine

    def _launch(self, name: str, suffix: str = "") -> EngineProcess:
        """Start the process of an engine in the background, in place of an earlier process of that name.

        suffix  of the log's name, so that a restart does not write to the first start's log
        """
        log = self._logs / f"{name}{suffix}.log"
        self._processes[name] = launch(
            self._config.model.path,
            log,
            arguments=engine_arguments(self._config, self._layout),
            environment=self._layout.environment(self.names.index(name)),
        )
        return self._processes[name]

    def _connected(self, process: EngineProcess) -> SGLangEngine:
        """Wait until a process answers. Raises EngineError."""
        begun = time.monotonic()
        started = process.wait(self._startup)
        tell(f"{process.log.stem}: ready after {time.monotonic() - begun:.0f} s", sys.stdout)
        return SGLangEngine.of(started, timeout=self._timeout, transport=self._transport)


def check_served_speculation(
    url: str,
    described: EngineDescription,
    verifier: Verifier,
    candidate_steps: Sequence[int] | None,
) -> None:
    """Raise ConfigError for a running engine with another verifier, or with numbers of drafts that are not candidates.

    `ServedEngines` and `CoTrainer` (`cotrainer/cotrainer.py`) call it.

    described        what the engine's `describe` returned
    candidate_steps  numbers of drafts among which the rule chooses; None: no rule chooses
    """
    if verifier != described["verifier"]:
        raise ConfigError(
            f"verifier={verifier}, but the engine at {url} was started with --verifier {described['verifier']}"
        )
    steps = {SpecConfig.from_json(value).num_steps for value in described["configs"]}
    if candidate_steps is not None and not steps <= set(candidate_steps):
        wanted = ",".join(map(str, candidate_steps))
        raise ConfigError(
            f"candidate_steps={wanted}, but the engine at {url} chooses among {sorted(steps)}; "
            f"expected it to be started with --candidate-steps {wanted}"
        )


def check_served_drafter(described: Mapping[str, Any], model: str, drafter: str) -> None:
    """Raise ConfigError for an engine whose drafter reads other layers or drafts other tokens.

    An engine fixes both when it starts, and no push changes them. `ServedEngines`, `CoTrainer` and the rollout of
    `integrations/slime/` call it.

    described  what engines' `describe` returned, by URL. Its "eagle3" is compared: layers that the drafter reads, and a
               hash of its tokens (`engine.EngineDescription`)
    model      directory of the policy
    drafter    directory of the EAGLE-3 drafter; "": none
    """
    expected: dict[str, Any] = {}
    if drafter:
        hf_config, tensors = read_model(model, drafter)
        typed = check_drafter_config(hf_config[DRAFTER], drafter)
        expected["taps"] = list(typed.taps(hf_config["num_hidden_layers"]))
        expected["words"] = fingerprint(words(tensors, hf_config))
    for url, engine in described.items():
        served = engine.get("eagle3", {})
        if served != expected:
            raise ConfigError(
                f"drafter.path={drafter} is {_description(expected)}, but the engine at {url} was started with "
                f"{_description(served)}; SGLang's option is --speculative-draft-model-path"
            )


def _description(drafter: Mapping[str, Any]) -> str:
    """Describe an EAGLE-3 drafter, by "taps" and "words", in words for a message."""
    if not drafter:
        return "no EAGLE-3 drafter"
    return f"an EAGLE-3 drafter on the inputs of layers {drafter['taps']} and on the tokens {drafter['words']:016x}"


def initial_learning(config: Config, hf_config: Mapping[str, Any]) -> Learning:
    """Return the state of a run's speculation before its first rollout: options, the model's sizes, no observations."""
    spec = config.spec
    learning = Learning(
        spec.candidate_steps,
        Roofline.of_model(hf_config, draft_vocabulary=config.drafter.vocabulary),
        adaptive=spec.mode == "adaptive",
        ragged=spec.ragged,
    )
    if config.drafter.train and spec.drafts == "coupled" and config.keyed:
        # until the trainer predicts another sharpness
        learning.sharpness = sharpness_of(hf_config)
    return learning


def _transport(config: Config, layout: GpuLayout) -> Transport:
    """Make the weight transport, which all engines share."""
    way: str = config.push.transport
    if way == "auto":
        way = _best_transport(config, layout)
    if way == "http":
        return Http()
    if way == "group":
        # NCCL refuses two processes on one GPU.
        return GroupBroadcast(config.push.address, "gloo" if layout.colocated else "")
    # here the way is "handles"; "auto" takes it only where there are GPUs
    if config.push.transport == "handles" and not torch.cuda.is_available():
        raise ConfigError(
            "push.transport=handles is for memory of a GPU, and this machine has none; expected http"
        )
    return Handles()


def _best_transport(config: Config, layout: GpuLayout) -> str:
    """Return the value of `push.transport` that "auto" stands for."""
    if config.rollout.urls or not layout.engines:
        return "http"
    if layout.colocated and _can_read_memory_of_rank_0(layout):
        return "handles"
    return "group"


def _can_read_memory_of_rank_0(layout: GpuLayout) -> bool:
    """Return whether the cards of all engines can read the memory of rank 0's card, where a push packs its buckets.

    An engine need not see rank 0's card: CUDA opens handles of cards that a process does not see. But this process must
    see all cards, because it asks torch about each pair.
    """
    visible = devices(os.environ, torch.cuda.device_count())
    first = layout.train[0]
    others = {card for engine_cards in layout.engines for card in engine_cards} - {first}
    if not others:
        return True
    if not others.issubset(visible) or first not in visible:
        return False
    index_of_rank_0 = visible.index(first)
    return all(
        torch.cuda.can_device_access_peer(visible.index(card), index_of_rank_0) for card in others
    )


def embedded(config: Config, kind: type[EmbeddedEngine] = EmbeddedEngine) -> Any:
    """Build an embedded engine in this process, with the weights of `model.path`.

    kind  its class; `extensions/migration/builders.py` passes its subclass

    Raises ConfigError for a model that the engine does not run.
    """
    hf_config, tensors = read_model(config.model.path, config.drafter.path)
    try:
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    except DataError:
        tokenizer = None  # commands that need texts have refused the model before
    try:
        return kind(
            hf_config,
            weights_of(tensors),
            dtype=getattr(torch, config.model.dtype),
            device="cuda" if torch.cuda.is_available() else "cpu",
            verifier=config.spec.verifier,
            drafts=config.spec.drafts,
            config=config.spec.config(),
            candidates=[SpecConfig.of(k) for k in config.spec.candidate_steps],
            max_running_requests=config.rollout.max_running_requests,
            # 0: the engine's own default
            max_total_tokens=config.rollout.max_total_tokens or 65536,
            max_length=config.model.max_length,
            draft_words=words(tensors, hf_config) if DRAFTER in hf_config else None,
            tokenizer=lambda: tokenizer,
            ends=ends_of_text(config.model.path, tokenizer),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def engine_arguments(config: Config, layout: GpuLayout) -> list[str]:
    """Return the command-line options of `rlspec serve`, the same for all of this run's engines.

    They are options of `rollout/sglang/http/serve.py`, or of SGLang's server.
    """
    spec = config.spec
    options: dict[str, str | int | float] = {
        "dtype": config.model.dtype,
        "spec": spec.mode,
        "verifier": spec.verifier,
        # SGLang's default is the model's longest context. Its page tables grow with it: 6 GiB at 131,072 tokens.
        "context-length": engine_context(config),
        "max-running-requests": config.rollout.max_running_requests,
        "max-total-tokens": config.rollout.max_total_tokens or layout.max_total_tokens,
    }
    if spec.mode != "off":  # without drafts `rlspec serve` refuses these
        options |= {"num-steps": spec.num_steps, "draft-vocabulary": config.drafter.vocabulary}
        if spec.mode == "adaptive":
            options["candidate-steps"] = ",".join(map(str, spec.candidate_steps))
        if spec.verifier == "position_keyed":
            options["drafts"] = spec.drafts
        if config.drafter.kind == "eagle3":
            options["draft-model"] = config.drafter.path
    if layout.engines:
        options["tp"] = len(layout.engines[0])
    # The share is of a GPU's memory: without GPUs SGLang runs on the CPU, and keeps its own default.
    if layout.engines or torch.cuda.is_available():
        options["mem-fraction-static"] = layout.mem_fraction or UNPLACED_MEM_FRACTION
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    if layout.engines and layout.colocated:
        # Memory that a sleeping engine released comes back empty. A push restores the target's weights, and SGLang the
        # target's buffers. So the drafter is backed up on the CPU.
        arguments.append("--enable-memory-saver")
        if config.spec.mode != "off":
            arguments.append("--enable-draft-weights-cpu-backup")
    if spec.ragged:
        arguments.append("--ragged")
    if config.model.trust_remote_code:
        arguments.append("--trust-remote-code")
    return [*arguments, *shlex.split(config.rollout.engine_options)]

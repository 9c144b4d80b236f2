"""What a run reads, with the checks that need the model or the machine; and the parts of a run, built from it.

In the order of a run: `commands/training.py` calls `settle`, which fills in options that the user left open. Then
`session.py` calls `load`, which reads and checks, `start_rollouts`, `build_trainer` and `build_rollouts`. Before all
this `inputs.py` has checked, without heavy imports, that the files are there and can be read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rlspec import custom, memory_choices
from megatron_rlspec.config import Command, Config, ConfigError
from megatron_rlspec.conversion.drafter_files import read_model, words
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.memory_choices import Fit, Hardware
from megatron_rlspec.memory_estimate import cache_line, check_rank, step_room
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.directory import ends_of_text
from megatron_rlspec.models.hf_files import LazyTensors
from megatron_rlspec.models.names import drafter_names
from megatron_rlspec.records.recorder import Recorder
from megatron_rlspec.rollout import placement
from megatron_rlspec.rollout.start import initial_learning
from megatron_rlspec.run import identity
from megatron_rlspec.run.engines import Engines, RunDraftRule
from megatron_rlspec.run.extension import Extensions
from megatron_rlspec.run.generation import Generation
from megatron_rlspec.run.rollouts import Rollouts, StartingRollouts
from megatron_rlspec.run.trajectory import Replay
from megatron_rlspec.speculation.vocabulary import DraftVocabulary
from megatron_rlspec.tasks import rewards
from megatron_rlspec.tasks.data import Demonstrations, Prompts, Reading, check_ids, load_tokenizer
from megatron_rlspec.train import model
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Prompt


@dataclass(frozen=True)
class Loaded:
    """What a run has read. The same on every rank, but for `layout`, which is of the rank's node.

    Three of these objects change during a run: `data` moves on in its order, `vocabulary` learns, and `replay` reads on
    in its files.

    hf_config   config.json of the policy, with the EAGLE-3 drafter's under the key `DRAFTER`, if there is one
    tensors     of policy and drafter by Hugging Face name, read from disk at each access
    eagle3_ids  token ids that an EAGLE-3 drafter drafts from, ascending, `[S] int64`; None for another drafter
    layout      which GPUs the ranks of this node and the engines have
    tokenizer   of model.path
    vocabulary  counts tokens for the draft vocabulary; None: drafts are chosen from all tokens
    data        prompts, or the demonstrations of a warm start; None for a replay, which has recorded rollouts
    held_out    prompts of evaluations by the name of their set (`DataConfig.evaluated`)
    replay      the recorded run of `rlspec replay`; None in other runs
    identity    digests of what a resumed run must share with the run that wrote its checkpoint, by names of options;
                `Saver` compares them
    """

    hf_config: dict[str, Any]
    tensors: LazyTensors
    eagle3_ids: torch.Tensor | None
    layout: placement.GpuLayout
    tokenizer: Any
    vocabulary: DraftVocabulary | None
    data: Prompts | Demonstrations | None
    held_out: dict[str, Prompts]
    replay: Replay | None
    identity: dict[str, str]

    @property
    def prompts(self) -> Prompts | None:
        """Return the prompts of rollouts; None in a warm start."""
        return self.data if isinstance(self.data, Prompts) else None

    @property
    def demonstrations(self) -> Demonstrations | None:
        """Return the demonstrations of a warm start; None in other runs."""
        return self.data if isinstance(self.data, Demonstrations) else None

    @property
    def followed(self) -> Replay | None:
        """Return the recorded run if each step takes policy and rollouts from it (`Replay.follows`), else None."""
        return self.replay if self.replay is not None and self.replay.follows else None


def load(config: Config, command: Command) -> Loaded:
    """Read what a run of a command needs, and check that it can work with it. Rank 0 prints what is being loaded.

    Raises ConfigError, DataError or CheckpointError. Writes nothing.
    """
    check_machine()
    generates = config.generates(command)
    # Import the user's functions now, so that a mistake in them ends the run before it has begun.
    for option, name in (
        ("algorithm.loss", config.algorithm.loss),
        ("algorithm.advantage", config.algorithm.advantage),
        ("drafter.loss", config.drafter.loss),
        ("rollout.function", config.rollout.function),
    ):
        if custom.is_function(name):
            custom.load(option, name)
    hf_config, tensors = read_model(config.model.path, config.drafter.path)
    model.check_model(hf_config, config.model, config.parallel)
    layout = place(config, hf_config, tensors) if generates else placement.GpuLayout()
    if os.environ.get("RANK", "0") == "0":
        print(_announcement(command, config, hf_config, generates), flush=True)
        if layout.estimated_kv_tokens:
            print(f"rlspec {command}: {cache_line(config, layout.estimated_kv_tokens)}", flush=True)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    rows: Prompts | Demonstrations | None = None
    held_out: dict[str, Prompts] = {}
    reading = Reading(config.data, tokenizer, config.longest_prompt, config.train.seed)
    if command == "sft":
        # a row has prompt and answer, so its limit is that of the model
        with_answers = reading._replace(longest=config.model.max_length)
        rows = Demonstrations(config.sft.path, with_answers, config.sft)
        check_ids(rows.held_out, hf_config["vocab_size"])
    elif generates:  # also a replay that keeps one policy
        rows = Prompts(config.data.path, reading, config.rollout.prompts_per_step)
    if rows is not None:
        check_ids(rows.rows, hf_config["vocab_size"])
    if generates:
        for name, path in config.data.evaluated.items():
            held_out[name] = Prompts(path, reading)
            check_ids(held_out[name].rows, hf_config["vocab_size"])
    digests = {"model.path": identity.of_model(config.model.path)}
    if config.drafter.path:
        digests["drafter.path"] = identity.of_model(config.drafter.path)
    if rows is not None:
        digests["sft.path" if command == "sft" else "data.path"] = identity.of_rows(rows.rows)
    replay = None
    if config.replay.run:
        replay = Replay(config.replay, config.model.path, config.train.steps, tensors)
        digests["replay.run"] = replay.recorded.run
    return Loaded(
        hf_config=hf_config,
        tensors=tensors,
        eagle3_ids=words(tensors, hf_config) if DRAFTER in hf_config else None,
        layout=layout,
        tokenizer=tokenizer,
        vocabulary=draft_vocabulary(config, hf_config, tokenizer),
        data=rows,
        held_out=held_out,
        replay=replay,
        identity=digests,
    )


def build_trainer(config: Config, loaded: Loaded, supervised: bool) -> Trainer:
    """Build the trainer with the weights that the run begins with, before any checkpoint. Collective."""
    trainer = Trainer(config, loaded.hf_config)
    trainer.load_hf(loaded.tensors)
    if loaded.eagle3_ids is not None:
        trainer.set_draft_vocabulary(loaded.eagle3_ids.numpy())
    if loaded.replay is not None:
        loaded.replay.load(trainer, loaded.replay.first)
        return trainer  # the policy is not trained, so nothing is compared with a reference
    measures_drift = config.train.drift_every and not supervised
    if config.algorithm.kl_coef or measures_drift:
        # Here, before a checkpoint is loaded: the reference has the weights of model.path.
        trainer.keep_reference()
    return trainer


def start_rollouts(config: Config, loaded: Loaded, extensions: Extensions) -> StartingRollouts:
    """Connect to engines that run already, and start reward workers, on rank 0.

    Raises ConfigError if no engine answers at one of `rollout.urls`, or the reward cannot be loaded.
    """
    kind = extensions.kind(config.rollout.engine)
    migration = None
    if extensions.migration is not None:
        migration = extensions.migration(loaded.hf_config)
    return StartingRollouts(
        initial_learning(config, loaded.hf_config),
        kind.start(config, Path(config.train.run_dir), loaded.layout),
        migration,
        # Last: it starts processes. If a later line raised an error, they would not be ended.
        rewards.Scorer(config.reward),
    )


def build_rollouts(
    config: Config,
    loaded: Loaded,
    started: StartingRollouts,
    engines_by_name: Mapping[str, RolloutEngine],
    recorder: Recorder,
    cancelled: threading.Event | None = None,
) -> Rollouts:
    """Put together the rollouts of a run, on rank 0, from its started parts. `Rollouts.start` must follow.

    engines_by_name  the result of `started.engines.wait()`
    cancelled        when it is set, rollouts end with RolloutCancelledError; None: they cannot be cancelled
    """
    held_out: dict[str, Sequence[Prompt]] = {}
    for name, prompts in loaded.held_out.items():
        recorder.event("data", prompts.summary)
        held_out[name] = prompts.rows
    # Of data.eval_path (its set has the name ""), else those that are trained on.
    canary = held_out.get("") or (loaded.prompts.rows if loaded.prompts else [])
    speculation = RunDraftRule(config, started.learning)
    engines = Engines(
        config,
        engines_by_name,
        started.engines,
        speculation,
        recorder,
        drafter=drafter_names(loaded.hf_config),
        canary=canary,
        migration=started.migration,
    )
    generation = Generation(
        config,
        loaded.tokenizer,
        engines,
        started.scorer,
        recorder,
        held_out,
        cancelled or threading.Event(),
    )
    return Rollouts(
        generation=generation,
        engines=engines,
        speculation=speculation,
        recorder=recorder,
        prompts=loaded.prompts,
        migration=started.migration,
        config=config,
    )


def check_machine() -> None:
    """Raise ConfigError if the ranks cannot run on this machine."""
    gpus = torch.cuda.device_count()
    if gpus and not torch.cuda.is_available():  # the driver shows GPUs, but CUDA does not start
        raise ConfigError(
            f"torch {torch.__version__} cannot use the {gpus} GPUs of this machine; `rlspec doctor --gpu` says why. "
            "With an empty CUDA_VISIBLE_DEVICES the CPU computes"
        )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and ranks > gpus:
        raise ConfigError(f"--ranks {ranks}, but this machine has {gpus} GPUs, one for each rank")


def place(
    config: Config, hf_config: Mapping[str, Any], tensors: LazyTensors
) -> placement.GpuLayout:
    """Return which GPUs the ranks of this node and the engines have; an empty layout if the run starts no engines.

    Raises ConfigError if that does not fit.
    """
    if config.rollout.engine != "sglang" or config.rollout.urls:
        return placement.GpuLayout()
    gpus = placement.devices(os.environ, torch.cuda.device_count())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options = config.placement
    layout = placement.place(gpus, ranks, config.rollout.engines, options.tensor, options.mode)
    if not layout.engines:
        return layout
    placement.check_heads(hf_config, options.tensor)
    if layout.colocated:
        placement.check_colocated(config.rollout.staleness, config.drafter.overlap)
    fit = fit_here(hf_config, tensors)
    return placement.with_memory(layout, fit.machine.gpu, fit.rank(config), fit.engine(config))


def fit_here(hf_config: Mapping[str, Any], tensors: LazyTensors) -> Fit:
    """Return the `Fit` of a model on this node, which must have a GPU, in a job of the launcher's ranks."""
    machine = Hardware(
        gpus=len(placement.devices(os.environ, torch.cuda.device_count())),
        gpu=torch.cuda.get_device_properties(0).total_memory,  # bytes; GPUs are alike
        ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        world=int(os.environ.get("WORLD_SIZE", "1")),
        hopper=torch.cuda.get_device_capability(0)[0] == 9,
    )
    parameters, experts = placement.count_parameters(tensors)
    return Fit(hf_config, parameters, machine, experts)


def settle(config: Config, command: Command, engines_open: bool) -> Config:
    """Return the configuration with the options that it leaves to the run; rank 0 prints the choices.

    Without a GPU nothing changes. All ranks must choose alike, without communication: the choice follows from model,
    options and machine. Call it before `load`.

    engines_open  whether the user left number and size of the engines open (`inputs.leaves_engines_open`)

    Raises ConfigError if a trainer rank does not fit its GPU.
    """
    if not placement.devices(os.environ, torch.cuda.device_count()):
        return config
    fit = fit_here(*read_model(config.model.path, config.drafter.path))
    config = memory_choices.with_distributed(config, fit.machine.world)
    rollout = config.rollout
    launches = config.generates(command) and rollout.engine == "sglang" and not rollout.urls
    config, lines = memory_choices.settled(
        config, fit, fit.rank(config), launches=launches, engines_open=engines_open
    )
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(f"rlspec {command}: {line}", flush=True)
    if not launches:  # else `place` checks it, with the engines' share
        room = step_room(fit.machine.gpu)
        check_rank(fit.rank(config), room, "a trainer rank, by estimate,")
    return config


def draft_vocabulary(
    config: Config, hf_config: Mapping[str, Any], tokenizer: Any
) -> DraftVocabulary | None:
    """Return the `DraftVocabulary` of a run; None if drafts are chosen from all tokens. Raises ConfigError."""
    size = config.drafter.vocabulary
    if not size:
        return None
    try:
        ends = ends_of_text(config.model.path, tokenizer)
        return DraftVocabulary(size, hf_config["vocab_size"], ends)
    except ValueError as error:
        raise ConfigError(f"drafter.vocabulary={size}: {error}") from None


def _announcement(
    command: str, config: Config, hf_config: Mapping[str, Any], generates: bool
) -> str:
    """Return the line for the terminal that says what is being loaded."""
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    ranks = os.environ.get("WORLD_SIZE", "1")
    place = "GPUs" if torch.cuda.is_available() else "the CPU"
    engine = f", engine {config.rollout.engine}" if generates else ""
    return (
        f"rlspec {command}: loading {config.model.path} "
        f"({hf_config['architectures'][0]}, {weights / 1e9:.2g} GB) in {config.model.dtype}, "
        f"ranks: {ranks} on {place}{engine}; run directory {Path(config.train.run_dir)}"
    )

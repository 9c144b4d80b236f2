"""The steps of a run, which `loop.py` calls in order on every rank.

Every rank holds the trainer and the data. Only rank 0 holds `Rollouts` (engines, rewards, speculation) and the records.
The other ranks wait while rank 0 generates and scores; it then broadcasts the groups as MessagePack bytes. With the
embedded engine they generate, too, in a thread that follows rank 0 (`extensions/migration/embedded/fleet.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from megatron_rlspec import custom, files, wire
from megatron_rlspec.checkpoint.drafter_files import Tensors, build_drafter, read_model, words
from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.drafter_schedules.online import OnlineLearner
from megatron_rlspec.extensions.kinds import KINDS
from megatron_rlspec.host import ranks
from megatron_rlspec.host.interruption import Interruption
from megatron_rlspec.losses import grpo
from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.config import DRAFTER
from megatron_rlspec.models.hf_files import CheckpointError, build_hf, check, publish
from megatron_rlspec.models.names import name_table
from megatron_rlspec.packing.pack import pack
from megatron_rlspec.records.live import View
from megatron_rlspec.records.metrics import Clock, Recorder, RewardWatch, read_records
from megatron_rlspec.records.sinks import open_sinks
from megatron_rlspec.rollout import placement
from megatron_rlspec.run import identity
from megatron_rlspec.run.checkpoints import Checkpoints, Drawn
from megatron_rlspec.run.rollouts import (
    RolloutCancelledError,
    Rollouts,
    StartingRollouts,
    rollout_metrics,
    without_advantage,
)
from megatron_rlspec.run.trajectory import Trajectory, TrajectoryWriter
from megatron_rlspec.speculation.vocabulary import DraftVocabulary, ends_of_text
from megatron_rlspec.sync.contract import HealthError
from megatron_rlspec.sync.push import PushError, Source, exporting
from megatron_rlspec.tasks import data, rewards
from megatron_rlspec.train import model, moments, runtime
from megatron_rlspec.train.checkpoint import SaveError, on_all_ranks
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, PackedBatch, Sample, Scope

DRIFT_SAMPLES = 16  # of a step, on which `Trainer.drift` compares the policy with model.path


class RunStopped(RuntimeError):
    """The run ended early. The message is one line: the reason, and the path of the checkpoint."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Session:
    """A run, as a context manager. Its exit ends the engines and closes the records, also after an error.

    Raises ConfigError, DataError or CheckpointError, before it writes anything, if the run cannot work.
    """

    def __init__(
        self, config: Config, data_path: str, supervised: bool = False, interruption: Interruption | None = None
    ) -> None:
        """Open the run. `supervised`: `data_path` holds demonstrations (`rlspec sft`), not prompts (`rlspec train`)."""
        self.config = config
        self.interruption = interruption or Interruption()
        self.clock = Clock()
        self.run_dir = Path(config.train.run_dir)
        self.replays = bool(config.replay.run)
        follows = self.replays and config.replay.policy_step < 0  # recorded rollouts, so no engine
        evaluates = config.sft.eval_every > 0 and bool(config.data.eval_path)
        self.generates = evaluates if supervised else not follows
        self.done = 0  # optimizer steps so far; the version of the parameters is done + 1
        self._steps = config.sft.steps if supervised else config.train.steps
        # Without one, in a warm start, the drafter learns from every batch alike.
        self.online = OnlineLearner(config) if config.drafter.train and not supervised else None
        self._last_accept_length = 0.0
        self._accept_lengths: list[float] = []  # on held-out answers, of every evaluation so far
        self._tokens = 0  # trained by the drafter at depth 1
        self._bad_steps = 0  # in a row
        self._newest: tuple[Mapping[str, float], Sequence[Group]] = ({}, ())  # for the record of the newest step
        self._policy_changed = True  # since the last push
        self._pushed: dict[str, float] = {}
        self._adapted: dict[str, float] = {}
        self._learned: dict[str, float] = {}  # metrics of the drafter's update while engines drew
        with ExitStack() as closing:
            self._closing = closing
            self._open(data_path, supervised)
            self._closing = closing.pop_all()
        self.interruption.defer()

    def _open(self, data_path: str, supervised: bool) -> None:
        config = self.config
        self.checkpoints = Checkpoints(self.run_dir, config.train.keep)
        self.main = os.environ.get("RANK", "0") == "0"
        self._check_machine()
        custom.check(config)
        self.hf_config, tensors = read_model(config.model.path, config.drafter.path)
        try:
            family = name_table(self.hf_config)
        except ValueError as error:
            raise CheckpointError(f"{config.model.path}: {error}") from None
        check(family, tensors, drafter=config.drafter.train and config.drafter.kind == "mtp")
        model.check(self.hf_config, config)
        self.layout = self._place(tensors)
        context = self.hf_config.get("max_position_embeddings")
        longest = config.model.max_length
        if context and context < longest:
            raise ConfigError(
                f"model.max_length={longest}, but config.json of {config.model.path} "
                f"says max_position_embeddings={context}"
            )
        if self.main:
            print(self._loading(supervised), flush=True)
        self.tokenizer = data.load_tokenizer(config.model.path)
        data.check_vocabulary(self.tokenizer, self.hf_config["vocab_size"])
        self.words = self._draft_vocabulary()
        source = data.Demonstrations if supervised else data.Prompts
        follows = self.replays and not self.generates
        self.data = None if follows else source(data_path, self.tokenizer, config)
        if isinstance(self.data, data.Demonstrations):
            self.data.check_ids(self.hf_config["vocab_size"])
        self.trajectory = self._open_trajectory(tensors) if self.replays else None
        self.identity = self._identity(supervised)
        starting = None
        if self.main and self.generates:
            starting = StartingRollouts(config, self.hf_config, self.tokenizer, self.run_dir, self.layout)
            self._closing.callback(starting.close)
        if starting is not None and not self.layout.together:
            starting.launch()  # engines start while the trainer is built
        self.trainer = Trainer(config, self.hf_config)
        self.trainer.load_hf(tensors, fresh_drafter=config.replay.fresh_drafter)
        if DRAFTER in self.hf_config:
            self.eagle3_words = words(tensors, self.hf_config)
            self.trainer.set_draft_vocabulary(self.eagle3_words.numpy())
        if self.trajectory is not None:
            self._load_recorded(max(0, config.replay.policy_step))
        elif config.algorithm.kl_coef or (config.train.drift_every and not supervised):
            self.trainer.keep_reference()  # the weights of model.path, also when a checkpoint is loaded next
        resumed, drawn = self._resume() if config.train.resume else ({}, Drawn())
        warm = config.drafter.train and not config.replay.fresh_drafter
        moments_event = self._take_drafter_moments(tensors) if warm and not resumed else ""
        self._recorded = self.done
        self._saved = self.done
        if self.layout.together:
            self._free_memory()
            if starting is not None:
                starting.launch()
        follow = KINDS[config.rollout.engine].follow
        if not self.main and self.generates and follow is not None:
            self._closing.callback(follow(config))
        if self.main:
            engines = starting.wait() if starting is not None else {}  # before the first write of the run
            sink = partial(open_sinks, config, self.run_dir, self.done)
            self.recorder = Recorder(self.run_dir, self.done, sink)
            self._closing.callback(self.recorder.close)
            self.recorder.started(self.done)
            self._closing.callback(lambda: self.recorder.ended(self.done))
            earlier = read_records(self.run_dir / "metrics.jsonl")
            self._reward_watch = RewardWatch([r["rollout/reward"] for r in earlier if "rollout/reward" in r])
            if moments_event:
                self.recorder.event("drafter", moments_event)
            files.write(self.run_dir / "config.json", config.model_dump_json(indent=1))
            if config.train.record and not supervised:
                self.writer = TrajectoryWriter(self.run_dir, int(config.train.record_gib * 2**30), self.done)
                if self.writer.ended:
                    self.recorder.event("trajectory", self.writer.ended)
            if starting is not None:
                prompts = self.data if isinstance(self.data, data.Prompts) else None
                cancelled = self.interruption.asked
                self.rollouts = Rollouts(starting, engines, self.recorder, prompts, resumed, drawn, cancelled)
                self._closing.callback(self.rollouts.close)

    def _identity(self, supervised: bool) -> dict[str, str]:
        """Return what a resumed run must share with the run that wrote its checkpoint, by the names of options."""
        model, drafter = self.config.model.path, self.config.drafter.path
        found = {"model.path": identity.of_model(model)}
        if drafter:
            found["drafter.path"] = identity.of_model(drafter)
        if self.data is not None:
            found["sft.path" if supervised else "data.path"] = identity.of_rows(self.data.rows)
        if self.trajectory is not None:
            found["replay.run"] = self.trajectory.digest
        return found

    def _loading(self, supervised: bool) -> str:
        """Return the line that says what is being loaded."""
        config = self.config
        weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
        ranks = os.environ.get("WORLD_SIZE", "1")
        engine = f", engine {config.rollout.engine}" if self.generates else ""
        return (
            f"rlspec {'sft' if supervised else 'train'}: loading {config.model.path} "
            f"({self.hf_config['architectures'][0]}, {weights / 1e9:.2g} GB) in {config.model.dtype}, "
            f"ranks: {ranks}{engine}; run directory {self.run_dir}"
        )

    def _draft_vocabulary(self) -> DraftVocabulary | None:
        """Return the counts that choose the words of drafts; None if drafts are chosen from all. Raises ConfigError."""
        size = self.config.drafter.vocabulary
        if not size:
            return None
        if self.config.rollout.engine == "sglang" and self.config.spec.verifier == "rejection":
            raise ConfigError(
                f"drafter.vocabulary={size}: SGLang's rejection sampling drafts from all words; expected "
                "spec.verifier=position_keyed or target_only"
            )
        try:
            return DraftVocabulary(size, self.hf_config["vocab_size"], ends_of_text(self.hf_config))
        except ValueError as error:
            raise ConfigError(f"drafter.vocabulary={size}: {error}") from None

    def _take_drafter_moments(self, tensors: Tensors) -> str:
        """Load the drafter's optimizer state of the run that wrote `model.path` or `drafter.path`.

        Returns the event's text, or "".
        """
        shapes = {name: tensors.shape(name) for name in moments.trained_names(self.trainer.table)}
        directory = Path(self.config.drafter.path or self.config.model.path)
        file, problem = moments.find(directory, self.trainer.table, shapes)
        if file is None:
            return problem
        with file:
            self.trainer.take_drafter_moments(file)
            return f"the optimizer continues after {int(file['updates'])} updates, with the moments in {file.path}"

    def _check_machine(self) -> None:
        """Raise ConfigError if this machine cannot run the configuration."""
        rollout = self.config.rollout
        spec = self.config.spec
        gpus = torch.cuda.device_count()
        if not gpus and rollout.engine == "sglang" and not rollout.urls and spec.verifier == "rejection":
            raise ConfigError(
                "spec.verifier=rejection needs SGLang's GPU kernels, and there is no GPU here; "
                "expected position_keyed or target_only"
            )
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if gpus and ranks > gpus:
            raise ConfigError(f"torchrun --nproc-per-node {ranks}, but this machine has {gpus} GPUs, one for each rank")

    def _place(self, tensors: Tensors) -> placement.Layout:
        """Return which GPUs the ranks of this node and the engines have. Raises ConfigError if that does not fit."""
        config = self.config
        gpus = placement.devices(os.environ, torch.cuda.device_count())
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not self.generates or config.rollout.engine != "sglang" or config.rollout.urls:
            return placement.Layout()
        options = config.placement
        lane, second = config.tail.lane, config.second
        for size, option in ((lane, "tail.lane"), (second, "tail.tp")):
            placement.check_heads(self.hf_config, size or 1, option)
        layout = placement.place(gpus, ranks, config.rollout.engines, options.tensor, options.mode, lane, second)
        if not layout.engines:
            return layout
        placement.check_heads(self.hf_config, options.tensor)
        if layout.together:
            placement.check_together(config)
        gpu = int(options.gpu_gib * placement.GIB) or torch.cuda.get_device_properties(0).total_memory
        sizes = {name: math.prod(tensors.shape(name)) for name in tensors}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        hopper = torch.cuda.get_device_capability(0)[0] == 9
        need = placement.Need.of(config, self.hf_config, gpu, sum(sizes.values()), experts, world, hopper)
        return placement.with_memory(layout, need)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    # ---- the recorded trajectory -------------------------------------------------------------------------------------

    def keep(self, groups: Sequence[Group] = ()) -> None:
        """With `train.record`, write the present policy, and the rollouts that the next step trains on. Collective."""
        if not self.config.train.record:
            return
        if not ranks.job().number(self.main and not self.writer.ended):
            return
        with self.clock("record"), exporting(self.trainer.export) as source:
            if source is not None and (line := self.writer.keep(self.done, source("target"), groups)):
                self.recorder.event("trajectory", line)

    def recorded(self, step: int) -> list[Group]:
        """Load the policy that a recorded run had before `step`, and return the rollouts that it trained on."""
        assert self.trajectory is not None
        self._load_recorded(step)
        if self.online is not None and self.online.overlaps:
            self._update_beside_rollout()
        return self.trajectory.groups(step)

    def _load_recorded(self, step: int) -> None:
        assert self.trajectory is not None
        self.trainer.load_hf(self.trajectory.policy(step), fresh_drafter=True)

    def _open_trajectory(self, tensors: Tensors) -> Trajectory:
        """Open `replay.run`. Raises CheckpointError if model.path is not what it began with, or it is too short."""
        options = self.config.replay
        found = Trajectory(Path(options.run))
        for name, tensor in found.policy(0).items():
            if not torch.equal(tensors[name].to(tensor.dtype), tensor):
                raise CheckpointError(
                    f"model.path={self.config.model.path}: {name} differs from what {options.run} began with"
                )
        follows = options.policy_step < 0
        asked = self._steps if follows else options.policy_step
        if asked > found.steps:
            name = "train.steps" if follows else "replay.policy_step"
            raise ConfigError(f"{name}={asked}, but {options.run} has {found.steps} recorded steps")
        return found

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Group]:
        """Return the scored groups of one step, the same on every rank.

        With `drafter.overlap`, the drafter is updated from earlier rollouts while engines draw.
        """
        drawn: list[Group] = []
        if self.online is not None and self.online.overlaps:
            self._on_rank0(lambda: self.rollouts.begin(step))
            self._update_beside_rollout()
        while not self._on_rank0(lambda: drawn.extend(self.rollouts.collect(step))):
            self.push()
        groups = self._broadcast(drawn)
        self._newest = ({}, groups)
        return groups

    def settle(self) -> None:
        """Wait for the rollout that runs ahead, if there is one. If its engines are lost, `collect` repeats it."""
        self._on_rank0(lambda: self.rollouts.settle())

    def _on_rank0(self, act: Callable[[], object], all_ranks: bool = False) -> bool:
        """Run `act` on rank 0 while the others wait, or on all ranks if `all_ranks`. Collective.

        Returns False on every rank if the caller must push and repeat `act`: no engine is left, but one is starting
        again. Any other failure of engines or rewards raises RunStopped on every rank, after a checkpoint.
        """
        reason = ""
        try:
            if self.main or all_ranks:
                act()
        except (EngineError, HealthError, rewards.RewardsFailedError) as error:
            reason = str(error)
        except RolloutCancelledError:
            reason = self.interruption.reason
        except PushError as error:
            if self.main:
                raise  # the export failed, so a checkpoint of the same parameters may be wrong as well
            reason = str(error)
        done, again, over = range(3)
        outcome = done
        if self.main and reason:
            outcome = again if self.rollouts.awaited else over
        outcome = ranks.job().number(outcome)
        if outcome == over:
            self._stop(reason)
        return outcome == done

    def _broadcast(self, groups: list[Group]) -> list[Group]:
        """Return rank 0's groups on every rank. Collective."""
        if dist.get_world_size() == 1:
            return groups
        return wire.decode_groups(ranks.job().tell(wire.encode_groups(groups) if self.main else None))

    # ---- learning ---------------------------------------------------------------------------------------------------

    def _update_beside_rollout(self) -> None:
        """Update the drafter if that is due, unless a resumed run has done so before it stopped. Collective."""
        assert self.online is not None
        if self.online.rule.due and self.online.last_update < self.done:
            self._learned = self.online.update(self.trainer, self.done)

    def demonstrations(self) -> list[Group]:
        """Return the next demonstrations; every rank reads the same rows."""
        assert isinstance(self.data, data.Demonstrations)
        return [Group(row.prompt, [row]) for row in self.data.take(self.config.sft.samples_per_step)]

    def pack(self, groups: list[Group], depth: int = 0) -> list[PackedBatch]:
        """Return this rank's micro-batches. Advantages are computed within each group.

        depth  of a measurement, in place of drafter.depth; its samples do not count towards the words of drafts
        """
        samples: list[Sample] = []
        advantages: list[float] = []
        for group in groups:
            samples += group.samples
            advantages += self._advantages(group)
        if self.main and not (self.done or self.replays or any(advantages)) and isinstance(self.data, data.Prompts):
            if rewards.known(samples):  # otherwise another event says that all failed
                self.recorder.event("reward", f"step 0: {without_advantage(samples)}")
        if self.online is not None:
            self.online.add(groups)
        if self.words is not None and not depth:
            self.words.observe(sample.response for sample in samples)
            self.trainer.set_draft_vocabulary(self.words.ids())
        return self._pack(samples, advantages, depth)

    def _pack(self, samples: list[Sample], advantages: list[float], depth: int = 0) -> list[PackedBatch]:
        algorithm = self.config.algorithm
        parallel = self.config.parallel
        return pack(
            samples,
            advantages=advantages,
            drafter_weights=self.online.weights(samples) if self.online is not None else None,
            depth=depth or self.config.drafter.depth,
            tokens_per_micro_batch=self.config.train.tokens_per_micro_batch,
            version=self.done + 1 if self.config.rollout.oldest else None,
            aggregation=algorithm.aggregation,
            constant_length=self.config.rollout.max_new_tokens,
            **runtime.placement(),
            multiple=parallel.tensor if parallel.sequence else 1,
        )

    def train_step(self, batches: list[PackedBatch], **options: Any) -> dict[str, float]:
        """Take an optimizer step of the policy and one of the drafter. Arguments and result as `Trainer.train_step`.

        Engines on the ranks' GPUs sleep from here until the next push.
        """
        if self.layout.together:
            self._on_rank0(lambda: self.rollouts.sleep())
        learns = options["objective"] == "grpo" and options.get("train_policy", True)
        if self.config.algorithm.kl_coef and learns:
            rows = self.trainer.reference_logprobs(batches)
            batches = [replace(b, reference_logprobs=row) for b, row in zip(batches, rows, strict=True)]
        options["logprob_gap"] = self.config.health.logprob_gap
        if self.online is None:
            metrics = self.trainer.train_step(batches, **options)
        else:
            metrics = self._train_online(self.online, batches, options)
        self.done += 1
        self._tokens += int(metrics.get("drafter/tokens_1", 0))
        if learns and self.due(self.config.train.drift_every):
            metrics |= self._drift(self._newest[1])
        # A skipped step counts, too: it may mean that an engine is wrong. A replay loads policies of its own.
        self._policy_changed |= options.get("train_policy", True) or self.replays
        self._newest = (metrics, self._newest[1])
        self._pushed = {}
        self._adapted = {}
        return metrics

    def _train_online(
        self, online: OnlineLearner, batches: list[PackedBatch], options: dict[str, Any]
    ) -> dict[str, float]:
        """Take a step in which the drafter learns when, and from what, `online` says."""
        due = online.rule.due
        metrics = self.trainer.train_step(batches, train_drafter=due and not online.separate, **options)
        predicted = self.trainer.prediction
        if online.overlaps:
            metrics |= self._learned
            self._learned = {}
        elif due and not online.separate:
            online.last_update = self.done
        elif due:
            if self.trajectory is not None and not self.generates:
                self._load_recorded(self.done + 1)  # such an update follows the policy's step
            metrics |= online.update(self.trainer, self.done)
            metrics["drafter/seconds_added"] = online.seconds
            if predicted is None and self.config.drafter.replay == "newest":
                predicted = self.trainer.prediction
            self.trainer.prediction = predicted
        return metrics | online.observe(self.done)

    def _drift(self, groups: Sequence[Group]) -> dict[str, float]:
        """Compare the policy with model.path on a few samples, evenly spaced. The same samples on every rank."""
        samples = [sample for group in groups for sample in group.samples]
        chosen = samples[:: max(1, len(samples) // DRIFT_SAMPLES)][:DRIFT_SAMPLES]
        return self.trainer.drift(self._pack(chosen, [0.0] * len(chosen)))

    def _advantages(self, group: Group) -> list[float]:
        algorithm = self.config.algorithm
        longest = self.config.rollout.max_new_tokens
        shaped = []
        for sample in group.samples:
            length = len(sample.response)
            penalty = grpo.overlong_penalty(length, max_length=longest, zone=algorithm.overlong_tokens)
            shaped.append(sample.reward + penalty)
        known = [not rewards.failed(sample) for sample in group.samples]
        if custom.is_function(algorithm.advantage):
            own = custom.load("algorithm.advantage", algorithm.advantage)
            return grpo.own_advantages(own, group.samples, shaped, known, algorithm).tolist()
        return grpo.advantages(shaped, normalise_std=algorithm.normalise_std, known=known).tolist()

    # ---- weights and schedule ---------------------------------------------------------------------------------------

    def push(self) -> None:
        """Send target and drafter to every engine as one version, and check every engine.

        Restarted engines join here. If no other engine is left, this waits for one.
        """
        if self.layout.together:
            self._free_memory()
            self._on_rank0(lambda: self.rollouts.wake())
        while not self._on_rank0(self._push, all_ranks=True):
            pass

    def _free_memory(self) -> None:
        """Return once no rank keeps memory that it does not use. An engine takes its share of what is free then."""
        torch.cuda.empty_cache()
        ranks.job().wait()

    def _push(self) -> None:
        with exporting(partial(self.trainer.export, live=True)) as source:
            if source is not None:
                words = None if self.words is None or self.config.spec.mode == "off" else self.words.ids()
                scope: Scope = "all" if self._policy_changed else "drafter"
                self._pushed = self.rollouts.push(self.done + 1, source, words, scope)
        self._policy_changed = False

    def adapt(self) -> None:
        """Read the engines' acceptance and round times, and update the speculation rule."""
        self._on_rank0(self._adapt)

    def _adapt(self) -> None:
        self._adapted = self.rollouts.adapt(self.trainer.prediction)
        online = self.online
        if online is not None and online.overlaps:
            spent = online.seconds if online.last_update == self.done - 1 else 0.0
            hidden = min(spent, self.rollouts.seconds)
            self._adapted |= {"drafter/seconds_hidden": hidden, "drafter/seconds_added": spent - hidden}

    def finish(self) -> None:
        """Write the last checkpoint, and policy and drafter as a Hugging Face checkpoint to `run_dir/hf`.

        An EAGLE-3 drafter goes to `run_dir/hf_drafter`.
        """
        if self.trajectory is not None and self.config.replay.policy_step < 0:
            self._load_recorded(self.done)
        self._save()
        written: dict[Path, Path] = {}  # built directories, by the names that they get at the end; hf/ is the last
        with exporting(self.trainer.export) as source:
            if source is not None:
                written = self._build_result(source)
        found = dict(self.trainer.export_drafter_moments())
        if found:
            path = next(iter(written.values())) / moments.FILE
            path.parent.mkdir()
            tensor_file.save(found, path)
        for target, built in written.items():
            publish(built, target)
        if self.main:
            drafter, *policy = written
            what = "policy and drafter as a Hugging Face checkpoint"
            what = f"the policy, and {drafter}, its EAGLE-3 drafter" if policy else what
            print(f"written: {self.run_dir / 'hf'}, {what}", flush=True)

    def _build_result(self, source: Source) -> dict[Path, Path]:
        """Write the directories of drafter and policy, which can be one, beside their names. Return them by name."""
        target = self.run_dir / "hf"
        tokenizer = self.config.model.path
        if DRAFTER not in self.hf_config:
            return {target: build_hf(target, self.hf_config, source("all"), tokenizer)}
        stated = {key: value for key, value in self.hf_config.items() if key != DRAFTER}
        built = {}
        if self.config.drafter.train:
            own = self.run_dir / "hf_drafter"
            described = self.hf_config[DRAFTER]
            tokens = self.eagle3_words
            built[own] = build_drafter(own, described, source("drafter"), tokens, self.config.drafter.path)
        return built | {target: build_hf(target, stated, source("target"), tokenizer)}

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write a checkpoint every `train.save_every` steps.

        Writes a checkpoint and raises RunStopped after `train.max_bad_steps` bad steps in a row, and if any rank
        received a signal to end.
        """
        options = self.config.train
        if 0 < options.max_bad_steps <= self._bad_steps:
            self._stop(
                f"step {self.done - 1}: loss or gradient norm was not finite {self._bad_steps} steps in a row "
                f"(train.max_bad_steps={options.max_bad_steps})"
            )
        if reason := runtime.first_message(self.interruption.reason):
            self._stop(reason)
        if self.due(options.save_every):
            self._save()

    def _stop(self, reason: str) -> NoReturn:
        """Write a checkpoint, and the record of the last step if it has none, then raise RunStopped."""
        if self.done > self._recorded:
            self.record(self.done - 1, *self._newest)
        code = self.interruption.exit_code
        if self.done == 0:
            raise RunStopped(f"{reason}; no step was trained, so there is no checkpoint", code)
        try:
            path = self._save()
        except SaveError as error:
            raise RunStopped(f"{reason}; no checkpoint of step {self.done} could be written: {error}", code) from None
        raise RunStopped(f"{reason}; the last good parameters are in {path}", code)

    def _save(self) -> Path:
        """Write a checkpoint, unless this step has one, and return its path. Raises SaveError on every rank.

        The small files are written first, so a checkpoint with the trainer's directory is complete.
        """
        path = self.checkpoints.path(self.done)
        if self._saved == self.done:
            return path
        try:
            if error := on_all_ranks(self._write_state, self.main):
                raise SaveError(error)
            self.trainer.save(path)
        except SaveError:
            if self.main:
                self.checkpoints.discard(self.done)
            raise
        self._saved = self.done
        if self.main:
            self.checkpoints.prune()
        return path

    def _write_state(self) -> None:
        state: dict[str, Any] = {"data": self.data.state()} if self.data is not None else {}
        state["identity"] = self.identity
        state |= {"accept_lengths": self._accept_lengths, "tokens": self._tokens}
        if self.words is not None:
            state["words"] = self.words.state()
        drawn = Drawn()
        if self.generates:
            state |= self.rollouts.state()
            drawn = Drawn(ahead=self.rollouts.pending(), begun=self.rollouts.begun)
        if self.online is not None:
            state["online"] = self.online.state()
            drawn = drawn._replace(replay=self.online.held.groups())
        self.checkpoints.write_state(self.done, state, drawn)

    def _resume(self) -> tuple[dict[str, Any], Drawn]:
        """Load the newest checkpoint. Returns its state and groups, or empty ones. Raises CheckpointError."""
        found = self.checkpoints.whole()
        if not found:
            return {}, Drawn()
        path = found[-1]
        state, drawn = self.checkpoints.read_state(path)
        if state["step"] > self._steps:
            raise CheckpointError(f"{path} is after step {state['step']}, but the run has only {self._steps} steps")
        if "identity" not in state:
            raise CheckpointError(f"{path}: an earlier version wrote it, without digests of model and data; start anew")
        if other := identity.difference(state["identity"], self.identity):
            raise CheckpointError(
                f"{path} is of a run with another content of {other}; expected the same, or another train.run_dir"
            )
        self.trainer.load(path)
        if self.data is not None:
            self.data.restore(state["data"])
        if self.online is not None:
            self.online.restore(state.get("online", {}), drawn.replay)
        self._accept_lengths = [float(value) for value in state.get("accept_lengths", ())]
        self._tokens = int(state.get("tokens", 0))
        if self.words is not None and state.get("words"):
            self.words.restore(state["words"])
        self.done = state["step"]
        return state, drawn

    # ---- evaluation and records -------------------------------------------------------------------------------------

    def evaluate(self, name: str) -> None:
        """Draw and score the held-out prompts, if there are any. Writes the result as an event."""
        while not self._on_rank0(lambda: self.rollouts.evaluate(name)):
            self.push()

    def due(self, every: int) -> bool:
        """Return whether the number of steps done is a multiple of `every`; 0: never."""
        return every > 0 and self.done % every == 0

    def good_enough(self, step: int) -> bool:
        """Evaluate every `sft.eval_every` steps. Returns whether the warm start may end, the same on every rank.

        It may end if the held-out reward is at least `sft.stop_reward` and the accept length grew by less than
        `sft.plateau` since the last evaluation. With `sft.held_out` it may end if the accept length on held-out answers
        has stopped rising, too.
        """
        if not self.due(self.config.sft.eval_every):
            return False
        stop = self._measure_drafter() if self.config.sft.held_out else True
        return (self._good_rollouts(step) if self.generates else True) and stop

    def _measure_drafter(self) -> bool:
        """Measure the drafter on held-out answers. Returns whether its accept length has stopped rising."""
        assert isinstance(self.data, data.Demonstrations)
        options = self.config.sft
        groups = [Group(row.prompt, [row]) for row in self.data.held_out]
        with self.clock("train"):
            found = self.trainer.accept_lengths(self.pack(groups, max(options.eval_drafts)), options.eval_drafts)
        past = self._accept_lengths
        past.append(float(np.mean(list(found.values()))))
        if self.main:
            lengths = ", ".join(f"{value:.3f} at k = {k}" for k, value in found.items())
            self.recorder.event(
                "drafter",
                f"step {self.done}, {self._tokens} tokens: accept length {lengths} on {len(groups)} held-out answers",
                step=self.done,
                tokens=self._tokens,
                **{f"accept_length_{k}": value for k, value in found.items()},
            )
        return len(past) > 2 and max(past[-2:]) < max(past[:-2]) + options.plateau

    def _good_rollouts(self, step: int) -> bool:
        """Push, and evaluate with the engines. Returns whether reward and accept length allow the warm start to end."""
        options = self.config.sft
        with self.clock("push"):
            self.push()
        stop = False

        def judge() -> None:
            nonlocal stop
            result = self.rollouts.evaluate(f"step-{step + 1:06d}", options.eval_prompts)
            gain = result["accept_length"] - self._last_accept_length
            self._last_accept_length = result["accept_length"]
            stop = result.get("reward", -math.inf) >= options.stop_reward and gain < options.plateau

        with self.clock("generate"):
            while not self._on_rank0(judge):
                self.push()
        return bool(ranks.job().number(stop))

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps. Rank 0 shows the progress on the terminal."""
        if not self.main:
            yield from range(self.done, total)
            return
        with View(total, self.done, self.recorder.latest) as self._view:
            yield from range(self.done, total)

    def record(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Write one line to `metrics.jsonl` and a few texts to `samples.jsonl`. Counts bad steps in a row."""
        self._recorded = step + 1
        skipped = [side for side in ("policy", "drafter") if metrics.get(f"{side}/skipped")]
        self._bad_steps = self._bad_steps + 1 if skipped else 0
        if not self.main:
            return
        if skipped:
            gap = metrics.get("policy/train_rollout_logprob_abs_diff", 0.0)
            why = f"loss or gradient norm of {' and '.join(skipped)} not finite"
            if gap > self.config.health.logprob_gap:
                why = f"log-probs of engines and trainer differ by {gap:.3f} nats per token: different weights?"
            self.recorder.event("loss", f"step {step}: {why}; step skipped")
        seconds = self.clock.drain()
        values = dict(metrics) | seconds
        samples = [sample for group in groups for sample in group.samples]
        if samples:
            found = rollout_metrics(samples)
            found["tokens_per_second"] = found["response_tokens"] / self.rollouts.seconds
            found |= self.rollouts.counts
            values |= {f"rollout/{name}": value for name, value in found.items()} | self._pushed | self._adapted
            if "reward" in found and (halved := self._reward_watch.observe(found["reward"])):
                self.recorder.event("reward", f"step {step}: {halved}")
            values["engine/restarts"] = float(self.rollouts.restarted)
            self.rollouts.restarted = 0
            self.recorder.samples(step, samples[:: max(1, len(samples) // 4)][:4], self.rollouts.decode)
        self.recorder.write(step, values)
        self._view.update(step, values)

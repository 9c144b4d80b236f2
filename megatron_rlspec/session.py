"""What one run holds: trainer and data on every rank; `Rollouts` and records on rank 0.

The verbs of `loop.py` live here. A verb that only rank 0 can do (generate, score, decide) runs there, and its result is
broadcast as MessagePack bytes; the others wait.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_rlspec import data, wire
from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.metrics import Clock, Recorder, write_atomically
from megatron_rlspec.rl import grpo, rewards
from megatron_rlspec.rl.packing import pack
from megatron_rlspec.rollouts import Rollouts, rollout_metrics
from megatron_rlspec.train import model, runtime
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, PackedBatch
from megatron_rlspec.weights.checkpoint import CheckpointError, check, read_hf, read_json, write_hf
from megatron_rlspec.weights.names import family_of
from megatron_rlspec.weights.push import exporting


class RunStopped(RuntimeError):
    """The run ended itself, with a checkpoint; the message is one line: why, and where the checkpoint is."""


class Session:
    """A context manager: on exit engines are closed and records flushed, whatever happened."""

    def __init__(self, config: Config, data_path: str, supervised: bool = False) -> None:
        with ExitStack() as closing:
            self._closing = closing
            self._open(config, data_path, supervised)
            self._closing = closing.pop_all()

    def _open(self, config: Config, data_path: str, supervised: bool) -> None:
        self.config, self.clock, self.run_dir = config, Clock(), Path(config.train.run_dir)
        self.main = os.environ.get("RANK", "0") == "0"
        self._check_machine()
        self.hf_config, tensors = read_hf(config.model.path)
        try:
            family = family_of(self.hf_config)
        except ValueError as error:
            raise CheckpointError(f"{config.model.path}: {error}") from None
        check(family, tensors, drafter=config.drafter.train)
        model.check(self.hf_config, config)
        context, longest = self.hf_config.get("max_position_embeddings"), config.model.max_length
        if context and context < longest:
            raise ConfigError(
                f"model.max_length={longest}, but config.json of {config.model.path} "
                f"says max_position_embeddings={context}"
            )
        self.tokenizer = data.load_tokenizer(config.model.path)
        data.check_vocabulary(self.tokenizer, self.hf_config["vocab_size"])
        source = data.Demonstrations if supervised else data.Prompts
        self.data = source(data_path, self.tokenizer, config)
        self.generates = not supervised or config.sft.eval_every > 0
        if self.main and self.generates:  # engines start while the trainer is built
            self.rollouts = Rollouts(config, self.hf_config, self.tokenizer, self.run_dir)
            self._closing.callback(self.rollouts.close)
        self.trainer = Trainer(config, self.hf_config)
        self.trainer.load_hf(tensors)
        self.first_step, self.version = 0, 0
        self._last_accept_length = 0.0
        self._bad_steps = 0
        resumed = self._resume() if config.train.resume else {}
        if self.main:
            self.recorder = Recorder(self.run_dir, self.first_step)
            self._closing.callback(self.recorder.close)
            write_atomically(self.run_dir / "config.json", config.model_dump_json(indent=1))
            if self.generates:
                self.rollouts.open(self.recorder, None if supervised else self.data, resumed)

    def _check_machine(self) -> None:
        """Raise ConfigError for what this machine cannot do, before anything starts."""
        rollout, spec, gpus = self.config.rollout, self.config.spec, torch.cuda.device_count()
        if not gpus and rollout.engine == "sglang" and not rollout.urls and spec.verifier == "rejection":
            raise ConfigError(
                "spec.verifier=rejection needs SGLang's GPU kernels, and there is no GPU here; "
                "take position_keyed or target_only"
            )
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if gpus and ranks > gpus:
            raise ConfigError(f"torchrun --nproc-per-node {ranks}, but this machine has {gpus} GPUs, one for each rank")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def collect(self, step: int) -> list[Group]:
        """Scored groups of one step, the same on every rank."""
        return self._share(lambda: self.rollouts.collect(step))

    def _share(self, produce: Callable[[], list[Group]]) -> list[Group]:
        """What rank 0 produced, on every rank."""
        if dist.get_world_size() == 1:
            return produce()
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        payload = torch.frombuffer(bytearray(wire.encode_groups(produce())), dtype=torch.uint8) if self.main else None
        size = torch.tensor(0 if payload is None else len(payload), device=device)
        dist.broadcast(size, src=0)
        payload = torch.empty(int(size), dtype=torch.uint8, device=device) if payload is None else payload.to(device)
        dist.broadcast(payload, src=0)
        return wire.decode_groups(payload.cpu().numpy().tobytes())

    # ---- learning ---------------------------------------------------------------------------------------------------

    def demonstrations(self) -> list[Group]:
        """The next written answers; every rank reads the same rows."""
        return [Group(row.prompt, [row]) for row in self.data.take(self.config.sft.samples_per_step)]

    def pack(self, groups: list[Group]) -> list[PackedBatch]:
        """This rank's micro-batches, with group-relative advantages, rolled before the context-parallel cut."""
        algorithm, parallel = self.config.algorithm, self.config.parallel
        return pack(
            [sample for group in groups for sample in group.samples],
            advantages=[a for group in groups for a in self._advantages(group)],
            depth=self.config.drafter.depth,
            tokens_per_micro_batch=self.config.train.tokens_per_micro_batch,
            aggregation=algorithm.aggregation,
            constant_length=self.config.rollout.max_new_tokens,
            **runtime.placement(),
            multiple=parallel.tensor if parallel.sequence else 1,
        )

    def _advantages(self, group: Group) -> list[float]:
        algorithm, longest = self.config.algorithm, self.config.rollout.max_new_tokens
        shaped = [
            s.reward + grpo.overlong_penalty(len(s.response), max_length=longest, zone=algorithm.overlong_tokens)
            for s in group.samples
        ]
        known = [not rewards.failed(sample) for sample in group.samples]
        return grpo.advantages(shaped, normalise_std=algorithm.normalise_std, known=known).tolist()

    # ---- weights and schedule ---------------------------------------------------------------------------------------

    def push(self) -> None:
        """Target and drafter to every engine as one version, proven before the next rollout is trained on."""
        self.version += 1
        with exporting(self.trainer.export) as source:
            if source is not None:
                self._pushed = self.rollouts.push(self.version, source)

    def adapt(self) -> None:
        """Take in what the engines observed."""
        if self.main:
            self._adapted = self.rollouts.adapt()

    def export(self) -> None:
        """`run_dir/hf`: policy and drafter as a Hugging Face checkpoint."""
        with exporting(self.trainer.export) as source:
            if source is not None:
                write_hf(self.run_dir / "hf", self.hf_config, source("all"), tokenizer_from=self.config.model.path)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint(self, step: int) -> None:
        """Every `train.save_every` steps; and when `train.max_bad_steps` in a row went wrong, before RunStopped."""
        options = self.config.train
        stop = 0 < options.max_bad_steps <= self._bad_steps
        if stop or (options.save_every and (step + 1) % options.save_every == 0):
            self._save(step)
        if stop:
            raise RunStopped(
                f"step {step}: loss or gradient norm was not finite {self._bad_steps} steps in a row "
                f"(train.max_bad_steps={options.max_bad_steps}); the last good parameters are in "
                f"{self.run_dir / 'checkpoints' / f'step-{step + 1:06d}'}"
            )

    def _save(self, step: int) -> None:
        """Everything the next step depends on. The small state comes first: a directory means a whole checkpoint."""
        folder = self.run_dir / "checkpoints"
        if self.main:
            state = {"step": step + 1, "version": self.version, "data": self.data.order.state()}
            if self.generates:
                state |= self.rollouts.state()
            write_atomically(folder / f"step-{step + 1:06d}.json", json.dumps(state))
        self.trainer.save(folder / f"step-{step + 1:06d}")
        if self.main:
            for old in sorted(folder.glob("step-*/"))[: -self.config.train.keep]:
                shutil.rmtree(old)
                old.with_suffix(".json").unlink(missing_ok=True)

    def _resume(self) -> dict[str, Any]:
        """Continue from the newest whole checkpoint; from the start if there is none yet."""
        found = sorted((self.run_dir / "checkpoints").glob("step-*/"))
        if not found:
            return {}
        state = read_json(found[-1].with_suffix(".json"))
        self.trainer.load(found[-1])
        self.data.order.restore(state["data"])
        self.first_step, self.version = state["step"], state["version"]
        return state

    # ---- evaluation and records -------------------------------------------------------------------------------------

    def evaluate(self, name: str) -> None:
        """The held-out prompts, if there are any, on rank 0."""
        if self.main:
            self.rollouts.evaluate(name)

    def good_enough(self, step: int) -> bool:
        """Every `sft.eval_every` steps: held-out reward reached `sft.stop_reward`, and accept length is flat."""
        options = self.config.sft
        if not options.eval_every or (step + 1) % options.eval_every:
            return False
        with self.clock("push"):
            self.push()
        stop = torch.zeros(())
        if self.main:
            with self.clock("generate"):
                result = self.rollouts.evaluate(f"step-{step + 1:06d}", options.eval_prompts)
            gain = result["accept_length"] - self._last_accept_length
            self._last_accept_length = result["accept_length"]
            stop += result["reward"] >= options.stop_reward and gain < options.plateau
        dist.broadcast(stop, src=0)
        return bool(stop)

    def steps(self, total: int) -> Iterator[int]:
        """Steps still to do; rank 0 shows a bar."""
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        with Progress(*columns, disable=not self.main) as self._bar:
            self._task = self._bar.add_task("step", total=total, completed=self.first_step)
            for step in range(self.first_step, total):
                yield step
                self._bar.advance(self._task)

    def record(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """One line of `metrics.jsonl`; a few texts a step in `samples.jsonl`. Steps that went wrong are counted."""
        skipped = [who for who in ("policy", "drafter") if metrics.get(f"{who}/skipped")]
        self._bad_steps = self._bad_steps + 1 if skipped else 0
        if not self.main:
            return
        if skipped:
            who = " and ".join(skipped)
            self.recorder.event("loss", f"step {step}: loss or gradient norm of {who} not finite; step skipped")
        seconds = self.clock.drain()
        values = dict(metrics) | seconds
        line = f"loss {metrics.get('policy/loss', metrics.get('drafter/objective')):.3f}"
        samples = [sample for group in groups for sample in group.samples]
        if samples:
            found = rollout_metrics(samples)
            found["tokens_per_second"] = found["response_tokens"] / seconds["seconds_generate"]
            values |= {f"rollout/{name}": value for name, value in found.items()} | self._pushed | self._adapted
            self.recorder.samples(step, samples[:: max(1, len(samples) // 4)][:4])
            line = f"reward {found['reward']:.3f}  accept {found['accept_length']:.2f}"
        if "drafter/match_1" in metrics:
            line += f"  drafter {metrics['drafter/match_1']:.2f}"
        self.recorder.write(step, values)
        self._bar.update(self._task, description=line)

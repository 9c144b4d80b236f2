"""The recorded trajectory of a run: written by the run (`train.record_gib`), and followed by `rlspec replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rlspec.config import ConfigError, ReplayConfig
from megatron_rlspec.conversion.drafter_files import Tensors
from megatron_rlspec.host import ranks
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.push.push import exporting
from megatron_rlspec.run.recording import Records
from megatron_rlspec.run.trajectory import Trajectory, TrajectoryWriter
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group


class Replay:
    """The recorded run that a drafter is trained along. Every rank reads it.

    follows   whether the policy and the rollouts of every step are the recorded ones. If not, the policy stays the one
              of `replay.policy_step`, and engines generate with it
    first     step of the policy that the replay begins with
    recorded  what was recorded, with the rollouts of each step
    """

    def __init__(
        self, options: ReplayConfig, model_path: str, steps: int, tensors: Tensors
    ) -> None:
        """Open `replay.run`. Raises CheckpointError if model.path is not what it began with, or it is too short.

        steps    of the replay
        tensors  of model.path
        """
        self.follows = options.policy_step < 0
        self.first = max(0, options.policy_step)
        self.recorded = Trajectory(Path(options.run))
        for name, tensor in self.recorded.policy(0).items():
            if not torch.equal(tensors[name].to(tensor.dtype), tensor):
                raise CheckpointError(
                    f"model.path={model_path}: {name} differs from what {options.run} began with"
                )
        asked = steps if self.follows else options.policy_step
        if asked > self.recorded.steps:
            name = "train.steps" if self.follows else "replay.policy_step"
            raise ConfigError(
                f"{name}={asked}, but {options.run} has {self.recorded.steps} recorded steps"
            )

    def load(self, trainer: Trainer, step: int) -> None:
        """Load the policy that the recorded run had before `step`. The drafter stays."""
        trainer.load_hf(self.recorded.policy(step), fresh_drafter=True)


class TrajectoryRecording:
    """Records the policy and the rollouts of every step (`train.record_gib`). Every rank holds one; rank 0 writes."""

    def __init__(self, trainer: Trainer, records: Records, done: int) -> None:
        """Begin or continue to record a run that has `done` steps."""
        self._trainer = trainer
        self._records = records
        self._writer: TrajectoryWriter | None = None
        if records.recorder is not None:
            options = trainer.config.train
            limit = int(options.record_gib * 2**30)
            self._writer = TrajectoryWriter(Path(options.run_dir), limit, done)
            if self._writer.ended:
                records.event("trajectory", self._writer.ended)

    def record(self, step: int, groups: Sequence[Group] = ()) -> None:
        """Write the present policy, and the rollouts that `step` trains on; none after the last step. Collective."""
        writer = self._writer
        if not ranks.job().number(writer is not None and not writer.ended):
            return  # the bytes of train.record_gib are used
        with self._records.clock("record"), exporting(self._trainer.export) as source:
            if source is None or writer is None:
                return
            line = writer.write(step, source("target"), groups)
            if line:
                self._records.event("trajectory", line)

"""Save a run as a whole checkpoint, and resume from the newest one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlspec import __version__
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.run import identity
from megatron_rlspec.run.checkpoints import Checkpoints, Drawn
from megatron_rlspec.train.checkpoint import SaveError, on_all_ranks
from megatron_rlspec.train.step import Trainer

State = tuple[dict[str, Any], Drawn]  # a JSON object, and groups of samples


class Saver:
    """Writes checkpoints of the trainer and of the run. Every rank holds one.

    saved  steps of the newest checkpoint that this process wrote or loaded
    """

    def __init__(self, trainer: Trainer, digests: Mapping[str, str]) -> None:
        """`digests`: of model and data, by names of options; a checkpoint with others is not resumed from."""
        self.saved = 0
        self._checkpoints = Checkpoints(Path(trainer.config.train.run_dir))
        self._trainer = trainer
        self._main = dist.get_rank() == 0
        self._identity = dict(digests)

    def load_newest(self, steps: int) -> State:
        """Load the newest checkpoint into the trainer. Returns the run's state and groups, empty without a checkpoint.

        Raises CheckpointError for a checkpoint after more than `steps` steps, of another model, of other data or of
        another version of the package, whose seeds and state can differ, and for one whose rollouts are too old for the
        options of now.
        """
        checkpoints = self._checkpoints.whole()
        if not checkpoints:
            return {}, Drawn()
        path = checkpoints[-1]
        state, drawn = self._checkpoints.read_state(path)
        if state["step"] > steps:
            raise CheckpointError(
                f"{path} is after step {state['step']}, but the run has only {steps} steps"
            )
        if state["version"] != __version__:
            raise CheckpointError(
                f"{path}: version {state['version']} of megatron_rlspec wrote it, and this is {__version__}; go on "
                "with that version, or start anew"
            )
        if other := identity.difference(state["identity"], self._identity):
            raise CheckpointError(
                f"{path} is of a run with another content of {other}; expected the same, or "
                f"another train.run_dir, with the model.path that `rlspec convert {path} MODEL` writes"
            )
        rollout = self._trainer.config.rollout
        age = drawn.age(state["step"], rollout.partial > 0)
        if age > rollout.oldest:
            raise CheckpointError(
                f"rollout.staleness={rollout.staleness} and rollout.partial={rollout.partial}: {path} holds tokens for "
                f"the next step that are {age:g} versions old; expected these options as in the run that wrote it"
            )
        self._trainer.load(path)
        self.saved = state["step"]
        return state, drawn

    def save(self, done: int, state: Callable[[], State]) -> Path:
        """Write a checkpoint, unless this step has one, and return its path. Raises SaveError on every rank.

        The small files are written first, so a checkpoint with the trainer's directory is complete.
        """
        path = self._checkpoints.path(done)
        if self.saved == done:
            return path

        def write_state() -> None:
            content, drawn = state()
            content |= {"identity": self._identity, "version": __version__}
            self._checkpoints.write_state(done, content, drawn)

        try:
            if error := on_all_ranks(write_state, self._main):
                raise SaveError(error)
            self._trainer.save(path)
        except SaveError:
            if self._main:
                self._checkpoints.discard(done)
            raise
        self.saved = done
        if self._main:
            self._checkpoints.prune()
        return path

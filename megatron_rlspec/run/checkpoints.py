"""The checkpoints of a run directory: write them, and resume from the newest.

A checkpoint after 12 steps has two parts: the directory `checkpoints/step-000012/`, which `train/checkpoint.py` writes,
and the file `checkpoints/step-000012.state` with all else (`state_file.py`). The directory is renamed into place last:
where it exists, the checkpoint is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from megatron_rlspec import __version__
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.run import identity, state_file
from megatron_rlspec.run.state_file import SUFFIX, Drawn, State
from megatron_rlspec.train.checkpoint import SaveError, on_all_ranks
from megatron_rlspec.train.step import Trainer

# checkpoints: if the newest is damaged, the user can remove it and go on from the one before
KEPT = 2


class Checkpoints:
    """Checkpoints of `run_dir`, of which `prune` keeps the newest `KEPT`."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "checkpoints"

    def path(self, step: int) -> Path:
        """Return the path of the trainer's directory after `step` steps."""
        return self.folder / f"step-{step:06d}"

    def whole(self) -> list[Path]:
        """Return the directories of complete checkpoints, the oldest first.

        A directory whose name ends otherwise than in a number, such as a user's copy, is left out.
        """
        folders = sorted(self.folder.glob("step-*/"))  # by the number, which has a fixed width
        return [path for path in folders if path.name.removeprefix("step-").isdecimal()]

    def read_state(self, path: Path) -> State:
        """Return the state of the checkpoint `path`. Raises CheckpointError."""
        try:
            return state_file.read(state_file.of(path))
        except CheckpointError as error:
            raise CheckpointError(f"{error}; remove {path} to go on without it") from None

    def prune(self) -> None:
        """Remove all but the newest `KEPT`, and what an unfinished write left. Rank 0 calls it after each write."""
        for old in self.whole()[:-KEPT]:
            shutil.rmtree(old)
        for partial in self.folder.glob(".step-*"):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        # After the directories: a state without its directory belongs to no checkpoint.
        for file in self.folder.glob(f"step-*{SUFFIX}"):
            if not file.with_suffix("").exists():
                file.unlink()


class Saver:
    """Writes checkpoints of the trainer and of the run. Every rank holds one.

    saved  how many steps the newest checkpoint has that this process wrote or loaded; 0: it did neither
    """

    def __init__(self, trainer: Trainer, digests: Mapping[str, str]) -> None:
        """`digests`: of model and data, by names of options; a checkpoint with others is not resumed from."""
        self.saved = 0
        self._checkpoints = Checkpoints(Path(trainer.config.train.run_dir))
        self._trainer = trainer
        self._is_rank0 = dist.get_rank() == 0
        self._identity = dict(digests)

    def load_newest(self, steps: int) -> State:
        """Load the newest checkpoint into the trainer. Collective. Returns the run's state, empty without a checkpoint.

        Raises CheckpointError for a checkpoint after more than `steps` steps, of another model, of other data or of
        another version of the package, whose seeds and state can differ, and for one whose samples are too old for
        the present options.
        """
        checkpoints = self._checkpoints.whole()
        if not checkpoints:
            return State({}, Drawn())
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
        if age > rollout.max_lag:
            raise CheckpointError(
                f"rollout.staleness={rollout.staleness} and rollout.partial={rollout.partial}: {path} holds tokens for "
                f"the next step that are {age:g} versions old; expected these options as in the run that wrote it"
            )
        self._trainer.load(path)
        self.saved = state["step"]
        return State(state, drawn)

    def save(self, done: int, state: Callable[[], State]) -> Path:
        """Write a checkpoint, unless this step has one, and return its path. Collective.

        done   steps of the run
        state  is called on rank 0 only, so it must not be collective

        Raises SaveError on every rank.
        """
        path = self._checkpoints.path(done)
        if self.saved == done:
            return path

        def write_state() -> None:
            values, drawn = state()
            values |= {"step": done, "identity": self._identity, "version": __version__}
            state_file.write(state_file.of(path), values, drawn)

        try:
            # The state first: where the trainer's directory exists, a checkpoint is complete.
            if error := on_all_ranks(write_state, self._is_rank0):
                raise SaveError(error)
            self._trainer.save(path)
        finally:
            # Also after an error: the state of an unfinished checkpoint goes.
            if self._is_rank0:
                self._checkpoints.prune()
        self.saved = done
        return path

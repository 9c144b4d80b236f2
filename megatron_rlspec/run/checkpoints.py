"""The checkpoints of a run directory: save a run as a whole one, and resume from the newest.

`checkpoints/step-000012/` is the trainer's (`train/checkpoint.py`), and is renamed into place last: where it exists,
the checkpoint is whole. `step-000012.json` holds the data order and what speculation has learnt; `step-000012.groups`
holds the rollout that was drawn ahead, if there is one, `step-000012.replay` the drafter's buffer of rollouts, and
`step-000012.begun` the groups of partial rollouts. All are covered by checksums in the JSON file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from megatron_rlspec import __version__, files, wire
from megatron_rlspec.models.hf_files import CheckpointError, read_json
from megatron_rlspec.run import identity
from megatron_rlspec.train.checkpoint import SaveError, on_all_ranks
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group, OpenGroup

KEPT = 2  # checkpoints: if the newest one is damaged, the run goes on from the one before
_CHECKSUM = "checksum"
# Files of groups; each has a checksum in the JSON file, such as groups_checksum.
_FORMATS: dict[str, type[list[Any]]] = {
    ".groups": list[Group],
    ".replay": list[Group],
    ".begun": list[OpenGroup],
}


class Drawn(NamedTuple):
    """What the next steps train on: the rollout that was drawn ahead, the drafter's buffer, and begun groups."""

    ahead: Sequence[Group] = ()
    replay: Sequence[Group] = ()
    begun: Sequence[OpenGroup] = ()

    def age(self, done: int, partial: bool) -> float:
        """Return how many versions its oldest token will be behind the policy that trains on it.

        done     steps of the run so far, so version `done` + 1 trains next
        partial  whether begun groups go on; they end in the step after that of `ahead`
        """
        age = 0.0
        for group in self.ahead:
            for sample in group.samples:
                for version, _, _ in sample.policy_versions:
                    age = max(age, done + 1 - version)
        if partial:
            for begun in self.begun:
                age = max(age, done + 1 + bool(self.ahead) - begun.oldest)
        return age


State = tuple[dict[str, Any], Drawn]  # a JSON object, and groups of samples


class Checkpoints:
    """Checkpoints of `run_dir`, of which `prune` keeps the newest `KEPT`."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "checkpoints"

    def path(self, step: int) -> Path:
        """Return the path of the trainer's directory after `step` optimizer steps."""
        return self.folder / f"step-{step:06d}"

    def whole(self) -> list[Path]:
        """Return the whole checkpoints, the oldest first. A copy that a user named otherwise is none."""
        folders = sorted(self.folder.glob("step-*/"))
        return [path for path in folders if path.name.removeprefix("step-").isdecimal()]

    def write_state(self, step: int, state: Mapping[str, Any], drawn: Drawn) -> None:
        """Write the small files. Raises OSError."""
        content: dict[str, Any] = {"step": step, **state}
        for suffix, groups in zip(_FORMATS, drawn, strict=True):
            if groups:
                encoded = wire.encode(list(groups))
                files.write(self.path(step).with_suffix(suffix), encoded)
                content[_checksum_name(suffix)] = hashlib.sha256(encoded).hexdigest()
        content[_CHECKSUM] = _checksum(content)
        files.write(self.path(step).with_suffix(".json"), json.dumps(content))

    def read_state(self, path: Path) -> tuple[dict[str, Any], Drawn]:
        """Return what `write_state` wrote for the checkpoint `path`. Raises CheckpointError."""
        file = path.with_suffix(".json")
        try:
            state = read_json(file)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {advice(path)}") from None
        if state.pop(_CHECKSUM, None) != _checksum(state):
            raise CheckpointError(_damaged(file))
        parts = []
        for suffix, kind in _FORMATS.items():
            checksum = state.pop(_checksum_name(suffix), "")
            parts.append(_read_groups(path.with_suffix(suffix), checksum, kind))
        return state, Drawn(*parts)

    def discard(self, step: int) -> None:
        """Remove the small files of a checkpoint that could not be written."""
        if not self.path(step).exists():
            for suffix in (".json", *_FORMATS):
                self.path(step).with_suffix(suffix).unlink(missing_ok=True)

    def prune(self) -> None:
        """Remove all but the newest `KEPT`, and what an interrupted write left."""
        for old in self.whole()[:-KEPT]:
            shutil.rmtree(old)
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        for suffix in (".json", *_FORMATS):
            for file in self.folder.glob(f"step-*{suffix}"):
                if not file.with_suffix("").exists():
                    file.unlink()


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


def advice(path: Path) -> str:
    """Return the advice for a checkpoint that cannot be read."""
    return f"remove {path} to go on without it"


def _checksum_name(suffix: str) -> str:
    return f"{suffix.removeprefix('.')}_checksum"


def _checksum(content: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _read_groups(file: Path, checksum: str, kind: type[list[Any]]) -> list[Any]:
    """Return the groups of a file with this checksum; none if the checkpoint has no such file."""
    if not checksum:
        return []
    try:
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != checksum:
            raise CheckpointError(_damaged(file))
        return wire.decode(content, kind)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{file}: {files.reason(error)}; {advice(file.with_suffix(''))}"
        ) from None


def _damaged(file: Path) -> str:
    return f"{file}: its checksum differs from what was written: the file is damaged; {advice(file.with_suffix(''))}"

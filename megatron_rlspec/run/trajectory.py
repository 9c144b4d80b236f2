"""The recorded trajectory of a run: each step's rollouts, and the policy that trained on them (`train.record_gib`).

The policy of our loop does not depend on its drafter. So a drafter can be trained again along the trajectory, without
rollouts and without a backward pass of the policy (`rlspec replay`).

`trajectory/step-000012.safetensors` holds what step 12 starts from (steps count from 0):

    policy/NAME            a full tensor under its Hugging Face name; all tensors of the first file are full
    at/NAME, to/NAME       or, if that is smaller: the positions in the flat tensor, int32 or int64, and the new values
                           of the elements that changed since the file before. A tensor without any change is left out
    rollouts               `wire.encode` of the step's groups, as bytes; absent after the last step

Every tensor has a checksum, and a file appears whole or not at all (`models/tensor_file.py`). Each file names its run.
`TrajectoryWriter` and `_difference` write this format, `Trajectory` reads it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from megatron_rlspec import wire
from megatron_rlspec.config import ConfigError, ReplayConfig
from megatron_rlspec.host import ranks
from megatron_rlspec.models import tensor_file
from megatron_rlspec.models.hf_files import LazyTensors
from megatron_rlspec.models.tensor_file import CheckpointError, TensorFile
from megatron_rlspec.push.push import exporting
from megatron_rlspec.run.recording import Records
from megatron_rlspec.train.step import Trainer
from megatron_rlspec.types import Group

FOLDER = "trajectory"
ROLLOUTS = "rollouts"
_NOTE = "rlspec.trajectory"  # key in a file's metadata; its value is the name of the run
# an integer type by the bytes of an element, to compare floats bit by bit
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def file_of(run_dir: Path, step: int) -> Path:
    """Return the file that holds what `step` starts from."""
    return run_dir / FOLDER / f"step-{step:06d}.safetensors"


class TrajectoryWriter:
    """Records a run from step `done` on, in at most `limit` bytes. Keeps one copy of the policy in memory.

    ended  why nothing more is recorded; "" while recording goes on
    """

    def __init__(self, run_dir: Path, limit: int, done: int) -> None:
        """Remove the files of `done` and later steps, which will be trained again.

        A trajectory has no gaps: if a file of an earlier step is missing, nothing is recorded.
        """
        self.run_dir = run_dir
        self.limit = limit
        self.ended = ""
        self._run = ""
        # The policy as of the newest file. Empty after a resume, so the next file has all tensors in full.
        self._newest: dict[str, Tensor] = {}
        # A process that was killed during a write has left these.
        for partial in (run_dir / FOLDER).glob(".*.partial"):
            partial.unlink()
        recorded = list((run_dir / FOLDER).glob("step-*.safetensors"))
        for file in recorded:
            # Paths compare as texts, and the numbers in them have a fixed width.
            if file >= file_of(run_dir, done):
                file.unlink()
        self._bytes = 0
        for step in range(done):
            file = file_of(run_dir, step)
            if not file.exists():
                self.ended = f"nothing is recorded: step {step} was not, and a replay needs every step before"
                return
            self._bytes += file.stat().st_size
        self._run = _run_of(run_dir) if done else uuid.uuid4().hex

    def write(
        self, step: int, policy: Iterable[tuple[str, Tensor]], groups: Sequence[Group] = ()
    ) -> str:
        """Write what `step` starts from. Returns a line for an event at step 0 and when the limit is reached, else "".

        Call it for `done`, `done` + 1 and so on, without gaps, and no more once `ended` is set.

        policy  full tensors by Hugging Face name. They are kept and compared at the next call, so they must be copies
        groups  the step's rollouts; none after the last step

        Raises OSError.
        """
        new = dict(policy)
        stored = _difference(self._newest, new)
        self._newest = new
        if groups:
            stored[ROLLOUTS] = torch.frombuffer(
                bytearray(wire.encode(list(groups))), dtype=torch.uint8
            )
        size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        if self._bytes + size > self.limit:
            self.ended = (
                f"recording ends before step {step + 1}: it needs {_gib(size)} more, and {_gib(self._bytes)} of "
                f"train.record_gib={self.limit / 2**30:g} are used; {max(0, step - 1)} steps can be replayed"
            )
            self._newest = {}  # frees the memory
            return self.ended
        path = file_of(self.run_dir, step)
        path.parent.mkdir(exist_ok=True)
        tensor_file.save(stored, path, {_NOTE: self._run})
        self._bytes += path.stat().st_size
        if step:
            return ""
        return f"step 1 takes {_gib(size)}; recording ends when train.record_gib={self.limit / 2**30:g} are used"


class Trajectory:
    """Reads a recorded run. Every method raises CheckpointError for missing or damaged files.

    run    the run's name: a random number, which no other run has
    steps  how many steps can be replayed: those with the policy before and after them
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._policy: dict[str, Tensor] = {}  # the full policy before step `_step`
        self._step = -1
        files = len(list((run_dir / FOLDER).glob("step-*.safetensors")))
        if not files:
            raise CheckpointError(
                f"{run_dir}: no {FOLDER}/; expected a run with --train.record_gib 20"
            )
        for step in range(files):
            if not file_of(run_dir, step).exists():
                raise CheckpointError(
                    f"{file_of(run_dir, step)}: no such file; a replay needs every step"
                )
        self.run = _run_of(run_dir)
        self.steps = files - 1

    def groups(self, step: int) -> list[Group]:
        """Return the rollouts that `step` trained on; `step` is below `steps`, because the last file may have none."""
        path = file_of(self.run_dir, step)
        with TensorFile(path) as file:
            content = file[ROLLOUTS].numpy().tobytes()
        try:
            return wire.decode(content, list[Group])
        except msgspec.DecodeError as error:  # another version recorded it
            raise CheckpointError(f"{path}: {ROLLOUTS}: {error}") from None

    def policy(self, step: int) -> Mapping[str, Tensor]:
        """Return the full policy before `step`, by Hugging Face name; `step` is at most `steps`.

        The next call changes its tensors in place. Ascending steps read each file once; an earlier step begins anew at
        the first file.
        """
        if step < self._step:
            self._step = -1
            self._policy = {}
        while self._step < step:
            self._step += 1
            self._apply(file_of(self.run_dir, self._step))
        return self._policy

    def _apply(self, path: Path) -> None:
        """Bring `_policy` to the step of this file. It must be that of the file before, or empty for the first."""
        with TensorFile(path) as file:
            for key in file:
                kind, _, name = key.partition("/")
                if kind == "policy":
                    self._policy[name] = file[key].clone()  # later files change it in place
                elif kind == "at":
                    self._policy[name].view(-1)[file[key].long()] = file[f"to/{name}"]


class Replay:
    """The recorded run along which `rlspec replay` trains a drafter. Every rank reads it.

    follows   whether the policy and the rollouts of every step are the recorded ones. If not, the policy stays the one
              before step `replay.policy_step`, and engines generate with it
    first     the replay begins with the policy that was recorded before this step
    recorded  reads the recorded files
    """

    def __init__(
        self, options: ReplayConfig, model_path: str, steps: int, tensors: LazyTensors
    ) -> None:
        """Open `replay.run`.

        steps    of the replay
        tensors  of model.path

        Raises CheckpointError if model.path is not what the run began with, ConfigError if the run is too short.
        """
        self.follows = options.policy_step < 0
        self.first = max(0, options.policy_step)
        self.recorded = Trajectory(Path(options.run))
        for name, tensor in self.recorded.policy(0).items():
            if not torch.equal(tensors[name].to(tensor.dtype), tensor):
                raise CheckpointError(
                    f"model.path={model_path}: {name} differs from what {options.run} began with"
                )
        needed = steps if self.follows else options.policy_step
        if needed > self.recorded.steps:
            name = "train.steps" if self.follows else "replay.policy_step"
            raise ConfigError(
                f"{name}={needed}, but {options.run} has {self.recorded.steps} recorded steps"
            )

    def load(self, trainer: Trainer, step: int) -> None:
        """Load the policy that the recorded run had before `step`. The drafter and its optimizer stay. Collective."""
        # `fresh_drafter`: the recorded files have no drafter, and the trainer keeps the one that it has.
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
        # Rank 0's answer decides, because the export below is a call of all ranks.
        if not ranks.job().tell(writer is not None and not writer.ended):
            return
        with self._records.clock("record"), exporting(self._trainer.export) as source:
            if source is None or writer is None:
                return
            line = writer.write(step, source("target"), groups)
            if line:
                self._records.event("trajectory", line)


def _run_of(run_dir: Path) -> str:
    """Return the name of the run that recorded the first file of `run_dir`. Raises CheckpointError."""
    with TensorFile(file_of(run_dir, 0)) as file:
        return file.notes.get(_NOTE, "")


def _difference(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what leads from `old` to `new`, bit for bit, under the names that the file gives it.

    old  the policy of the file before; a tensor that it lacks is stored in full
    """
    stored = {}
    for name, tensor in new.items():
        flat = tensor.reshape(-1)
        if name in old:
            # As integers: -0.0 equals 0.0 as a float, and NaN does not equal itself.
            bits = _INTEGERS[tensor.element_size()]
            changed = flat.view(bits) != old[name].reshape(-1).view(bits)
            positions = changed.nonzero()[:, 0]
            if not len(positions):
                continue
            if len(flat) < 2**31:  # int32 can hold every position
                positions = positions.int()
            sparse_bytes = len(positions) * (positions.element_size() + tensor.element_size())
            if sparse_bytes < len(flat) * tensor.element_size():
                stored[f"at/{name}"] = positions
                stored[f"to/{name}"] = flat[positions.long()]
                continue
        stored[f"policy/{name}"] = tensor.contiguous()
    return stored


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"

"""The recorded trajectory of a run: each step's rollouts, and the policy that trained on them (`train.record_gib`).

The policy of our loop does not depend on its drafter. So a drafter can be trained again along the trajectory, without
rollouts and without a backward pass of the policy (`rlspec replay`).

`trajectory/step-000012.safetensors` holds what step 12 starts from:

    policy/NAME            a full tensor under its Hugging Face name
    at/NAME, to/NAME       or, if that is smaller, the positions and the new values of the elements that changed since
                           the file before. A tensor without any change is left out
    rollouts               `wire.encode` of the step's groups, as bytes; absent after the last step

Every tensor has a checksum, and a file appears whole or not at all. Each file names its run.
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
_NOTE = "rlspec.trajectory"  # key in a file's metadata
# by bytes of an element
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def file_of(run_dir: Path, step: int) -> Path:
    """Return the path of what `step` starts from."""
    return run_dir / FOLDER / f"step-{step:06d}.safetensors"


class TrajectoryWriter:
    """Record a run from step `done` on, in at most `limit` bytes. It holds one copy of the policy.

    ended  why nothing more is recorded; "" while recording goes on. A trajectory has no gaps: files of `done` and later
           steps are removed first, and if earlier ones are missing nothing is recorded
    """

    def __init__(self, run_dir: Path, limit: int, done: int) -> None:
        self.run_dir = run_dir
        self.limit = limit
        self.ended = ""
        self._run = ""
        self._newest: dict[str, Tensor] = {}  # the policy as of the newest file
        # from a process that was killed during a write
        for left in (run_dir / FOLDER).glob(".*.partial"):
            left.unlink()
        recorded = list((run_dir / FOLDER).glob("step-*.safetensors"))
        for file in recorded:
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
        """Write what `step` starts from. Returns a line for the first step and for the last that fits, else "".

        `policy` yields full tensors; `groups` are the step's rollouts, none after the last step. Raises OSError.
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
            self._newest = {}
            return self.ended
        path = file_of(self.run_dir, step)
        path.parent.mkdir(exist_ok=True)
        tensor_file.save(stored, path, {_NOTE: self._run})
        self._bytes += path.stat().st_size
        if step:
            return ""
        return f"step 1 takes {_gib(size)}; recording ends when train.record_gib={self.limit / 2**30:g} are used"


class Trajectory:
    """Read a recorded run. Raises CheckpointError for a run without a trajectory, and for missing or damaged files.

    run    its name: a random number, which only this run has
    steps  how many steps can be replayed: those with the policy before and after them
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._policy: dict[str, Tensor] = {}
        self._at = -1
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
        """Return the rollouts that `step` trained on."""
        path = file_of(self.run_dir, step)
        with TensorFile(path) as file:
            content = file[ROLLOUTS].numpy().tobytes()
        try:
            return wire.decode(content, list[Group])
        except msgspec.DecodeError as error:  # another version recorded it
            raise CheckpointError(f"{path}: {ROLLOUTS}: {error}") from None

    def policy(self, step: int) -> Mapping[str, Tensor]:
        """Return the full policy before `step`, valid until the next call. Ascending steps read each file once."""
        if step < self._at:
            self._at = -1
            self._policy = {}
        while self._at < step:
            self._at += 1
            self._apply(file_of(self.run_dir, self._at))
        return self._policy

    def _apply(self, path: Path) -> None:
        with TensorFile(path) as file:
            for key in file:
                kind, _, name = key.partition("/")
                if kind == "policy":
                    self._policy[name] = file[key].clone()  # later files change it
                elif kind == "at":
                    self._policy[name].view(-1)[file[key].long()] = file[f"to/{name}"]


class Replay:
    """The recorded run that a drafter is trained along. Every rank reads it.

    follows   whether the policy and the rollouts of every step are the recorded ones. If not, the policy stays the one
              of `replay.policy_step`, and engines generate with it
    first     step of the policy that the replay begins with
    recorded  what was recorded, with the rollouts of each step
    """

    def __init__(
        self, options: ReplayConfig, model_path: str, steps: int, tensors: LazyTensors
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
        if not ranks.job().tell(writer is not None and not writer.ended):
            return  # the bytes of train.record_gib are used
        with self._records.clock("record"), exporting(self._trainer.export) as source:
            if source is None or writer is None:
                return
            line = writer.write(step, source("target"), groups)
            if line:
                self._records.event("trajectory", line)


def _run_of(run_dir: Path) -> str:
    """Return the name of the run that recorded the first step here. Raises CheckpointError."""
    with TensorFile(file_of(run_dir, 0)) as file:
        return file.notes.get(_NOTE, "")


def _difference(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what leads from `old` to `new`, bit for bit, as the file stores it."""
    stored = {}
    for name, tensor in new.items():
        flat = tensor.reshape(-1)
        if name in old:
            bits = _INTEGERS[tensor.element_size()]
            changed = flat.view(bits) != old[name].reshape(-1).view(bits)
            positions = changed.nonzero()[:, 0]
            if not len(positions):
                continue
            if len(flat) < 2**31:
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

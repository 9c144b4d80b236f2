"""The file `checkpoints/step-000012.state`: all of a checkpoint but the trainer's part (`train/checkpoint.py`).

`checkpoints.py` writes and reads it. It begins with the 32 bytes of a SHA-256 over the rest. The rest is a `State` in
MessagePack (`wire.py`). A change of `State`, `Drawn` or a type in them can make earlier checkpoints unreadable:
`checkpoints.py` refuses those of other versions of the package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_rlspec import files, wire
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.types import Group, OpenGroup, samples_of

SUFFIX = ".state"
_DIGEST = hashlib.sha256().digest_size


class Drawn(NamedTuple):
    """Samples that the next steps train on.

    ahead   scored groups of the next step, with `rollout.staleness`
    replay  rollouts in the drafter's buffer, with `drafter.replay`
    begun   groups that the next rollout continues, with `rollout.partial`
    """

    ahead: Sequence[Group] = ()
    replay: Sequence[Group] = ()
    begun: Sequence[OpenGroup] = ()

    def age(self, done: int, partial: bool) -> float:
        """Return how many versions the oldest token will be behind the policy that trains on it; at least 0.

        done     steps of the run so far: version `done` + 1 trains next
        partial  whether begun groups go on; if not, `Generation.restore` drops them
        """
        # `OpenGroup.oldest` is the oldest version of any token. Without samples it is infinite, and the age minus
        # infinity.
        ages = [0.0, done + 1 - OpenGroup([], samples_of(self.ahead)).oldest]
        if partial:
            # Begun groups go on in the next rollout: the next step's, or the one after it if that one is in `ahead`.
            version = done + 1 + bool(self.ahead)
            ages += [version - begun.oldest for begun in self.begun]
        return max(ages)


class State(NamedTuple):
    """What a checkpoint holds beside the tensors.

    values  by name, plain values that MessagePack can hold. `Saver.save` adds `step`, `version` and `identity`, the
            digests of model and data; `Session._state` and what it calls make the rest. {}: there is no checkpoint
    drawn   samples that the next steps train on
    """

    values: dict[str, Any]
    drawn: Drawn


def of(checkpoint: Path) -> Path:
    """Return the state's path for a checkpoint, whose trainer's directory is `checkpoint`."""
    return checkpoint.with_suffix(SUFFIX)


def write(file: Path, values: Mapping[str, Any], drawn: Drawn) -> None:
    """Write the file whole or not at all. Raises OSError."""
    content = wire.encode(State(dict(values), drawn))
    files.write(file, hashlib.sha256(content).digest() + content)


def read(file: Path) -> State:
    """Return what `write` was given. Raises CheckpointError for a file that is missing, damaged or of another form."""
    try:
        content = file.read_bytes()
        digest, content = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(content).digest() != digest:
            raise CheckpointError(
                f"{file}: its checksum differs from what was written: the file is damaged"
            )
        return wire.decode(content, State)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: no such file: it is lost, or an earlier version of megatron_rlspec wrote the checkpoint"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file}: {files.reason(error)}") from None

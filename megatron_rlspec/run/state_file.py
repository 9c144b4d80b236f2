"""`checkpoints/step-000012.state`: the small state of a run, and the groups of samples that its next steps train on.

The file is a SHA-256 and, in MessagePack, what the digest is of: the `State`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_rlspec import files, wire
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.types import Group, OpenGroup

SUFFIX = ".state"
_DIGEST = hashlib.sha256().digest_size


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


class State(NamedTuple):
    """`values`: step, version, identity, data order, what drafter and speculation have learnt."""

    values: dict[str, Any]
    drawn: Drawn


def of(checkpoint: Path) -> Path:
    """Return the path of the state of the trainer's directory `checkpoint`."""
    return checkpoint.with_suffix(SUFFIX)


def write(file: Path, values: Mapping[str, Any], drawn: Drawn) -> None:
    """Write the file whole or not at all. Raises OSError."""
    content = wire.encode(State(dict(values), drawn))
    files.write(file, hashlib.sha256(content).digest() + content)


def read(file: Path) -> State:
    """Return what `write` was given. Raises CheckpointError."""
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

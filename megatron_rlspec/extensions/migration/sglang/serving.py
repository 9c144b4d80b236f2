"""What migration adds to an engine of `rlspec serve --extensions migration` (`rollout/sglang/extensions.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_rlspec.extensions.migration.sglang import folder, kv_moves, kv_tree, schemas
from megatron_rlspec.extensions.migration.sglang.kv_moves import before_round
from megatron_rlspec.rollout.sglang.extensions import Command, Hook, Route

__all__ = ["before_round", "commands", "hooks", "routes"]


def routes() -> Mapping[str, Route]:
    # Only the HTTP process has these modules of SGLang's server.
    from megatron_rlspec.extensions.migration.sglang.reservations import reservations
    from megatron_rlspec.rollout.sglang.http.bodies import control

    keep: dict[str, Callable[[Any], None]] = {
        "kv_offer": reservations.of_samples,
        "kv_accept": reservations.of_samples,
        "kv_export": reservations.of_files,
        "kv_detach": reservations.of_files,
    }
    return {
        f"control/{name}": (control(name, schema, keep.get(name)), schema)
        for name, schema in schemas.COMMANDS.items()
    }


def commands() -> Mapping[str, Command]:
    return kv_moves.COMMANDS


def hooks() -> Iterator[Hook]:
    folder.make()
    if not kv_tree.lacking():
        yield from kv_moves.hooks()

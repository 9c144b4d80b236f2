"""A move of running samples: the decision, and what is recorded of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

How = Literal["kv", "recompute"]


@dataclass(frozen=True)
class Move:
    """A decision: the samples `ids` leave the engine `source` for the engine `target`."""

    source: str
    target: str
    ids: tuple[str, ...]


@dataclass
class MoveRecord:
    """The record of one move, as a line of `moves.jsonl` has it.

    ids        samples that the target continues
    how        "kv": their KV caches traveled; "recompute": the target prefills prompt and response
    tokens     of these samples when they moved, prompts included
    bytes, ms  that arrived, and that the target spent on them; of a recomputed sample, ms until it was sent on
    """

    source: str
    target: str
    ids: list[str]
    how: How
    tokens: int
    bytes: int = 0
    ms: float = 0.0

"""The record of a move of running samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoveRecord:
    """The record of one move, as a line of `moves.jsonl` has it.

    ids        samples that the target continues
    how        "kv", or "recompute"
    tokens     of these samples when they moved, prompts included
    bytes, ms  that arrived, and that the target spent on them; of a recomputed sample, ms until it was sent on
    rounds     of decoding that the samples missed
    refused    why some samples did not move
    """

    source: str
    target: str
    ids: list[str]
    how: str
    why: str
    tokens: int
    bytes: int = 0
    ms: float = 0.0
    rounds: float = 0.0
    refused: str = ""

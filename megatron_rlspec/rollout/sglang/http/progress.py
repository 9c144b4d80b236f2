"""What a client has of a sample that is being generated. Each token is looked at once, however often a line is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class Progress:
    """The part of one sample that was sent.

    tokens  how many
    rounds  verify rounds in which they were generated
    """

    def __init__(self) -> None:
        self.tokens = 0
        # tokens that are no drafts: every round ends with one, and so does each prefill
        self._ends = 0
        self._marked = 0

    def line(
        self,
        ids: Sequence[int],
        entries: Sequence[Sequence[Any]],
        marks: Sequence[Any],
        prefills: int,
    ) -> dict[str, Any] | None:
        """Return what is new of a sample, as a line's fields; None if nothing is. Raises ValueError for NaN.

        ids      all tokens so far
        entries  of each token the log-prob, and what SGLang says besides
        marks    of each token whether it was a draft
        """
        last = min(len(ids), len(entries))
        if last <= self.tokens:
            return None
        part = slice(self.tokens, last)
        new = {"output_ids": ids[part], "logprobs": logprobs(entries[part]), "drafted": marks[part]}
        self._ends += sum(not mark for mark in marks[self._marked : last])
        self._marked = min(len(marks), last)
        self.tokens = last
        return {"drawn": new, "rounds": max(0, self._ends - prefills)}


def logprobs(entries: Sequence[Sequence[Any]]) -> list[float]:
    """Return the log-probs of tokens. Raises ValueError unless they are numbers: JSON has no other ones."""
    found = [entry[0] for entry in entries]
    if not math.isfinite(sum(found)):
        place = next((i for i, value in enumerate(found) if not math.isfinite(value)), 0)
        raise ValueError(
            f"the weights give a log-prob of {found[place]}; push weights without NaN and infinity"
        )
    return found

"""The lines that tell a client the new tokens of a sample that is being generated.

Each token is read once, however many lines are sent. The client's side is `_with_progress` in `client/engine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class Progress:
    """The part of one sample that was sent. `tokens`: how many."""

    def __init__(self) -> None:
        self.tokens = 0
        # Tokens that are no drafts. Every verify round ends with one, and so does each prefill, so this minus the
        # prefills is the number of rounds.
        self._ends = 0
        self._counted_marks = 0  # there can be fewer marks than tokens

    def line(
        self,
        ids: Sequence[int],
        entries: Sequence[Sequence[Any]],
        marks: Sequence[Any],
        prefills: int,
    ) -> dict[str, Any] | None:
        """Return the fields of a line: the tokens since the last one, and all `rounds` so far; None without new tokens.

        Raises ValueError for a log-prob that is not finite.

        ids       all tokens so far
        entries   of each token (log-prob, ...), SGLang's `output_token_logprobs`
        marks     of each token whether it was a draft, 0 or 1 (`control._mark_drafts`)
        prefills  how often the sample was prefilled so far
        """
        last = min(len(ids), len(entries))
        if last <= self.tokens:
            return None
        part = slice(self.tokens, last)
        new = {"output_ids": ids[part], "logprobs": logprobs(entries[part]), "drafted": marks[part]}
        self._ends += sum(not mark for mark in marks[self._counted_marks : last])
        self._counted_marks = min(len(marks), last)
        self.tokens = last
        return {"drawn": new, "rounds": max(0, self._ends - prefills)}


def logprobs(entries: Sequence[Sequence[Any]]) -> list[float]:
    """Return the log-probs of tokens. Raises ValueError for NaN and infinity, which JSON does not have."""
    values = [entry[0] for entry in entries]
    if not math.isfinite(sum(values)):  # one sum is faster than a test of each
        place = next((i for i, value in enumerate(values) if not math.isfinite(value)), 0)
        raise ValueError(
            f"the weights give a log-prob of {values[place]}; push weights without NaN and infinity"
        )
    return values

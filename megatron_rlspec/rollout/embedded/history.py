"""Drafts from old answers in an embedded engine: which rows have some, and what a round's drafts taught."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from megatron_rlspec.rollout.embedded.cache import Cache
from megatron_rlspec.rollout.embedded.draft import Ahead, given
from megatron_rlspec.rollout.embedded.verify import Committed
from megatron_rlspec.speculation.history import LONGEST, START, Sources, Texts
from megatron_rlspec.types import Request, SpecConfig


class HistoryDrafts:
    """Decides which rows verify drafts of old answers in place of the drafter's. It is idle with `drafts = 0`.

    drafts  from old answers in a round, at most
    """

    def __init__(self, cache: Cache, checks: Mapping[int, np.ndarray]) -> None:
        """`checks`: rows whose next round verifies `Request.draft`."""
        self.drafts = 0
        self._cache = cache
        self._checks = checks
        self.forget()

    def new_weights(self) -> None:
        """Forget what was accepted under other weights."""
        self._sources = Sources()

    def forget(self) -> None:
        """Forget rows, texts and what was accepted: ranks that become one engine have seen different rounds."""
        self._requests: dict[int, Request] = {}  # of the rows that are taken
        self._texts: dict[int, Texts] = {}  # of their prompts, by id
        self._offers: dict[int, np.ndarray] = {}  # row -> drafts of the next round
        self._matches: dict[int, int] = {}  # row -> tokens of the match, also where the drafter drafts
        self.new_weights()

    def seat(self, row: int, request: Request) -> None:
        """Note that a request took a row."""
        if self.drafts and request.history:
            self._requests[row] = request
            if request.prompt.id not in self._texts:
                self._texts[request.prompt.id] = Texts(request.history)

    def vacate(self, row: int) -> None:
        """Note that a row is free."""
        self._offers.pop(row, None)
        self._matches.pop(row, None)
        if row in self._requests:
            prompt = self._requests.pop(row).prompt.id
            if all(other.prompt.id != prompt for other in self._requests.values()):
                del self._texts[prompt]

    def ended(self, request: Request, response: Sequence[int]) -> None:
        """Take the answer of a request that has ended as a text of its siblings."""
        if request.prompt.id in self._texts:
            self._texts[request.prompt.id].add(response)

    def look_up(self, rows: np.ndarray, config: SpecConfig) -> None:
        """Choose which of the rows draft from history in a round of `config`. Only chains are replaced."""
        self._offers.clear()
        self._matches.clear()
        if not self._requests or config.topk != 1 or not config.num_steps:
            return
        for row in rows.tolist():
            if row not in self._requests or row in self._checks:
                continue
            prompt = self._requests[row].prompt
            first = len(prompt.tokens)
            length = int(self._cache.length[row])
            end = self._cache.tokens[row, max(first, length - LONGEST) : length]
            if length - first < LONGEST:
                end = np.concatenate([[START], end])
            match, drafts = self._texts[prompt.id].follow(end, self.drafts)
            if match:
                self._matches[row] = match
                if self._sources.history(match):
                    self._offers[row] = drafts

    def has(self, row: int) -> bool:
        """Return whether a row's next round verifies drafts of old answers."""
        return row in self._offers

    def nodes(self, rows: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """Return `nodes [B]`, the tokens that a round verifies, with those of old answers."""
        if not self._offers:
            return nodes
        return np.maximum(nodes, [1 + len(self._offers.get(row, ())) for row in rows.tolist()])

    def round(
        self,
        run: Callable[[np.ndarray, SpecConfig, Ahead | None], list[Committed]],
        rows: np.ndarray,
        config: SpecConfig,
        ahead: Ahead | None,
    ) -> list[Committed]:
        """Run a round in which rows with drafts of old answers have these verified, and learn from it.

        run  drafts for the rows before `ahead`'s, verifies and commits
        """
        if ahead is not None:  # those rows must be the last ones
            self._offers.clear()
            self._matches.clear()
        if not self._matches:
            return run(rows, config, ahead)
        has = np.array([self.has(row) for row in rows.tolist()])
        own, ordered = rows[has], np.concatenate([rows[~has], rows[has]])
        if len(own):
            pending = self._cache.tokens[own, self._cache.length[own] - 1]
            ahead = Ahead(own, given(pending, [self._offers[row] for row in own.tolist()]), None)
        committed = dict(zip(ordered.tolist(), run(ordered, config, ahead), strict=True))
        for row in self._matches.keys() & committed.keys():
            self._sources.observe(self._matches[row], self.has(row), committed[row].accepted)
            committed[row] = committed[row]._replace(history=self.has(row))
        return [committed[row] for row in rows.tolist()]

"""What earlier texts offer as drafts along a text, and the rounds that they make of it. Used by `history.py`.

Rounds are followed on the final text, from every position at which one can begin.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_rlspec.types import Sample

LONGEST = 8  # tokens of a match that the suffix index looks for
MOST = 16  # drafts from history in a round


class Offer(NamedTuple):
    """The drafts of one source at every position of a text; all `[L]`, counted from the prompt's first token.

    match    tokens before the position that the source has seen in this order; 0: it has nothing
    offered  drafts
    right    how many of them, from the first one on, are the text's tokens
    """

    match: np.ndarray
    offered: np.ndarray
    right: np.ndarray

    def most(self, drafts: int) -> Offer:
        """Return the offer of at most so many drafts."""
        return Offer(self.match, np.minimum(self.offered, drafts), np.minimum(self.right, drafts))


class Walk(NamedTuple):
    """Rounds of one sample, or their sum: rounds, accepted drafts, verified drafts, rounds of the drafter."""

    rounds: int
    accepted: int
    verified: int
    drafter: int


def walk(own: np.ndarray, offer: Offer, by_drafter: np.ndarray) -> Walk:
    """Follow the rounds of a text. The first token of every turn comes from a prefill, and is no round's.

    own         [L], whether the policy generated the token
    by_drafter  [L], whether the drafter makes the drafts at a position
    """
    rounds = accepted = verified = drafter = 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], own.astype(np.int8), [0]])))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        at = first + 1
        while at < end:
            taken = min(int(offer.right[at]), end - at - 1)
            rounds += 1
            accepted += taken
            verified += int(offer.offered[at])
            drafter += int(by_drafter[at])
            at += taken + 1
    return Walk(rounds, accepted, verified, drafter)


def mixed(drafter: Offer, history: Offer, least: int) -> tuple[Offer, np.ndarray]:
    """Return the offer of history where its match has `least` tokens, else the drafter's, and where the latter is."""
    own = (history.match < least) | (history.offered == 0)
    return Offer(*(np.where(own, a, b) for a, b in zip(drafter, history, strict=True))), own


class SuffixIndex:
    """What followed each run of up to `LONGEST` tokens in texts.

    The texts of earlier steps are known from the start. A sibling's token at index i is known to a sample that has more
    than i tokens, since all samples of a group run at once; with `finished`, from the start.
    """

    def __init__(self) -> None:
        self._earlier: dict[tuple, Counter] = defaultdict(Counter)
        self._siblings: dict[tuple, list[tuple[int, int, int]]] = defaultdict(list)  # (sibling, index, token)

    def add(self, tokens: Sequence[int]) -> None:
        for context, token, _ in _contexts(tokens):
            self._earlier[context][token] += 1

    def set_siblings(self, texts: Sequence[Sequence[int]], old: Sequence[Sequence[int]] = ()) -> None:
        """Set the texts of a group, and those of the same seeds by an older policy, which are known from the start.

        A sample does not see the old text of its own seed: in another epoch it had another one.
        """
        self._siblings.clear()
        for known, found in ((False, texts), (True, old)):
            for number, tokens in enumerate(found):
                for context, token, at in _contexts(tokens):
                    self._siblings[context].append((number, -1 if known else at, token))

    def follow(self, before: Sequence[int], number: int, now: int) -> tuple[int, int]:
        """Return the length of the longest match of the end of `before`, and what followed most often; (0, -1): none.

        number  the sample's own among its siblings
        now     indices below this are known of siblings
        """
        for length in range(min(LONGEST, len(before)), 0, -1):
            context = tuple(before[-length:])
            seen = Counter(self._earlier.get(context, ()))
            for sibling, at, token in self._siblings.get(context, ()):
                if sibling != number and at < now:
                    seen[token] += 1
            if seen:
                return length, max(seen, key=lambda token: (seen[token], -token))
        return 0, -1

    def offer(self, text: Sequence[int], prompt: int, number: int, finished: bool) -> Offer:
        """Return what the index offers along a text; positions in the prompt have no offer."""
        found = nothing(len(text))
        for at in range(prompt, len(text)):
            now = 1 << 40 if finished else at
            before = list(text[max(0, at - LONGEST) : at])
            for i in range(MOST):
                length, token = self.follow(before, number, now)
                if not length:
                    break
                found.match[at] = found.match[at] or length
                found.offered[at] += 1
                if found.right[at] == i and at + i < len(text) and text[at + i] == token:
                    found.right[at] += 1
                before = [*before[-LONGEST + 1 :], token]
        return found


def _contexts(tokens: Sequence[int]) -> Iterator[tuple[tuple, int, int]]:
    """Yield (run of tokens, the token after it, its index) of all runs of up to `LONGEST` tokens."""
    for at in range(1, len(tokens)):
        for length in range(1, min(LONGEST, at) + 1):
            yield tuple(tokens[at - length : at]), tokens[at], at


def nothing(length: int) -> Offer:
    """Return an offer without drafts."""
    return Offer(*(np.zeros(length, np.int64) for _ in range(3)))


def same_seed(text: np.ndarray, old: np.ndarray, prompt: int) -> Offer:
    """Return what an old answer under the same seed offers: its tokens at the same positions.

    The match is how many tokens before the position agree; `LONGEST` as long as no token has differed.
    """
    found = nothing(len(text))
    both = min(len(text), len(old))
    agree = text[:both] == old[:both]
    match = LONGEST
    for at in range(prompt, both):
        if match:
            found.match[at] = min(match, LONGEST)
            found.offered[at] = min(MOST, len(old) - at)
            differ = np.flatnonzero(~agree[at : at + MOST])
            found.right[at] = differ[0] if len(differ) else min(MOST, both - at)
        match = match + 1 if agree[at] else 0
    return found


def survived(old: Sample, new: Sample) -> int:
    """Return how many tokens of the old answer, from its first on, the new one repeats."""
    both = min(len(old.response), len(new.response))
    differ = np.flatnonzero(old.response[:both] != new.response[:both])
    return int(differ[0]) if len(differ) else both

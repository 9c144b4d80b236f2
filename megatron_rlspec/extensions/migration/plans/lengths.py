"""How many tokens running samples still draw, estimated from the lengths of samples so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import numpy as np

KEPT = 4096  # newest samples


class Lengths:
    """The Kaplan-Meier estimate of response lengths (Kaplan and Meier, 1958).

    A sample that was cut, by the cap or because it still runs, is *censored*: it shows that its length is larger.
    Beyond the longest sample the estimate is undefined. There, a sample of n tokens is taken to reach u tokens with
    probability n / u. Without any sample, all run to the cap. It depends on the samples alone, so ranks agree.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, bool]] = deque(maxlen=KEPT)

    def observe(self, lengths: Sequence[int], censored: Sequence[bool]) -> None:
        """Add response lengths, in tokens."""
        for length, cut in zip(lengths, censored, strict=True):
            self._seen.append((int(length), bool(cut)))
        self.__dict__.pop("_survival", None)
        self.__dict__.pop("_below", None)

    def beside(self, running: Sequence[int]) -> Lengths:
        """Return the estimate that also counts samples which still run, by their tokens so far.

        Without them, an estimate in the middle of a rollout knows the short samples only.
        """
        both = Lengths()
        both._seen = deque((*self._seen, *((int(length), True) for length in running)))
        return both

    @cached_property
    def _survival(self) -> np.ndarray:
        """Return P(length > u), `[longest + 1]`; empty without samples."""
        if not self._seen:
            return np.zeros(0)
        flat = np.fromiter(chain.from_iterable(self._seen), np.int64, 2 * len(self._seen))
        lengths, cut = flat[::2], flat[1::2]
        size = int(lengths.max()) + 1
        ended = np.bincount(lengths[cut == 0], minlength=size)
        at_risk = np.bincount(lengths, minlength=size)[::-1].cumsum()[::-1]
        return np.cumprod(1 - ended / at_risk)

    @cached_property
    def _below(self) -> np.ndarray:
        """Return the sum of `_survival` over all u < n, `[longest + 2]`."""
        return np.concatenate([[0.0], np.cumsum(self._survival)])

    def survival(self, length: int | np.ndarray, more: np.ndarray) -> np.ndarray:
        """Return the probability that samples of `length` tokens draw more than `more` further ones (broadcast)."""
        known = self._survival
        length = np.asarray(length)
        reached = length + np.maximum(np.asarray(more, float), 0.0)
        if not len(known):
            return np.ones_like(reached)
        now = self._now(length)
        inside = known[np.minimum(reached, len(known) - 1).astype(np.int64)] / np.where(
            now > 0, now, 1.0
        )
        found: np.ndarray = np.where(
            now > 0, inside, np.maximum(length, 1) / np.maximum(reached, 1.0)
        )
        return found

    def _now(self, length: np.ndarray) -> np.ndarray:
        """Return P(length > `length`), 0 where it is not known."""
        known = self._survival
        return np.where(length < len(known), known[np.minimum(length, len(known) - 1)], 0.0)

    def remaining(self, length: int, cap: int) -> float:
        """Return the expected further tokens of a sample of `length` tokens that ends at `cap` at the latest."""
        if length >= cap:
            return 0.0
        known = self._survival
        if length < len(known) and known[length] > 0:
            inside = min(cap, len(known))
            beyond = (cap - inside) * known[-1]
            return float((self._below[inside] - self._below[length] + beyond) / known[length])
        return float(self.survival(length, np.arange(cap - length)).sum())

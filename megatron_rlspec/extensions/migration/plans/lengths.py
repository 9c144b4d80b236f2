"""How many tokens running samples still take, estimated from the lengths of samples so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

NEWEST = 4096  # samples that count


class Lengths:
    """The Kaplan-Meier estimate of response lengths (Kaplan and Meier, 1958).

    A sample that was cut, by the cap or because it still runs, is *censored*: it shows that its length is larger.
    Beyond the longest sample the estimate is undefined. There, a sample of n tokens is taken to reach u tokens with
    probability n / u. Without any sample, all run to the cap. It depends on the samples alone, so ranks agree.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=NEWEST)
        self._censored: deque[bool] = deque(maxlen=NEWEST)

    def observe(self, lengths: Sequence[int], censored: Sequence[bool]) -> None:
        """Add response lengths, in tokens."""
        self._lengths.extend(lengths)
        self._censored.extend(censored)

    def remaining(self, running: Sequence[int], cap: int) -> np.ndarray:
        """Return the expected further tokens, [n], of running samples that have `running` [n] tokens.

        They count as censored themselves. Without them, an estimate in the middle of a rollout knows the short samples
        only. All end at `cap` tokens at the latest.
        """
        survival = self._survival(running)
        return np.array([_remaining(survival, length, cap) for length in running])

    def _survival(self, running: Sequence[int]) -> np.ndarray:
        """Return P(length > u), [longest + 1]; empty if no sample has ended or runs."""
        still_running = [True] * len(running)
        lengths = np.array([*self._lengths, *running], np.int64)
        censored = np.array([*self._censored, *still_running], bool)
        if not len(lengths):
            return np.zeros(0)
        size = int(lengths.max()) + 1
        ended = np.bincount(lengths[~censored], minlength=size)
        reached = np.bincount(lengths, minlength=size)
        at_risk = reached[::-1].cumsum()[::-1]
        return np.cumprod(1 - ended / at_risk)


def _remaining(survival: np.ndarray, length: int, cap: int) -> float:
    if length >= cap:
        return 0.0
    if not len(survival):
        return float(cap - length)
    if length < len(survival) and survival[length] > 0:
        inside = survival[length:cap].sum()
        # From the longest sample on, no sample is known to end.
        tokens_beyond = max(cap - len(survival), 0)
        beyond = tokens_beyond * survival[-1]
        return float((inside + beyond) / survival[length])
    reached = np.maximum(np.arange(length, cap), 1)
    chances = max(length, 1) / reached
    return float(chances.sum())

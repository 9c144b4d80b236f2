"""How fast an engine decodes, and when it will have finished: from a cost of rounds and the lengths of samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.round_times import Cost
from megatron_rlspec.types import SpecConfig

BATCHES = np.array(sorted({round(2 ** (i / 2)) for i in range(21)}), float)  # 1 .. 1024
CONTEXTS = 2.0 ** np.arange(4, 18)  # mean tokens of a sample
MOST_BATCH = 512  # beyond it `turning_point` does not look
NEGLIGIBLE = 0.1  # of the first sample's throughput: what one more sample adds at the turning point


class Pace:
    """Time per token and per round, by batch and mean context, each under the best candidate there (ReSpec, 5.2).

    The unit of time is that of `cost`: ms of a profiled table, passes of a roofline. `rates` are a_1.. as in
    `expected_tokens`.
    """

    def __init__(
        self, cost: Cost, candidates: Sequence[SpecConfig], rates: Sequence[float]
    ) -> None:
        self._cost = cost
        self._candidates = tuple(candidates)
        self._tokens = np.array([expected_tokens(config, rates) for config in candidates])
        batch = BATCHES[:, None]
        self._per_token, self._per_round = self._best(batch, batch * CONTEXTS)

    def _best(self, batch: np.ndarray, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the time per token of one sample, and per round, at `batch` and total `context`."""
        rounds = self._cost.grid(self._candidates, batch, context)
        per_token = rounds / self._tokens.reshape(-1, *(1,) * (rounds.ndim - 1))
        best = per_token.argmin(0)[None]
        return np.take_along_axis(per_token, best, 0)[0], np.take_along_axis(rounds, best, 0)[0]

    def per_token(self, batch: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Return the time in which each of `batch` samples of mean context `length` draws one token."""
        return _interpolated(self._per_token, batch, length)

    def per_round(self, batch: np.ndarray, length: np.ndarray | float) -> np.ndarray:
        return _interpolated(self._per_round, batch, np.asarray(length))

    def turning_point(self, length: float) -> int:
        """Return the batch at which one more sample adds less than a tenth of the first one's throughput.

        RLHFSpec, section 6.1 and figure 9: its threshold.
        """
        batch = np.arange(1.0, MOST_BATCH + 2)
        throughput = batch / self._best(batch, batch * max(length, 1.0))[0]
        flat = np.flatnonzero(np.diff(throughput) < NEGLIGIBLE * throughput[0])
        return int(batch[flat[0]]) if len(flat) else MOST_BATCH


def terms(alive: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Return what `drained` sums over samples that decode together: log(1 - alive), alive and alive * context.

    A time is counted in tokens of an average sample.

    alive    [n, T] probability that a sample still runs
    context  [n, T] its tokens then
    """
    return np.stack([np.log1p(-np.minimum(alive, 1 - 1e-9)), alive, alive * context])


def drained(pace: Pace, times: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Return the expected times [K] until the last of K sets of samples has ended; `sums` [3, K, T] of `terms`."""
    some = -np.expm1(sums[0])  # the probability that at least one runs
    batch = np.maximum(sums[1] / np.maximum(some, 1e-9), 1.0)
    length = sums[2] / np.maximum(sums[1], 1e-9)
    speed = some * pace.per_token(batch, length)
    found: np.ndarray = ((speed[:, 1:] + speed[:, :-1]) / 2 * np.diff(times)).sum(1)
    return found


def _interpolated(table: np.ndarray, batch: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Interpolate `table [BATCHES, CONTEXTS]` linearly. Outside, the nearest edge counts, times the larger batch."""
    i = _CELLS[np.minimum(batch, BATCHES[-1]).astype(np.int64)]
    j = np.clip(np.frexp(length)[1] - 5, 0, len(CONTEXTS) - 2)  # floor(log2(length / CONTEXTS[0]))
    u = np.clip((batch - BATCHES[i]) / _STEPS[i], 0.0, 1.0)
    # a cell is as wide as its lower edge
    v = np.clip((length - CONTEXTS[j]) / CONTEXTS[j], 0.0, 1.0)
    low = table[i, j] * (1 - v) + table[i, j + 1] * v
    high = table[i + 1, j] * (1 - v) + table[i + 1, j + 1] * v
    found: np.ndarray = (low * (1 - u) + high * u) * np.maximum(batch / BATCHES[-1], 1.0)
    return found


_STEPS = np.diff(BATCHES)
_WHOLE = np.arange(int(BATCHES[-1]) + 1)
# edges are whole numbers
_CELLS = np.clip(np.searchsorted(BATCHES, _WHOLE, side="right") - 1, 0, len(BATCHES) - 2)

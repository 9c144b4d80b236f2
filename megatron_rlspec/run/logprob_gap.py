"""Which difference of log-probs between engines and trainer means that an engine samples from other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

GAP = "policy/train_rollout_logprob_abs_diff"
# nats a token. Kernels of engine and trainer differ by up to 0.02 in bfloat16 and 1e-6 in float32.
LIMIT = {"bfloat16": 0.5, "float32": 0.01, "float64": 0.01}
# A run's own level is a median over its steps. So many times that level is too much, unless it is below LEAST.
JUMP = 5.0
LEAST = {"bfloat16": 0.02, "float32": 1e-4, "float64": 1e-4}
STEPS = 3  # that make a level
NEWEST = 20  # steps that it is of


class LogprobGap:
    """The largest allowed gap of a step, the same on every rank.

    seen  gaps of the newest steps that were not skipped; part of a checkpoint
    """

    def __init__(self, given: float | None, dtype: str, older: bool) -> None:
        """`given`: by the user; None: chosen by `dtype`, and by what the run has seen.

        older  whether samples are of an older policy: log-probs differ by what the policy has learnt since
        """
        self.seen: list[float] = []
        self._given = given
        self._dtype = dtype
        self._older = older

    @property
    def limit(self) -> float:
        """Return the largest allowed gap of the next step, in nats a token."""
        if self._given is not None:
            return self._given
        if self._older:
            return max(LIMIT.values())
        limit = LIMIT[self._dtype]
        if len(self.seen) >= STEPS:
            limit = min(limit, max(LEAST[self._dtype], JUMP * median(self.seen)))
        return limit

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step that was not skipped."""
        if GAP in metrics:
            self.restore([*self.seen, metrics[GAP]])

    def restore(self, seen: Sequence[float]) -> None:
        """Continue with the gaps of a checkpoint."""
        self.seen = list(seen[-NEWEST:])

"""How far log-probs of engines and trainer may differ, before the run concludes that an engine has other weights.

`Trainer.train_step` skips the update of a policy with a larger gap. `Records` holds the limit: it counts the skipped
steps, and `session.py` hands the limit to each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

GAP = "policy/train_rollout_logprob_abs_diff"  # metric of `Trainer.train_step`
# The limit of a run's first steps, in nats a token, by model.dtype. Kernels of engine and trainer differ by up to 0.02
# in bfloat16 and 1e-6 in float32.
LIMIT = {"bfloat16": 0.5, "float32": 0.01, "float64": 0.01}
# Later the limit is JUMP times the run's usual gap (the median of its newest steps), but not below LEAST nats a token,
# and not above LIMIT.
JUMP = 5.0
LEAST = {"bfloat16": 0.02, "float32": 1e-4, "float64": 1e-4}
STEPS = 3  # steps after which the median is used
NEWEST = 20  # newest steps that enter the median


class LogprobGap:
    """The largest allowed gap of a step, the same on every rank.

    seen  gaps of the newest steps without a skipped update, at most NEWEST; part of a checkpoint ("logprob_gaps")
    """

    def __init__(self, given: float | None, dtype: str, older_samples: bool) -> None:
        """Begin without any step.

        given          the user's limit (health.logprob_gap); None: it follows from `dtype` and the gaps seen
        dtype          model.dtype
        older_samples  whether samples may be of an older policy: log-probs then also differ by what the policy has
                       learnt since
        """
        self.seen: list[float] = []
        self._given = given
        self._dtype = dtype
        self._older_samples = older_samples

    @property
    def limit(self) -> float:
        """Return the largest allowed gap of the next step, in nats a token."""
        if self._given is not None:
            return self._given
        if self._older_samples:
            # How much the policy has learnt varies from step to step, so the usual gap says nothing.
            return max(LIMIT.values())
        limit = LIMIT[self._dtype]
        if len(self.seen) >= STEPS:
            limit = min(limit, max(LEAST[self._dtype], JUMP * median(self.seen)))
        return limit

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step of which no update was skipped, equal on all ranks. `Records.write` calls it."""
        if GAP in metrics:
            self.restore([*self.seen, metrics[GAP]])

    def restore(self, seen: Sequence[float]) -> None:
        """Continue with the gaps of a checkpoint, the oldest first."""
        self.seen = list(seen[-NEWEST:])

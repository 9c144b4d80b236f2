"""End a run whose rewards all fail (`train.max_bad_steps`), instead of training on nothing.

`run/generation.py` counts on rank 0. `run/rank0.py` ends the run on all ranks. `run/recording.py` counts skipped
optimizer steps apart, and `run/session.py` ends the run by that number and the same option.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rlspec.tasks.rewards import RewardError


class FailedSteps:
    """Count the steps in a row in which every reward failed. `most` such steps stop the run; 0: nothing stops it.

    Before any reward has succeeded, one such step or evaluation stops the run, because the reward itself must be wrong.
    A resumed run counts from 0, and no reward has succeeded in it yet.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self.succeeded = False  # whether any reward of this process has

    def observe(self, name: str, samples: int, failures: Sequence[str]) -> None:
        """Count a step, or a refill within it, called `name` in messages. Raises RewardError at the limit.

        samples   number of rewards, at least one: none would count as failed, without a failure to name
        failures  a line for each reward that failed, as `Scoring.finish` returns them
        """
        if len(failures) < samples:
            self.count = 0
            self.succeeded = True
            return
        self.count += 1
        limit = self.most if self.succeeded else min(self.most, 1)  # 0, no limit, stays 0
        if 0 < limit <= self.count:
            since = f"for {self.count} steps in a row" if self.succeeded else "and none succeeded"
            raise RewardError(
                f"{name}: all {samples} rewards failed, {since} (train.max_bad_steps={self.most}); "
                f"the first: {failures[0]}"
            )

    def observe_evaluation(self, name: str, samples: int, failures: Sequence[str]) -> None:
        """Count an evaluation as a step, but only while no reward has succeeded yet."""
        if not self.succeeded:
            self.observe(name, samples, failures)

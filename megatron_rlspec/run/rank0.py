"""Guards rank 0's calls to engines and rewards: the other ranks wait meanwhile, and a failure ends the run on all.

Without this a rank that fails would leave the others waiting in their next collective call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host import ranks
from megatron_rlspec.host.interruption import Interruption
from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.push.push import PushError
from megatron_rlspec.run.generation import RolloutCancelledError
from megatron_rlspec.run.rollouts import Rollouts
from megatron_rlspec.tasks import rewards

DONE, AGAIN, OVER = range(3)  # outcomes that rank 0 tells all ranks


@dataclass(frozen=True)
class Rank0:
    """Guards the calls to engines and rewards. Every rank holds one, and all make the same calls.

    is_rank0       whether this is rank 0
    rollouts       engines and rewards; None on ranks above 0, and in runs without engines
    interruption   a signal that ends rollouts
    stop           saves a checkpoint and raises RunStopped; collective (`Session._stop`)
    """

    is_rank0: bool
    rollouts: Rollouts | None
    interruption: Interruption
    stop: Callable[[str], NoReturn]

    def ask(self, call: Callable[[Rollouts], object]) -> bool:
        """Let rank 0 call engines or rewards; the other ranks wait. Collective. Result and errors as of `attempt`."""

        def act() -> None:
            if self.rollouts is not None:
                call(self.rollouts)

        return self.attempt(act)

    def attempt(self, act: Callable[[], object]) -> bool:
        """Call `act` on every rank, which may call engines or rewards on rank 0. Collective.

        Returns False on every rank if no engine is left, but one is starting again: the caller must push, and call
        again, so `act` may run several times. Any other failure of engines or rewards raises RunStopped on every rank,
        after a checkpoint. A PushError of rank 0 itself, and errors of other types, are raised on their own rank only.
        """
        reason = ""
        try:
            act()
        except (EngineError, HealthError, rewards.RewardError) as error:
            reason = str(error)
        except RolloutCancelledError:
            reason = self.interruption.reason
        except PushError as error:
            if self.is_rank0:
                # The export gave tensors that may not be sent, so a checkpoint of them may be wrong as well: none is
                # written, and rank 0's error ends the job.
                raise
            # On ranks above 0 `exporting` raises a PushError for any error of rank 0's body, such as an EngineError.
            # Rank 0's outcome, below, says what follows.
            reason = str(error)
        # Only rank 0 knows what failed, so all ranks take its outcome.
        outcome = DONE
        if self.is_rank0 and reason:
            starts_again = self.rollouts is not None and self.rollouts.engines.awaited
            outcome = AGAIN if starts_again else OVER
        outcome = ranks.job().tell(outcome)
        if outcome == OVER:
            self.stop(reason)
        return outcome == DONE

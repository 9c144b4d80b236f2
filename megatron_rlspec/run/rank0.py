"""Only rank 0 calls engines and rewards; the other ranks wait. A failure there ends the run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from megatron_rlspec import wire
from megatron_rlspec.engine import EngineError
from megatron_rlspec.host import ranks
from megatron_rlspec.host.interruption import Interruption
from megatron_rlspec.push.contract import HealthError
from megatron_rlspec.push.push import PushError
from megatron_rlspec.run.generation import RolloutCancelledError
from megatron_rlspec.tasks import rewards
from megatron_rlspec.types import Group

DONE, AGAIN, OVER = range(3)


class Rank0:
    """Runs calls to engines on rank 0 while the other ranks wait. Every rank holds one, and all make the same calls.

    main          whether this is rank 0
    interruption  a signal that ends rollouts
    awaited       returns whether no engine is left, but one is starting again; asked on rank 0
    stop          ends the run on every rank: saves a checkpoint and raises RunStopped
    """

    def __init__(
        self,
        main: bool,
        interruption: Interruption,
        awaited: Callable[[], bool],
        stop: Callable[[str], NoReturn],
    ) -> None:
        self.main = main
        self._interruption = interruption
        self._awaited = awaited
        self._stop = stop

    def run(self, act: Callable[[], object], *, all_ranks: bool = False) -> bool:
        """Run `act` on rank 0, or on all ranks if `all_ranks`. Collective.

        Returns False on every rank if the caller must push and repeat `act`: no engine is left, but one is starting
        again. Any other failure of engines or rewards raises RunStopped on every rank, after a checkpoint.
        """
        reason = ""
        try:
            if self.main or all_ranks:
                act()
        except (EngineError, HealthError, rewards.RewardsFailedError) as error:
            reason = str(error)
        except RolloutCancelledError:
            reason = self._interruption.reason
        except PushError as error:
            if self.main:
                # the export failed, so a checkpoint of the same parameters may be wrong as well
                raise
            reason = str(error)
        outcome = DONE
        if self.main and reason:
            outcome = AGAIN if self._awaited() else OVER
        outcome = ranks.job().number(outcome)
        if outcome == OVER:
            self._stop(reason)
        return outcome == DONE

    def share(self, groups: list[Group]) -> list[Group]:
        """Return rank 0's groups on every rank. Collective."""
        if dist.get_world_size() == 1:
            return groups
        return wire.decode(
            ranks.job().tell(wire.encode(groups) if self.main else None), list[Group]
        )

"""Only rank 0 calls engines and rewards; the other ranks wait. A failure there ends the run on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass
class Calls:
    """succeeded  whether the calls of a `with` block did. If not, the caller must push, and make them again."""

    succeeded: bool = False


class Rank0:
    """Guards the calls to engines and rewards. Every rank holds one, and all enter the same `with` blocks.

    main           whether this is rank 0
    interruption   a signal that ends rollouts
    engine_starts  returns whether no engine is left, but one is starting again; asked on rank 0
    stop           ends the run on every rank: saves a checkpoint and raises RunStopped
    """

    def __init__(
        self,
        main: bool,
        interruption: Interruption,
        engine_starts: Callable[[], bool],
        stop: Callable[[str], NoReturn],
    ) -> None:
        self.main = main
        self._interruption = interruption
        self._engine_starts = engine_starts
        self._stop = stop

    @contextmanager
    def calls(self) -> Iterator[Calls]:
        """Let rank 0 call engines or rewards in the `with` block; the other ranks wait at its end. Collective.

        `succeeded` is False on every rank if no engine is left, but one is starting again. Any other failure of
        engines or rewards raises RunStopped on every rank, after a checkpoint.
        """
        result = Calls()
        reason = ""
        try:
            yield result
        except (EngineError, HealthError, rewards.RewardsFailedError) as error:
            reason = str(error)
        except RolloutCancelledError:
            reason = self._interruption.reason
        except PushError as error:
            if self.main:
                # The export failed, so a checkpoint of the same parameters may be wrong as well.
                raise
            reason = str(error)
        outcome = DONE
        if self.main and reason:
            outcome = AGAIN if self._engine_starts() else OVER
        outcome = ranks.job().number(outcome)
        if outcome == OVER:
            self._stop(reason)
        result.succeeded = outcome == DONE

    def share(self, groups: list[Group]) -> list[Group]:
        """Return rank 0's groups on every rank. Collective."""
        if dist.get_world_size() == 1:
            return groups
        message = wire.encode(groups) if self.main else None
        return wire.decode(ranks.job().tell(message), list[Group])

"""What an extension can change in a run: the drafter's updates, where samples run, and the kinds of engines.

`commands/training.py` builds the extensions that a configuration asks for, and hands them to the loop. The core imports
none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_rlspec.cotrainer.speculation import Rounds
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.start import Kind, engine_kinds
from megatron_rlspec.types import Group, Sample

if TYPE_CHECKING:
    from megatron_rlspec.train.step import Trainer


class DrafterSchedule:
    """Decides from which rollouts the drafter learns, with which weights, and in which steps.

    This class is the schedule without an extension: in every step, as a part of the policy's step, from the step's
    rollouts. Extensions override its methods (`extensions/drafter_schedules/`).

    Every rank holds one, and all call the same methods with the same arguments, but for `rollout_seconds`. An update is
    collective, so a schedule must decide alike on all ranks. `run/drafter_training.py` calls it.
    """

    def weights(self, samples: Sequence[Sample]) -> np.ndarray | None:
        """Return the drafter's weight of every sample, `[n]`; None if all are 1."""
        return None

    def observe(self, groups: Sequence[Group]) -> None:
        """Take the rollouts of the next `train_step`. Called once in a step, before `weights`."""

    def during_rollout(self, step: int, begin: Callable[[], object]) -> None:
        """Update the drafter while engines generate the rollout of `step`, which `begin` starts in the background.

        Called once in every step, before its rollout. A schedule without such updates does nothing, and does not call
        `begin`: then the rollout starts afterwards.
        """

    def train_step(
        self, step: int, train: Callable[[bool], dict[str, float]], rollout_seconds: float | None
    ) -> dict[str, float]:
        """Take the step by `train(train_drafter)`, update the drafter if that is due, and return the metrics of both.

        `train` must be called once: it updates the policy.

        rollout_seconds  duration of the step's rollout; NaN if a checkpoint had the rollout; None on ranks above 0, and
                         for recorded rollouts. It differs between ranks, so no rank may decide by it alone
        """
        # One pass trains both: the drafter learns from the hidden states that the policy's loss computes.
        return train(True)

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        """Return the state for a checkpoint: values that MessagePack can hold, by name, and the rollouts to keep.

        Called on rank 0 only, so it must not communicate. On a resume the `DrafterScheduleBuilder` gets both on every
        rank, perhaps from another schedule, if the options have changed: a key of its own may be missing.
        """
        return {}, []


# (trainer, load_policy, state, rollouts). `load_policy` loads the policy that a recorded run had before a step; None:
# the run trains its own policy. The last two are what `DrafterSchedule.state` returned for the checkpoint that the run
# continues from, else empty.
DrafterScheduleBuilder = Callable[
    ["Trainer", Callable[[int], None] | None, Mapping[str, Any], Sequence[Group]], DrafterSchedule
]


class Migration(Protocol):
    """Moves running samples between engines, on rank 0. Without one, a sample stays on the engine that began it.

    `extensions/migration/wiring.py` implements it.
    """

    def attach(self, pool: EnginePool, record: Callable[[Mapping[str, Any]], None]) -> None:
        """Begin to work on the engines of `pool`. Called once, when all of them answer.

        Sets `pool.balance`, which is entered around every `generate`, and may call `record` at its exit.

        record  adds a line to `moves.jsonl`
        """

    def observe(self, rounds: Rounds) -> None:
        """Take the engines' rounds since the last call, by engine.

        `Engines.rounds` calls it: after every rollout, before the push, and after every evaluation.
        """


MigrationBuilder = Callable[[Mapping[str, Any]], Migration]  # from the policy's config.json


@dataclass(frozen=True)
class Extensions:
    """The extensions of a run.

    drafter    builds the drafter's schedule; None: an update in every step
    migration  builds what moves running samples; None: they stay
    kinds      of engines by `rollout.engine`, in place of the core's; None: the core's (`rollout.start.engine_kinds`)
    """

    drafter: DrafterScheduleBuilder | None = None
    migration: MigrationBuilder | None = None
    kinds: Mapping[str, Kind] | None = None

    def kind(self, engine: str) -> Kind:
        """Return the kind of engines of a run with this `rollout.engine`."""
        return (self.kinds or engine_kinds())[engine]

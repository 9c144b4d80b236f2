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
from megatron_rlspec.rollout.start import Kind, engines
from megatron_rlspec.types import Group, Sample

if TYPE_CHECKING:
    from megatron_rlspec.train.step import Trainer


class DrafterSchedule:
    """Decides from which rollouts the drafter learns, with which weights, and in which steps.

    This one, without an extension: in every step, as a part of the policy's step, from the step's rollouts. Every rank
    holds one. All of them see the same rollouts, so all of them pack the same updates.
    """

    def weights(self, samples: Sequence[Sample]) -> np.ndarray | None:
        """Return the drafter's weight of every sample, `[n]`; None if all are 1."""
        return None

    def observe(self, groups: Sequence[Group]) -> None:
        """Take the rollouts that the next `train_step` trains the policy on."""

    def during_rollout(self, step: int, begin: Callable[[], object]) -> None:
        """Update the drafter while engines generate the rollout of `step`, which `begin` starts in the background.

        Does nothing, and does not call `begin`, unless such updates are wanted.
        """

    def train_step(
        self, step: int, train: Callable[[bool], dict[str, float]], rollout_seconds: float | None
    ) -> dict[str, float]:
        """Take the step by `train(train_drafter)`, update the drafter if that is due, and return the metrics of both.

        rollout_seconds  duration of the step's rollout; None on ranks above 0, and for recorded rollouts
        """
        # One pass trains both: the drafter learns from the hidden states that the policy's loss computes.
        return train(True)

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        """Return the state for a checkpoint: plain values by name, and rollouts that are kept."""
        return {}, []


# The second argument loads the policy that a recorded run had before a step; None: the run trains its own policy. The
# others are what `DrafterSchedule.state` returned at the checkpoint of a resumed run, else empty.
DrafterScheduleBuilder = Callable[
    ["Trainer", Callable[[int], None] | None, Mapping[str, Any], Sequence[Group]], DrafterSchedule
]


class Migration(Protocol):
    """Moves running samples between engines, on rank 0. Without one, a sample stays on the engine that began it.

    It reads the rounds that engines report.
    """

    def attach(self, pool: EnginePool, record: Callable[[Mapping[str, Any]], None]) -> None:
        """Join the engines, once all of them answer. Sets `pool.balance`, which is entered around every `generate`.

        record  is called with what a line of `moves.jsonl` holds
        """

    def observe(self, rounds: Rounds) -> None:
        """Take the rounds of a rollout, by engine.

        Called once after every rollout, before the push, and after every evaluation.
        """


MigrationBuilder = Callable[[Mapping[str, Any]], Migration]  # of hf_config


@dataclass(frozen=True)
class Extensions:
    """The extensions of a run.

    drafter    builds the drafter's schedule; None: an update in every step
    migration  builds what moves running samples; None: they stay
    kinds      of engines, by `rollout.engine`, in place of the core's
    """

    drafter: DrafterScheduleBuilder | None = None
    migration: MigrationBuilder | None = None
    kinds: Mapping[str, Kind] | None = None

    def kind(self, engine: str) -> Kind:
        """Return the kind of engines of a run with this `rollout.engine`."""
        return (self.kinds or engines())[engine]

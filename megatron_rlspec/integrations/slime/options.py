"""What `rlspec slime` decided, as slime's processes read it.

The command writes a mapping `rlspec` into the file of `--custom-config-path`. slime sets it as `args.rlspec`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megatron_rlspec.config import DrafterConfig, SpecSection
from megatron_rlspec.types import Sampling, Verifier


class Options(BaseModel, frozen=True):
    """The options of one slime run.

    drafter          section `[drafter]`
    candidate_steps  draft steps of a round that engines choose from; acceptance is predicted for those above 0
    folder           for the files that train ranks and the RolloutManager exchange
    user_functions   slime's flag -> the user's own function, which ours calls
    """

    folder: Path
    drafter: DrafterConfig = DrafterConfig()
    candidate_steps: tuple[int, ...] = SpecSection().candidate_steps
    verifier: Verifier = "target_only"
    user_functions: dict[str, str] = {}

    @classmethod
    def from_args(cls, args: Any) -> Options:
        """Read `args.rlspec`."""
        return cls.model_validate(args.rlspec)


def rollout_sampling(args: Any) -> Sampling:
    """Return how a slime run's rollouts sample; `args` are slime's."""
    return Sampling(args.rollout_temperature, args.rollout_top_p, args.rollout_top_k)

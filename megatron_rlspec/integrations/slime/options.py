"""What `rlspec slime` decided, as slime's processes read it.

The command writes a mapping `rlspec` into the file of `--custom-config-path`. slime sets it as `args.rlspec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rlspec.config import DrafterConfig, SpecSection
from megatron_rlspec.types import Sampling, Verifier


@dataclass(frozen=True)
class Options:
    """The options of one slime run.

    drafter          section `[drafter]`
    candidate_steps  draft steps of a round that engines choose from; acceptance is predicted for those above 0
    cost_table       file that the engines' rule chooses by; "": it learns costs from rounds
    folder           files that train ranks and the RolloutManager exchange; None: they exchange none
    user_functions   slime's flag -> the user's own function, which ours calls
    """

    drafter: DrafterConfig
    candidate_steps: tuple[int, ...]
    cost_table: str
    verifier: Verifier
    folder: Path | None
    user_functions: Mapping[str, str]

    @classmethod
    def from_args(cls, args: Any) -> Options:
        """Read `args.rlspec`."""
        given = getattr(args, "rlspec", {})
        folder = given.get("folder")
        return cls(
            drafter=DrafterConfig.model_validate(given.get("drafter", {})),
            candidate_steps=tuple(given.get("candidate_steps", SpecSection().candidate_steps)),
            cost_table=given.get("cost_table", ""),
            verifier=given.get("verifier", "target_only"),
            folder=Path(folder) if folder else None,
            user_functions=given.get("user_functions", {}),
        )


def rollout_sampling(args: Any) -> Sampling:
    """Return how a slime run's rollouts sample; `args` are slime's."""
    return Sampling(args.rollout_temperature, args.rollout_top_p, args.rollout_top_k)

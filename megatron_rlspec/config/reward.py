"""[reward]: how a response is scored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from megatron_rlspec.config.base import FUNCTION, Name, Needs, Seconds, Section

BUILT_IN = ("exact", "math")  # of `tasks/rewards.py`
KINDS = f"{', '.join(BUILT_IN)}, FILE.py:function or module:function"
SIGNATURE = "f(*, prompt: str, response: str, label: str, metadata: dict) -> float | dict"


class RewardConfig(Section):
    kind: Name = Field(
        "exact",
        description="FILE.py:function or module:function of yours; exact: response (or what follows its last #) equals "
        f"the label; math: equal as mathematics; the function is called as {SIGNATURE}. It returns a number "
        'or {"reward": number, NAME: number}, recorded as rollout/reward_NAME. In Python also the function itself',
    )
    timeout_seconds: Annotated[Seconds, Needs("reward.kind!=exact")] = Field(
        10.0, description="time limit for one sample; past it the reward has failed"
    )
    workers: Annotated[int, Field(gt=0, le=1024), Needs("reward.kind!=exact")] = Field(
        4, description="processes that compute rewards; `exact` needs none"
    )

    @field_validator("kind", mode="before")
    @classmethod
    def _of_a_function(cls, value: Any) -> Any:
        """Return the name of a function, by which the reward's processes import it."""
        if not callable(value):
            return value
        module = getattr(value, "__module__", "")
        if module == "__main__":
            module = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
        name = f"{module}:{getattr(value, '__qualname__', '')}"
        if not FUNCTION.fullmatch(name):
            raise ValueError(f"expected a function at the top of a module (got {name})")
        return name

    @model_validator(mode="after")
    def _known_kind(self) -> RewardConfig:
        if self.kind not in BUILT_IN and not FUNCTION.fullmatch(self.kind):
            raise ValueError(f"kind={self.kind}: unknown reward; expected {KINDS}")
        return self

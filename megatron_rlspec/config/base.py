"""What every section shares: strict field types, and the error of a wrong option."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


class ConfigError(ValueError):
    """A user's mistake in the configuration, told in one line."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, protected_namespaces=())

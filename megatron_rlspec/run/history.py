"""Answers of earlier steps in a run, on rank 0: the drafts of requests, and how far new answers repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rlspec.config import Config
from megatron_rlspec.speculation.history import Answers, agreed
from megatron_rlspec.types import Group, OpenGroup


class History:
    """answers  kept if later steps draft from them (`spec.history`)"""

    def __init__(self, config: Config) -> None:
        self.answers = Answers()
        self._drafts = config.spec.history

    def attached(self, groups: Sequence[OpenGroup]) -> Sequence[OpenGroup]:
        """Return the groups, with `spec.history` with what old answers to their prompts share as drafts."""
        if not self._drafts:
            return groups
        found = []
        for group in groups:
            shared = agreed(self.answers.of(group.requests[0].prompt.id))
            draft = shared if len(shared) else None
            found.append(
                replace(
                    group, requests=[replace(request, draft=draft) for request in group.requests]
                )
            )
        return found

    def keep(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Keep a step's answers. Returns how far they repeat old ones; {} if none are kept."""
        if not self._drafts:
            return {}
        shared = {group.prompt.id: agreed(self.answers.of(group.prompt.id)) for group in groups}
        old_tokens = repeated = 0
        for group in groups:
            self.answers.keep(group.prompt.id, step, [sample.response for sample in group.samples])
            old = shared[group.prompt.id]
            for sample in group.samples:
                both = min(len(old), len(sample.response))
                differ = np.flatnonzero(old[:both] != sample.response[:both])
                old_tokens += len(old)
                repeated += int(differ[0]) if len(differ) else both
        return {"old_tokens": float(old_tokens), "repeated_tokens": float(repeated)}

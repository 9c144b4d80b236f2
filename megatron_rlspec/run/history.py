"""Answers of earlier steps in a run, on rank 0: the drafts of requests, and how far new answers repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rlspec.config import Config
from megatron_rlspec.rollout.partial import kept_tokens
from megatron_rlspec.speculation.history import Answers, agreed
from megatron_rlspec.types import Group, OpenGroup


class History:
    """answers  kept if later steps draft from them (`spec.history`) or have the same seeds (`rollout.seeds`)"""

    def __init__(self, config: Config) -> None:
        self.answers = Answers()
        self._drafts = config.spec.history
        self._shared: dict[int, np.ndarray] = {}  # by prompt
        self._same_seeds = config.rollout.seeds == "prompt"

    def attached(self, groups: Sequence[OpenGroup]) -> Sequence[OpenGroup]:
        """Return the groups, with `spec.history` with old answers to their prompts as drafts."""
        if not self._drafts:
            return groups
        found = []
        for group in groups:
            requests = []
            for request in group.requests:
                draft = self._begin(request.prompt.id, request.seed) if request.draft is None else request.draft
                requests.append(replace(request, draft=draft))
            found.append(replace(group, requests=requests))
        return found

    def keep(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Keep a step's answers. Returns how far they repeat old ones; {} if none are kept."""
        if not (self._drafts or self._same_seeds):
            return {}
        samples = [sample for group in groups for sample in group.samples if sample.seed is not None]
        drafts = {}
        for sample in samples:
            old = self._begin(sample.prompt.id, sample.seed or 0)
            if old is not None:
                drafts[sample.request_id] = old
        for sample in samples:
            self.answers.keep(sample.prompt.id, step, {sample.seed or 0: sample.response})
        self._shared.clear()
        checked, kept = kept_tokens(drafts, samples).values()
        return {"old_tokens": checked, "repeated_tokens": kept}

    def _begin(self, prompt: int, seed: int) -> np.ndarray | None:
        """Return how a new answer to a prompt may begin: as the old one of its seed, or as old ones of others do."""
        old = self.answers.of(prompt)
        if seed in old or not (old and self._drafts):
            return old.get(seed)
        if prompt not in self._shared:
            self._shared[prompt] = agreed(old.values())
        return self._shared[prompt] if len(self._shared[prompt]) else None

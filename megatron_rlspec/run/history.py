"""Answers of earlier steps in a run, on rank 0: the drafts of requests, and how far new answers repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rlspec.config import Config
from megatron_rlspec.rollout.partial import kept_tokens
from megatron_rlspec.speculation.history import Answers
from megatron_rlspec.types import Group, OpenGroup


class History:
    """answers  kept if later steps draft from them (`spec.history`) or have the same seeds (`rollout.seeds`)"""

    def __init__(self, config: Config) -> None:
        self.answers = Answers()
        self._drafts = config.spec.history > 0
        self._same_seeds = config.rollout.seeds == "prompt"

    def attached(self, groups: Sequence[OpenGroup]) -> Sequence[OpenGroup]:
        """Return the groups, with `spec.history` with the old answers to their prompts as drafts."""
        if not self._drafts:
            return groups
        found = []
        for group in groups:
            old = self.answers.of(group.requests[0].prompt.id)
            texts = (*old.values(), *(sample.response for sample in group.samples))
            requests = []
            for request in group.requests:
                draft = old.get(request.seed) if request.draft is None else request.draft
                requests.append(replace(request, draft=draft, history=texts))
            found.append(OpenGroup(requests, group.samples, group.since))
        return found

    def detached(self, groups: Sequence[OpenGroup]) -> list[OpenGroup]:
        """Return groups that go on in the next step, whose requests get the answers of then."""
        found = []
        for group in groups:
            requests = [replace(request, history=()) for request in group.requests]
            found.append(OpenGroup(requests, group.samples, group.since))
        return found

    def keep(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Keep a step's answers. Returns how far they repeat older ones of the same seeds; {} with fresh seeds."""
        if not (self._drafts or self._same_seeds):
            return {}
        samples = [sample for group in groups for sample in group.samples if sample.seed is not None]
        drafts = {}
        for sample in samples:
            old = self.answers.of(sample.prompt.id).get(sample.seed or 0)
            if old is not None:
                drafts[sample.request_id] = old
        for sample in samples:
            self.answers.keep(sample.prompt.id, step, {sample.seed or 0: sample.response})
        if not self._same_seeds:
            return {}
        checked, kept = kept_tokens(drafts, samples).values()
        return {"old_tokens": checked, "repeated_tokens": kept}

"""Partial rollouts: a step ends with its batch, and the groups that it has begun go on in the next one.

slime's counterpart is `--partial-rollout` (slime/rollout/sglang_rollout.py). Here a group goes on for at most
`rollout.partial` steps. Then the step waits for the group, so that no response is thrown away because it is long.

This file decides when a batch is full and which groups are in it. `run/generation.py` generates, scores and aborts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron_rlspec.types import Group, OpenGroup, Partial, Request, Sample


class Drawing:
    """The groups of one rollout, while they are generated. `run/generation.py` uses it for every rollout.

    groups  those that began in earlier steps first, the oldest of them at the head. No two of their requests may have
            the same id
    wanted  number of groups of a batch
    oldest  the oldest policy version that the next step may train on: groups with older tokens must end in this step.
            Infinity: every group that has a token must end in this step
    usable  whether a complete group may be trained on (dynamic sampling). It is called often, also under the lock, and
            must give the same answer each time

    Only `add` and `requests` may be called while engines generate. Afterwards `run/generation.py` calls
    `store_partials` and `drop_unusable`, and once `batch`.
    """

    def __init__(
        self,
        groups: Iterable[OpenGroup],
        wanted: int,
        oldest: float,
        usable: Callable[[Group], bool] = lambda group: True,
    ) -> None:
        self.groups: list[OpenGroup] = []
        self._wanted = wanted
        self._oldest = oldest
        self._usable = usable
        self._group_of: dict[str, OpenGroup] = {}  # by the id of a request
        self._lock = threading.RLock()  # engines' threads call `add`
        self._reported_full = False  # whether `add` has returned True
        self._ready = 0  # complete groups that may be trained on
        self.begin(groups)

    def begin(self, groups: Iterable[OpenGroup]) -> None:
        """Add copies of these groups. The caller's groups stay as they are. Not while engines generate.

        No request may have the id of one that was added before.
        """
        for given in groups:
            group = OpenGroup(list(given.requests), list(given.samples))
            self.groups.append(group)
            for request in group.requests:
                self._group_of[request.id] = group
            self._count(group)

    def requests(self) -> list[Request]:
        """Return the requests whose samples have not ended, group by group: what to generate or to abort."""
        left: list[Request] = []
        with self._lock:
            for group in self.groups:
                ended = {sample.request_id for sample in group.samples}
                left += [request for request in group.requests if request.id not in ended]
        return left

    @property
    def full(self) -> bool:
        """Return whether the rollout can end: a batch is complete, and so are all groups too old for the next step.

        It takes no lock: `add` calls it under the lock, and `run/generation.py` when no engine generates.
        """
        if self._ready < self._wanted:
            return False
        for group in self.groups:
            if not group.complete and group.oldest < self._oldest:
                return False
        return True

    def add(self, sample: Sample) -> bool:
        """Add a sample that has ended, from any thread. Returns True once, when `full` becomes true.

        Repeatable: a sample that is there already changes nothing. KeyError for an id of none of the groups.
        """
        with self._lock:
            group = self._group_of[sample.request_id]
            ended = {other.request_id for other in group.samples}
            if sample.request_id not in ended:
                group.samples.append(sample)
                self._count(group)
            if self._reported_full or not self.full:
                return False
            self._reported_full = True
            return True

    def _count(self, group: OpenGroup) -> None:
        """Add 1 to `_ready` if this group may be trained on.

        Call it once when the group is added, and once after each new sample: a complete group gets no further sample,
        so no group counts twice.
        """
        if self._may_train(group):
            self._ready += 1

    def _may_train(self, group: OpenGroup) -> bool:
        return group.complete and self._usable(group.group())

    def store_partials(self, aborted: Iterable[Sample]) -> None:
        """Store the tokens of aborted samples in their requests, which the next step continues.

        Requests of samples without a token stay as they are, and begin anew.
        """
        begun = {}
        for sample in aborted:
            if len(sample.response):
                begun[sample.request_id] = Partial.of(sample)
        for group in self.groups:
            for i, request in enumerate(group.requests):
                if request.id in begun:
                    group.requests[i] = replace(request, partial=begun[request.id])

    def drop_unusable(self) -> None:
        """Drop complete groups that may not be trained on. `add` still knows their ids, and may be called with them."""
        self.groups = [g for g in self.groups if not g.complete or self._may_train(g)]

    def batch(self) -> tuple[list[Group], list[OpenGroup]]:
        """Return the groups of the batch, and those for the next step, in order. The batch has at most `wanted` groups.

        A group with tokens too old for the next step begins anew there.

        Call `store_partials` first: without it, the tokens of aborted samples are lost. Call `drop_unusable` first:
        without it, complete groups that may not be trained on go to the next step.
        """
        batch: list[Group] = []
        for_next_step: list[OpenGroup] = []
        for group in self.groups:
            if len(batch) < self._wanted and self._may_train(group):
                batch.append(group.group())
            elif group.oldest >= self._oldest:
                for_next_step.append(group)
            else:
                for_next_step.append(group.anew())
        return batch, for_next_step


def mask_continued(samples: Sequence[Sample]) -> None:
    """Set the loss mask of each sample to 0, in place, on the tokens of all policy versions but its newest.

    The version of the last span is taken for the newest: versions never fall within a sample. This is the option
    `rollout.mask_offpolicy`.
    """
    for sample in samples:
        # a view: what is written to it changes the sample
        response_mask = sample.loss_mask[sample.prompt_len :]
        for version, first, last in sample.policy_versions:
            if version < sample.policy_versions[-1][0]:
                response_mask[first:last] = 0

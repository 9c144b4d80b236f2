"""A request while an engine works on it, and the sample that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rlspec.rollout.embedded.verify import Committed
from megatron_rlspec.speculation.acceptance import delivered
from megatron_rlspec.texts import StopStrings
from megatron_rlspec.types import Request, Sample, Sampling, Status


@dataclass(eq=False)
class ActiveRequest:
    """A request that waits or runs, until its `Sample` is made."""

    request: Request
    sampling: Sampling
    stops: frozenset[int]
    strings: StopStrings | None = None
    row: int = -1  # in the cache; -1 while waiting
    seats: int = 0  # rows that it has had
    draws: int = 0
    abort: bool = False
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    rounds: int = 0  # without the one that drew the first token
    spans: list[tuple[int, int]] = field(default_factory=list)
    sample: Sample | None = None

    def __post_init__(self) -> None:
        begun = self.request.partial
        if begun is not None:
            self.draws = begun.draws
            self.response = begun.response.tolist()
            self.logprobs = begun.logprobs.tolist()
            self.versions = [list(span) for span in begun.policy_versions]
            self.rounds = sum(begun.accepted)
            self.spans = list(begun.accepted_spans)

    def commit(self, new: Committed, version: int, limit: int) -> Status | None:
        """Append a round's tokens, up to a stop or the limit. Returns the status if the sample ends."""
        status: Status | None = None
        first = len(self.response)
        for token, logprob in zip(new.tokens.tolist(), new.logprobs.tolist(), strict=True):
            self.response.append(token)
            self.logprobs.append(logprob)
            if self.stopped():
                status = "finished"
                break
            if len(self.response) >= limit:
                status = "truncated"
                break
        last = len(self.response)
        if new.accepted:
            self.spans.append((first, min(first + new.accepted, last)))
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][2] = last
        else:
            self.versions.append([version, first, last])
        self.rounds += first > 0
        return status

    def stopped(self) -> bool:
        """Return whether the last token ends the response."""
        last = len(self.response) - 1
        if self.response[last] in self.stops:
            return True
        return self.strings is not None and self.strings.end(self.response, last) is not None

    def finish(self, status: Status) -> None:
        """Set `sample`."""
        self.sample = self.so_far(status)

    def so_far(self, status: Status) -> Sample:
        return self.request.sample(
            status,
            self.response,
            self.logprobs,
            policy_versions=tuple((v, first, last) for v, first, last in self.versions),
            accepted=delivered(self.rounds, self.spans, len(self.response)),
            accepted_spans=tuple(self.spans),
            draws=self.draws,
        )

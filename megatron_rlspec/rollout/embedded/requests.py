"""A request while an engine works on it, and the sample that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_rlspec.speculation.acceptance import delivered
from megatron_rlspec.texts import StopStrings
from megatron_rlspec.types import Partial, Request, Sample, Sampling, Status


@dataclass(eq=False)
class ActiveRequest:
    """A request that waits or runs, until its `Sample` is made. `Partial` is its frozen form.

    stop_ids        token ids that end the response
    limit           tokens that the response may have
    stop_strings    None: there are none
    row             in the cache; -1 while waiting
    draws           noise keys used before the sample got its row; `RoundRunner.draws` counts on from them
    abort           whether the next step ends it (`EmbeddedEngine.abort`)
    response        tokens sampled so far; `logprobs` has one number for each
    versions        as `Partial.policy_versions`, in lists [version, first, last + 1], because the last one grows
    rounds          verify rounds, without the one that sampled the first token: `acceptance.delivered` asks for these
    accepted_spans  response tokens that were drafts, (first, last + 1)
    sample          the result; None until the request has ended
    """

    request: Request
    sampling: Sampling
    stop_ids: frozenset[int]
    limit: int
    stop_strings: StopStrings | None = None
    row: int = -1
    draws: int = 0
    abort: bool = False
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    rounds: int = 0
    accepted_spans: list[tuple[int, int]] = field(default_factory=list)
    sample: Sample | None = None

    def __post_init__(self) -> None:
        begun = self.request.partial
        if begun is not None:
            self.draws = begun.draws
            self.response = begun.response.tolist()
            self.logprobs = begun.logprobs.tolist()
            self.versions = [list(span) for span in begun.policy_versions]
            self.rounds = sum(begun.accepted)
            self.accepted_spans = list(begun.accepted_spans)

    @property
    def tokens(self) -> np.ndarray:
        """Return prompt and response so far, [L] int64."""
        prompt = self.request.prompt.tokens
        return np.concatenate([prompt, self.response]).astype(np.int64)

    def commit(self, tokens: list[int], logprobs: list[float], version: int) -> Status | None:
        """Append a round's tokens, up to a stop or the limit. Returns the status if the sample ends, else None.

        tokens   at least one, with as many log-probs; all but the last one were drafts
        version  of the weights that sampled them
        """
        first = len(self.response)
        status: Status | None = None
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.response.append(token)
            self.logprobs.append(logprob)
            status = self.status()
            if status is not None:
                break
        last = len(self.response)
        if len(tokens) > 1:
            # without the target's own token, and without drafts behind the end
            self.accepted_spans.append((first, min(first + len(tokens) - 1, last)))
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][2] = last
        else:
            self.versions.append([version, first, last])
        if first:  # not the round that sampled the first token
            self.rounds += 1
        return status

    def status(self) -> Status | None:
        """Return how the sample ends with the last token of its response; None if it goes on.

        The response must have a token. Earlier tokens are not checked: `commit` calls this after each one.
        """
        last = len(self.response) - 1
        if self.response[last] in self.stop_ids:
            return "finished"
        if self.stop_strings is not None and self.stop_strings.end(self.response, last) is not None:
            return "finished"
        return "truncated" if len(self.response) >= self.limit else None

    def continued(self) -> Request:
        """Return the request with which another engine continues this sample. `draws` as for `so_far`."""
        partial = Partial.of(self.so_far("aborted")) if self.response else None
        return replace(self.request, partial=partial)

    def so_far(self, status: Status) -> Sample:
        """Return the sample as it is now.

        While it has a row, `draws` is out of date: take the row from it first (`Scheduler.vacate`), or set `draws`.
        """
        return self.request.sample(
            status,
            self.response,
            self.logprobs,
            policy_versions=tuple((v, first, last) for v, first, last in self.versions),
            accepted=delivered(self.rounds, self.accepted_spans, len(self.response)),
            accepted_spans=tuple(self.accepted_spans),
            draws=self.draws,
        )

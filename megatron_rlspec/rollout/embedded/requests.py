"""A request while an embedded engine works on it, and the sample that it becomes.

`scheduler.py` makes runs (`ActiveRequest`), moves them between queue and cache, and ends them; `engine.py` appends
tokens. Both hold the engine's lock: nothing here is safe for several threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_rlspec.speculation.acceptance import delivered
from megatron_rlspec.texts import StopStrings
from megatron_rlspec.types import Partial, Request, Sample, Sampling, Status


@dataclass(eq=False)  # compared by identity: `Scheduler.remove` searches lists for this very run
class ActiveRequest:
    """A request that waits or runs, until its `Sample` is made. A request with a `partial` begins where that ends.

    stop_ids        token ids that end the response
    limit           most tokens of the response, those of the request's `partial` included
    stop_strings    searched after each token; None: the request has no stop strings
    row             in the cache; -1 while the request has none
    draws           noise keys used before the sample got its row. While it has one, `RoundRunner.draws` counts on from
                    this number, which is then out of date until `Scheduler.vacate`
    abort           whether the next step ends it (`EmbeddedEngine.abort`)
    response        tokens sampled so far, of `partial` too; `logprobs` has one number for each
    versions        as `Partial.policy_versions`, in lists [version, first, last + 1], because the last list grows
    rounds          verify rounds, without the round that sampled the first token: `acceptance.delivered` counts so
    accepted_spans  response tokens that were drafts, as (first, last + 1); at most one span for each round
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
            self.rounds = sum(begun.accepted)  # the histogram counts each round once
            self.accepted_spans = list(begun.accepted_spans)

    @property
    def tokens(self) -> np.ndarray:
        """Return prompt and response so far, [L] int64."""
        prompt = self.request.prompt.tokens
        return np.concatenate([prompt, self.response]).astype(np.int64)

    def commit(self, tokens: list[int], logprobs: list[float], version: int) -> Status | None:
        """Append a round's tokens, up to a stop or the limit. Returns the status if the sample ends, else None.

        After a status other than None, the caller ends the run (`Scheduler.end`) and calls `commit` no more.

        tokens   at least one, with as many log-probs; all but the last one were drafts
        version  of the weights that sampled the tokens
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
            # The last of `tokens` is the target's own. Drafts behind the end were not appended, so they do not count.
            self.accepted_spans.append((first, min(first + len(tokens) - 1, last)))
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][2] = last
        else:
            self.versions.append([version, first, last])
        if first:  # not the round that sampled the first token
            self.rounds += 1
        return status

    def status(self) -> Status | None:
        """Return how the sample ends with the last token of its response; None if the sample goes on.

        The response must have a token. Earlier tokens are not checked: `commit` calls this after each token, and
        `Scheduler.check` checks a partial's earlier tokens for stop ids.
        """
        last = len(self.response) - 1
        if self.response[last] in self.stop_ids:
            return "finished"
        if self.stop_strings is not None and self.stop_strings.end(self.response, last) is not None:
            return "finished"
        return "truncated" if len(self.response) >= self.limit else None

    def continued(self) -> Request:
        """Return the request with which another engine continues this sample; without tokens it begins anew.

        While the sample has a row, set `draws` first, as for `so_far`.
        """
        partial = Partial.of(self.so_far("aborted")) if self.response else None
        return replace(self.request, partial=partial)

    def so_far(self, status: Status) -> Sample:
        """Return the sample as it is now, in arrays of its own. The run itself does not change.

        While the run has a row, `draws` is out of date: call `Scheduler.vacate` first, or set `draws` from
        `RoundRunner.draws`.
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

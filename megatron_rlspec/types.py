"""The types that all parts of the package share. Standard library and numpy only.

Shapes: L is one sample's length (prompt + response), T this rank's packed tokens after the context-parallel slice,
D the drafter's depth. Times are milliseconds unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Status = Literal["finished", "truncated", "aborted"]
Scope = Literal["all", "target", "drafter"]
Verifier = Literal["position_keyed", "target_only"]
Drafts = Literal["coupled", "argmax"]
# Coupled drafts are argmax(s · log q + noise). The best s is 1 for a drafter that is close to the target, and more for
# one whose distribution is too flat. Training computes the acceptance of each of these, and engines take the best one.
# Until then they take the first: on all measured drafters it was no worse than argmax q (docs/losslessness.md).
SHARPNESS = (2.0, 1.5, 1.0)


def checked_sharpness(value: Any) -> float:
    """Return a sharpness that a user or a file states. Raises ValueError if it is none."""
    if type(value) not in (int, float) or not 0 < value <= 100:
        raise ValueError(f"{value!r}; expected a number above 0 and at most 100")
    return float(value)


@dataclass(frozen=True, order=True)
class SpecConfig:
    """How many tokens a round drafts of each request.

    `SpecConfig(0)` is SGLang's step 0: it drafts nothing, but the drafter still extends its KV cache. `OFF` does not
    run the drafter at all.
    """

    num_steps: int
    drafter: bool = True

    def __post_init__(self) -> None:
        if type(self.num_steps) is not int or self.num_steps < 0:
            raise ValueError(
                f'{self.num_steps!r} drafts a round; expected a number from 0, or "off"'
            )

    @classmethod
    def of(cls, num_steps: int) -> SpecConfig:
        """Return the configuration of so many drafts, `OFF` for 0."""
        return cls(num_steps, drafter=num_steps > 0)

    @property
    def off(self) -> bool:
        return not self.drafter

    def to_json(self) -> int | str:
        return "off" if self.off else self.num_steps

    @classmethod
    def from_json(cls, value: Any) -> SpecConfig:
        """Return the configuration that `to_json` gave. Raises ValueError."""
        return OFF if value == "off" else cls(value)

    def __str__(self) -> str:
        return "off" if self.off else f"k{self.num_steps}"


OFF = SpecConfig.of(0)


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the target's tokens.

    `top_k = -1`, `top_p = 1` and `min_p = 0` filter nothing; `temperature = 0` is greedy. `stop`: strings; a response
    ends with the first token after which its text contains one of them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Prompt:
    """One task. `tokens [P] int64` includes the chat template. The reward compares the response with `label`."""

    id: int
    tokens: np.ndarray
    label: str = ""
    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Partial:
    """A sample that has begun: what an engine needs to continue it, and to return it as one `Sample`.

    Moves between engines, changes of the tensor-parallel size, lost engines and partial rollouts all use it. Indices
    count response tokens. The last four fields are as in `Sample`.

    response [R] int64   tokens sampled so far, at least one
    logprobs [R] float32 their log-probabilities under the policies that sampled them
    draws                noise keys used so far; only verifiers that are not position-keyed read it
    """

    response: np.ndarray
    logprobs: np.ndarray
    policy_versions: tuple[tuple[int, int, int], ...]
    accepted: tuple[int, ...] = ()
    accepted_spans: tuple[tuple[int, int], ...] = ()
    draws: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.response) == len(self.logprobs):
            raise ValueError(
                f"a partial sample of {len(self.response)} tokens and {len(self.logprobs)} log-probabilities; "
                "expected as many of both, at least one"
            )

    @classmethod
    def of(cls, sample: Sample) -> Partial:
        """Return what an aborted sample has. Raises ValueError if it has no token."""
        first = sample.prompt_len
        logprobs = sample.behaviour_logprobs[first:]
        spans = sample.policy_versions
        return cls(
            sample.response, logprobs, spans, sample.accepted, sample.accepted_spans, sample.draws
        )

    def then(self, more: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
        """Return `policy_versions` of the whole response. `more` has those of the tokens that follow, from 0 on."""
        spans = [list(span) for span in self.policy_versions]
        for version, first, last in more:
            if spans and spans[-1][0] == version:
                spans[-1][2] = last + len(self.response)
            else:
                spans.append([version, first + len(self.response), last + len(self.response)])
        return tuple((version, first, last) for version, first, last in spans)


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to generate. Under the position-keyed verifier its text depends only on seed, prompt and weights.

    No `id` may be a prefix of another: SGLang aborts by prefix. With `partial`, the engine continues that sample and
    returns the whole of it; `max_new_tokens` counts from the first response token.
    """

    id: str
    prompt: Prompt
    seed: int
    partial: Partial | None = None

    def aborted(self) -> Sample:
        """Return the sample as far as it is generated."""
        begun = self.partial
        if begun is None:
            return self.sample("aborted", (), ())
        return self.sample(
            "aborted",
            begun.response,
            begun.logprobs,
            policy_versions=begun.policy_versions,
            accepted=begun.accepted,
            accepted_spans=begun.accepted_spans,
            draws=begun.draws,
        )

    def sample(
        self,
        status: Status,
        response: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        **more: Any,
    ) -> Sample:
        """Return the sample of a response, all of whose tokens are trained. `more`: other fields of `Sample`."""
        zeros = np.zeros(len(self.prompt.tokens), np.float32)
        return Sample(
            request_id=self.id,
            prompt=self.prompt,
            tokens=np.concatenate(
                [np.asarray(self.prompt.tokens, np.int64), np.asarray(response, np.int64)]
            ),
            loss_mask=np.concatenate([zeros, np.ones(len(response), np.float32)]),
            behaviour_logprobs=np.concatenate([zeros, np.asarray(logprobs, np.float32)]),
            status=status,
            seed=self.seed,
            **more,
        )


@dataclass(eq=False)
class Sample:
    """One generated response. Index i of every `[L]` array describes `tokens[i]` itself.

    tokens [L] int64               prompt then response
    loss_mask [L] float32          1 where the token itself is a trained response token
    behaviour_logprobs [L] float32 log-probability under the policy that sampled the token; 0 on the prompt
    policy_versions                spans (version, first, last + 1) of response tokens; the first has index 0
    accepted                       histogram over verify rounds: accepted[i] rounds delivered 1 + i tokens
                                   (`acceptance.delivered`)
    accepted_spans                 spans (first, last + 1) of response tokens that were drafts; at most one per round
    draws                          see `Partial`
    seed                           of the noise that its tokens were sampled with; None: they were not sampled here
    """

    request_id: str
    prompt: Prompt
    tokens: np.ndarray
    loss_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    status: Status = "finished"
    policy_versions: tuple[tuple[int, int, int], ...] = ()
    accepted: tuple[int, ...] = ()
    accepted_spans: tuple[tuple[int, int], ...] = ()
    draws: int = 0
    reward: float = 0.0
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not len(self.loss_mask) == len(self.behaviour_logprobs) == n:
            raise ValueError(
                f"sample {self.request_id}: tokens [{n}], loss_mask [{len(self.loss_mask)}] and "
                f"behaviour_logprobs [{len(self.behaviour_logprobs)}] must have one length"
            )

    @property
    def prompt_len(self) -> int:
        return len(self.prompt.tokens)

    @property
    def response(self) -> np.ndarray:
        return self.tokens[self.prompt_len :]


def ended(
    response: Sequence[int] | np.ndarray, stops: Collection[int], limit: int
) -> Status | None:
    """Return how a sample ends after these response tokens, or None if it goes on.

    Raises ValueError for a response that an engine would have ended before.
    """
    tokens = np.asarray(response)
    if len(tokens) > limit:
        raise ValueError(
            f"{len(tokens)} response tokens were drawn before; expected at most max_new_tokens={limit}"
        )
    found = np.flatnonzero(np.isin(tokens, list(stops)))
    if len(found) and found[0] < len(tokens) - 1:
        raise ValueError(
            f"response token {found[0]} of {len(tokens)} drawn before is {tokens[found[0]]}, a stop token"
        )
    if len(found):
        return "finished"
    return "truncated" if len(tokens) == limit else None


@dataclass(eq=False)
class Group:
    """All samples of one prompt: GRPO's unit of comparison."""

    prompt: Prompt
    samples: list[Sample]


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """Return the samples of all groups, in their order."""
    samples: list[Sample] = []
    for group in groups:
        samples += group.samples
    return samples


@dataclass(eq=False)
class OpenGroup:
    """A group that is being generated: all its requests, and the samples that have ended, with their rewards."""

    requests: list[Request]
    samples: list[Sample] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.samples) == len(self.requests)

    @property
    def oldest(self) -> float:
        """Return the oldest version that sampled one of its tokens; infinity without tokens."""
        drawn: list[Sample | Partial] = [*self.samples]
        drawn += [request.partial for request in self.requests if request.partial]
        oldest = math.inf
        for part in drawn:
            for version, _, _ in part.policy_versions:
                oldest = min(oldest, version)
        return oldest

    def group(self) -> Group:
        """Return the samples that have ended, in the order of the requests."""
        by_id = {sample.request_id: sample for sample in self.samples}
        return Group(self.requests[0].prompt, [by_id[r.id] for r in self.requests if r.id in by_id])

    def anew(self) -> OpenGroup:
        """Return the group before its first token."""
        return OpenGroup([replace(request, partial=None) for request in self.requests])


@dataclass(eq=False)
class PackedBatch:
    """One rank's share of one micro-batch, after the context-parallel slice. All tensors are `[T]` on the CPU.

    Four tensors describe position t itself: `tokens`, `position_ids`, `sequence_ids` (index of the sample within the
    step, -1 on padding) and `drafter_weight`.

    The others are shifted: at position t they hold the values of token t + 1, which position t predicts. They are 0
    where token t + 1 belongs to another sequence or to padding. Float tensors are also 0 where `loss_mask` is 0. Depth
    d of the drafter (index d - 1) predicts token t + 1 + d from token t + d.

    cu_seqlens         int32 `[n + 1]`, cumulative lengths of real tokens, before the context-parallel slice
    cu_seqlens_padded  the same with padding
    counts             denominators of the losses, summed over all ranks and micro-batches of the *step* before its
                       first backward: `policy`, `drafter` (one per depth), `tokens` (trained ones), `samples`
    old_logprobs       of the policy before the first of several updates; None: the first update, or not needed
    reference_logprobs of the policy that KL is measured to; None: not needed. The trainer fills in both
    staleness          versions between the policy that drew the label and the trained policy; None if not needed
    noise_seeds        `Sample.seed` at positions where the acceptance of coupled drafts is predicted, else -1; None: a
                       sample has no seed
    drafter_part       the samples that the drafter learns from, if not all: a batch of their own, `[t]`
    drafter_rows       int64 `[t]`, the row in this batch of each of its positions; of padding: 0
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    advantages: Tensor
    behaviour_logprobs: Tensor
    sequence_ids: Tensor
    policy_weight: Tensor
    drafter_weight: Tensor
    drafter_tokens: list[Tensor]
    drafter_labels: list[Tensor]
    drafter_mask: list[Tensor]
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    counts: dict[str, Any]
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    staleness: Tensor | None = None
    noise_seeds: Tensor | None = None
    drafter_part: PackedBatch | None = None
    drafter_rows: Tensor | None = None


@dataclass(frozen=True)
class RoundStats:
    """Decode rounds that ran under one configuration.

    ms        duration of all `rounds` together
    accepted  histogram: accepted[i] times a request accepted i drafts in a round. For the estimate of acceptance rates,
              it counts drafts past the end of a sample, and the embedded engine's first rounds. `Sample.accepted`
              counts delivered tokens
    verified  drafts that the target verified of all requests; 0: the engine does not say
    if_all    the histogram that verifying all drafts would have given, estimated; (): all were verified
    """

    config: SpecConfig
    batch: int
    context_tokens: int
    rounds: int
    ms: float
    accepted: tuple[int, ...] = ()
    verified: int = 0
    if_all: tuple[float, ...] = ()

    @property
    def histogram(self) -> tuple[float, ...]:
        """Return what the acceptance of depths follows from."""
        return self.if_all or self.accepted


@dataclass(frozen=True)
class RunningSample:
    """A sample that an engine decodes now.

    prompt   its prompt tokens
    context  its tokens so far, the prompt included
    accept   tokens that one of its verify rounds delivered, on average
    """

    id: str
    prompt: int
    context: int
    accept: float


@dataclass(frozen=True)
class Load:
    """What one engine has to do.

    waiting      requests that it has not begun
    free_tokens  room in its KV cache, tokens
    version      of its weights; samples move between engines of one version only
    """

    engine: str
    running: tuple[RunningSample, ...]
    waiting: int
    free_tokens: int
    version: int

"""The types that all parts of the package share. Standard library and numpy only.

Names of fields are file formats. `wire.py` writes Prompt, Request, Partial, Sample, Group and OpenGroup by the names of
their fields: to the state beside a checkpoint (`run/state_file.py`) and to a recorded run (`run/trajectory.py`). A
renamed field makes these files unreadable. A renamed field of Prompt also changes the digest of the data
(`run/identity.py`), and a run with another digest is not resumed. SGLang engines send SpecConfig and RoundStats by
field names, too (`rollout/sglang/scheduler/control.py`).

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
    """Return the sharpness that a user or a file states, as a float. Raises ValueError for any other value."""
    # not isinstance: True is an int, too
    if type(value) not in (int, float) or not 0 < value <= 100:
        raise ValueError(f"{value!r}; expected a number above 0 and at most 100")
    return float(value)


@dataclass(frozen=True, order=True)
class SpecConfig:
    """How many tokens a round drafts for each request. Ordered by number of drafts; `OFF` is before `SpecConfig(0)`.

    num_steps  drafts of a round; 0: none
    drafter    whether the drafter runs. `SpecConfig(0)` is SGLang's step 0: it drafts nothing, but the drafter still
               extends its KV cache. `OFF` does not run the drafter at all
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
        """Return the configuration that drafts `num_steps` tokens a round. For 0 that is `OFF`, not SGLang's step 0."""
        return cls(num_steps, drafter=num_steps > 0)

    @property
    def off(self) -> bool:
        return not self.drafter

    def to_json(self) -> int | str:
        """Return "off" or the number of drafts, as the options, HTTP bodies and records of engines state it."""
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

    `top_k = -1`, `top_p = 1` and `min_p = 0` filter nothing; `temperature = 0` is greedy. The names of the fields are
    those of `SamplingBody` in `rollout/sglang/schemas.py`, because `asdict` makes the HTTP body of them. Nothing is
    checked here: `SamplingBody` and `config/rollout.py` have the bounds.

    max_new_tokens  most response tokens, those of a `Partial` included
    stop_token_ids  token ids that end a response, beside the model's end-of-sequence tokens
    ignore_eos      end-of-sequence tokens do not end a response. SGLang then ignores `stop_token_ids`, too; the
                    embedded engine does not
    stop            strings, none of them empty; a response ends with the first token after which its text contains one
                    of them
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
    """One task.

    id        row of the task in its file, from 0 (`tasks/data.py`)
    tokens    [P] int64, with the chat template
    label     right answer, with which the reward compares the response
    text      the text that `tokens` were made of
    metadata  further columns of the row, for the reward
    """

    id: int
    tokens: np.ndarray
    label: str = ""
    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Partial:
    """A sample that has begun: what an engine needs to continue it, and to return it as one `Sample`.

    Moves between engines, changes of the tensor-parallel size, lost engines and partial rollouts all use it. Indices
    count response tokens. `policy_versions`, `accepted` and `accepted_spans` are as in `Sample`.

    response [R] int64   tokens sampled so far, at least one
    logprobs [R] float32 their log-probabilities under the policies that sampled them
    draws                noise keys used so far. The target_only verifier continues with the next one, so that no noise
                         is used twice; the position_keyed verifier takes positions as keys and does not read it
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
        """Return the partial of an aborted sample. Raises ValueError if the sample has no response token."""
        first = sample.prompt_len
        logprobs = sample.behaviour_logprobs[first:]
        spans = sample.policy_versions
        return cls(
            sample.response, logprobs, spans, sample.accepted, sample.accepted_spans, sample.draws
        )

    def versions_with(
        self, more: tuple[tuple[int, int, int], ...]
    ) -> tuple[tuple[int, int, int], ...]:
        """Return `policy_versions` of the whole response.

        more  spans of the tokens that follow this partial; the first of them has index 0
        """
        spans = [list(span) for span in self.policy_versions]
        for version, first, last in more:
            if spans and spans[-1][0] == version:
                # the same weights went on: one span, so that neighbouring spans have different versions
                spans[-1][2] = last + len(self.response)
            else:
                spans.append([version, first + len(self.response), last + len(self.response)])
        return tuple((version, first, last) for version, first, last in spans)


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to generate. Under the position-keyed verifier its text depends only on seed, prompt and weights.

    id       no id may be a prefix of another, because SGLang aborts by prefix. So ids have numbers of fixed width
    seed     of the noise; `noise.seed_of` makes seeds from 0 to 2³¹ - 1
    partial  the engine continues this sample and returns the whole of it; `Sampling.max_new_tokens` counts from the
             first response token
    """

    id: str
    prompt: Prompt
    seed: int
    partial: Partial | None = None

    def aborted(self) -> Sample:
        """Return the sample as far as `partial` has it, with the status "aborted"."""
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
        """Return the sample of a response, with `loss_mask` 1 on all response tokens, in arrays of its own.

        response, logprobs  [R] tokens and their log-probabilities
        more                other fields of `Sample`
        """
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
    """One generated response. Index i of every `[L]` array describes `tokens[i]` itself, not the token that follows.

    In a `PackedBatch` most arrays are shifted by one; `packing/pack.py` does that.

    tokens [L] int64               prompt then response
    loss_mask [L] float32          1 where the token itself is a trained response token; 0 on the prompt, and on tokens
                                   that the policy did not write (`rollout/conversation.py`)
    behaviour_logprobs [L] float32 log-probability under the policy that sampled the token; 0 on the prompt
    status                         finished: by an end token or a stop string; truncated: at `max_new_tokens` or at the
                                   end of the context; aborted: stopped from outside, and not complete
    policy_versions                spans (version, first, last + 1) of response tokens, in order and without gaps; the
                                   first response token has index 0. `packing/pack.py` refuses gaps
    accepted                       histogram over verify rounds: accepted[i] rounds delivered 1 + i tokens
                                   (`acceptance.delivered`)
    accepted_spans                 spans (first, last + 1) of response tokens that were drafts; at most one per round
    draws                          see `Partial`
    reward                         set by `tasks/rewards.py`; 0 before, and where the reward failed: `metadata` then has
                                   the key "reward_error"
    text                           decoded response
    metadata                       "reward_error" and "reward_parts" by `tasks/rewards.py`; "own_reward" where
                                   `rollout.function` returned the reward (`rollout/conversation.py`)
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
        """Return the number of prompt tokens, which is the index of the first response token."""
        return len(self.prompt.tokens)

    @property
    def response(self) -> np.ndarray:
        """Return the response tokens `[R]`: a view, so writing to it changes `tokens`."""
        return self.tokens[self.prompt_len :]


def ended(
    response: Sequence[int] | np.ndarray, stops: Collection[int], limit: int
) -> Status | None:
    """Return how a continued sample ends with its last response token, or None if it goes on.

    Stop strings need a tokenizer and are checked by the callers (`texts.StopStrings`).

    response  all response tokens so far
    stops     token ids that end a response
    limit     max_new_tokens, which counts from the first response token

    Raises ValueError if an engine would have ended the response at an earlier token.
    """
    tokens = np.asarray(response)
    if len(tokens) > limit:
        raise ValueError(
            f"{len(tokens)} response tokens were drawn before; expected at most max_new_tokens={limit}"
        )
    stop_places = np.flatnonzero(np.isin(tokens, list(stops)))
    if len(stop_places) and stop_places[0] < len(tokens) - 1:
        raise ValueError(
            f"response token {stop_places[0]} of {len(tokens)} drawn before is {tokens[stop_places[0]]}, a stop token"
        )
    if len(stop_places):
        return "finished"
    return "truncated" if len(tokens) == limit else None


@dataclass(eq=False)
class Group:
    """The samples of one prompt. GRPO compares the rewards within a group."""

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
    """A group that is being generated: all its requests, and the samples that have ended, with their rewards.

    requests  at least one, all of one prompt, with different ids
    samples   at most one for each request, in any order
    """

    requests: list[Request]
    samples: list[Sample] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.samples) == len(self.requests)

    @property
    def oldest(self) -> float:
        """Return the lowest policy version that sampled one of the group's tokens; infinity without tokens."""
        # ended samples, and what unfinished requests have of theirs
        drawn: list[Sample | Partial] = [*self.samples]
        drawn += [request.partial for request in self.requests if request.partial]
        oldest = math.inf
        for part in drawn:
            for version, _, _ in part.policy_versions:
                oldest = min(oldest, version)
        return oldest

    def group(self) -> Group:
        """Return the samples that have ended, in the order of the requests. Other requests are left out."""
        by_id = {sample.request_id: sample for sample in self.samples}
        return Group(self.requests[0].prompt, [by_id[r.id] for r in self.requests if r.id in by_id])

    def anew(self) -> OpenGroup:
        """Return a group of the same requests without any token: all its samples are generated from the start."""
        return OpenGroup([replace(request, partial=None) for request in self.requests])


@dataclass(eq=False)
class PackedBatch:
    """One rank's share of one micro-batch, after the context-parallel slice.

    Tensors are `[T]` unless their line below says otherwise. `packing/pack.py` makes them on the CPU.

    Four tensors describe position t itself: `tokens`, `position_ids`, `sequence_ids` (index of the sample within the
    step, -1 on padding) and `drafter_weight`.

    The others are shifted: at position t they hold the values of token t + 1, which position t predicts. They are 0
    where token t + 1 belongs to another sequence or to padding. Float tensors are also 0 where `loss_mask` is 0.

    At depth d (index d - 1 of the three lists) the drafter reads token t + d, `drafter_tokens[d - 1][t]`, and predicts
    token t + 1 + d, `drafter_labels[d - 1][t]` (`packing/shift.py`).

    Tokens, labels, ids and seeds are int64; masks, weights, advantages and log-probabilities are float32.

    policy_weight      weight of the token in the policy's loss; with counts["policy"] it makes `algorithm.aggregation`
    drafter_weight     weight of the sample in the drafter's loss
    cu_seqlens         int32 `[n + 1]`, cumulative lengths of real tokens, before the context-parallel slice
    cu_seqlens_padded  the same with padding
    counts             denominators of the losses, summed over all ranks and micro-batches of the *step* before its
                       first backward: `policy`, `drafter` (one per depth), `tokens` (trained ones), `samples`
    old_logprobs       of the policy before the first of several updates; None: the first update, or not needed. The
                       trainer fills it in
    reference_logprobs of the policy that KL is measured to; None: not needed. The trainer fills it in
    staleness          versions between the policy that sampled the label and the trained policy; None if not needed
    noise_seeds        `Sample.seed` at positions where the acceptance of coupled drafts is predicted, else -1; None: a
                       sample has no seed
    drafter_part       the samples that the drafter learns from, as a batch of t positions; None: it learns from all
    drafter_rows       int64 `[t]`, for each position of `drafter_part` its row in this batch; 0 for padding
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
    """Decode rounds that ran under one configuration with one number of requests.

    batch           requests of each round
    context_tokens  tokens of all these requests together, averaged over the rounds
    rounds          rounds that were timed. Rounds without a time count in `accepted`, `verified` and `if_all` only
    ms              duration of all `rounds` together
    accepted        histogram: accepted[i] times a request accepted i drafts in a round. It is for estimates of
                    acceptance rates, so it also counts drafts past the end of a sample, and the embedded engine's
                    first rounds. `Sample.accepted` counts delivered tokens only
    verified        drafts that the target verified, of all requests; 0: the engine does not say
    if_all          estimate of the histogram if every draft had been verified (`spec.ragged`); (): all were verified
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
        """Return the histogram from which acceptance rates are estimated: `if_all` where drafts were not verified."""
        return self.if_all or self.accepted


@dataclass(frozen=True)
class RunningSample:
    """A sample that an engine decodes now.

    SGLang's scheduler process sends these fields as a list in this order (`_progress` in
    `rollout/sglang/scheduler/control.py`).

    prompt   number of its prompt tokens; of a continued sample in SGLang also the tokens that it was continued with
    context  number of its tokens so far, the prompt included
    accept   tokens that one of its verify rounds delivered, on average
    """

    id: str
    prompt: int
    context: int
    accept: float


@dataclass(frozen=True)
class Load:
    """What one engine has to do; moves of running samples are planned by it (`extensions/migration/plans/`).

    engine       the engine's name in the pool; an SGLang engine states its address
    running      samples that it decodes
    waiting      number of requests that are queued or not yet prefilled
    free_tokens  free room in its KV cache, in tokens
    version      of its weights; samples move between engines of one version only
    """

    engine: str
    running: tuple[RunningSample, ...]
    waiting: int
    free_tokens: int
    version: int

"""The nouns that every room shares. Standard library and numpy only.

Shapes: L is one sample's length (prompt + response), T this rank's packed tokens after the context-parallel slice,
D the drafter's depth. Times are milliseconds unless a name says otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

Status = Literal["finished", "truncated", "aborted"]
Scope = Literal["all", "target", "drafter"]
Verifier = Literal["position_keyed", "target_only", "rejection"]


@dataclass(frozen=True, order=True)
class SpecConfig:
    """One speculative configuration, in SGLang's terms.

    `num_steps` drafter passes per round, `topk` branches per pass, `num_draft_tokens` nodes that the target verifies
    (the last accepted token included). A chain (topk = 1) always verifies `num_steps + 1` tokens.
    `SpecConfig(0)` is SGLang's step 0: no draft, but the drafter still extends its cache. `OFF` pays no drafter at all.
    """

    num_steps: int
    topk: int = 1
    num_draft_tokens: int = -1

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 0:
            object.__setattr__(self, "num_draft_tokens", self.num_steps + 1 if self.topk == 1 else self.max_nodes)
        if self.num_steps < 0 or self.topk < 0:
            raise ValueError(f"num_steps={self.num_steps} and topk={self.topk} must not be negative")
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens}, but a chain of num_steps={self.num_steps} "
                f"verifies {self.num_steps + 1}"
            )
        if self.topk > 1 and self.num_draft_tokens > self.max_nodes:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens}, but num_steps={self.num_steps} and topk={self.topk} "
                f"yield at most {self.max_nodes} nodes"
            )

    @property
    def max_nodes(self) -> int:
        """Nodes of the full tree SGLang drafts: the root, topk children, then topk² candidates per further step."""
        if self.num_steps == 0:
            return 1
        return 1 + self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def off(self) -> bool:
        return self.topk == 0

    def __str__(self) -> str:
        if self.off:
            return "off"
        return f"k{self.num_steps}" if self.topk == 1 else f"k{self.num_steps}t{self.topk}n{self.num_draft_tokens}"


OFF = SpecConfig(num_steps=0, topk=0, num_draft_tokens=0)


@dataclass(frozen=True)
class SpecSchedule:
    """(running requests, context tokens of the whole batch) -> SpecConfig.

    `batch_edges[i]` is the smallest batch of row i, `context_edges[j]` the smallest total context of column j; anything
    smaller falls into the first. Example: `SpecSchedule((1, 8), (0,), ((SpecConfig(3),), (OFF,)))` drafts three steps
    below eight running requests and nothing from eight on.
    """

    batch_edges: tuple[int, ...]
    context_edges: tuple[int, ...]
    configs: tuple[tuple[SpecConfig, ...], ...]

    def __post_init__(self) -> None:
        for name, edges in (("batch_edges", self.batch_edges), ("context_edges", self.context_edges)):
            if not edges or list(edges) != sorted(set(edges)):
                raise ValueError(f"{name}={edges} must be a non-empty, strictly increasing tuple")
        if len(self.configs) != len(self.batch_edges) or any(len(r) != len(self.context_edges) for r in self.configs):
            raise ValueError(f"configs must have {len(self.batch_edges)} rows of {len(self.context_edges)} columns")

    @classmethod
    def fixed(cls, config: SpecConfig) -> SpecSchedule:
        return cls((1,), (0,), ((config,),))

    def choose(self, batch: int, context: int) -> SpecConfig:
        row = max(0, bisect_right(self.batch_edges, batch) - 1)
        column = max(0, bisect_right(self.context_edges, context) - 1)
        return self.configs[row][column]

    def to_json(self) -> dict[str, Any]:
        cells = [[[c.num_steps, c.topk, c.num_draft_tokens] for c in row] for row in self.configs]
        return {"batch_edges": list(self.batch_edges), "context_edges": list(self.context_edges), "configs": cells}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpecSchedule:
        configs = tuple(tuple(SpecConfig(*cell) for cell in row) for row in data["configs"])
        return cls(tuple(data["batch_edges"]), tuple(data["context_edges"]), configs)


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are drawn. `top_k = -1` and `top_p = 1` filter nothing; `temperature = 0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, eq=False)
class Prompt:
    """One task. `tokens [P] int64` includes the chat template; `label` is what the reward compares with."""

    id: int
    tokens: np.ndarray
    label: str = ""
    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to draw. Under the position-keyed verifier its text depends on seed, prompt and weights alone.

    No `id` may be a prefix of another: SGLang aborts by prefix.
    """

    id: str
    prompt: Prompt
    seed: int


@dataclass(eq=False)
class Sample:
    """One drawn response, token-aligned: index i of every `[L]` array speaks of `tokens[i]` itself.

    tokens [L] int64               prompt then response
    loss_mask [L] float32          1 where the token itself is a trained response token
    behaviour_logprobs [L] float32 log-probability under the policy that drew the token; 0 on the prompt
    policy_versions                spans (version, first, last + 1), counted from the response's first token
    accepted                       histogram over verify rounds: accepted[i] rounds accepted i drafts
    accepted_spans                 runs (first, last + 1) of response tokens that were drafts; one per round, at most
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
    reward: float = 0.0
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

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


@dataclass(eq=False)
class Group:
    """All samples of one prompt: GRPO's unit of comparison."""

    prompt: Prompt
    samples: list[Sample]


@dataclass(eq=False)
class PackedBatch:
    """One rank's share of one micro-batch, after the context-parallel slice. All tensors are `[T]` on the CPU.

    `tokens`, `position_ids`, `sequence_ids` (index of the sample within the step, -1 on padding) and `drafter_weight`
    speak of position t itself. All others are label-side: they speak of the *predicting* position, so at t they hold
    the values of token t + 1, and are 0 where that belongs to another sequence or to padding; the float ones are 0
    wherever `loss_mask` is, too. The drafter's depth d (index d - 1) predicts token t + 1 + d from token t + d.
    `cu_seqlens` counts real tokens and `cu_seqlens_padded` the laid-out ones, both global (before the slice), int32
    `[n + 1]`. `counts` holds the global denominators of every loss of the *step*, all ranks and micro-batches, known
    before the first backward: `policy`, `drafter` (one per depth); also `tokens` (trained ones) and `samples`.
    `staleness` counts the versions between the policy that drew the label and the one that is trained; None: not asked.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor
    sequence_ids: torch.Tensor
    policy_weight: torch.Tensor
    drafter_weight: torch.Tensor
    drafter_tokens: list[torch.Tensor]
    drafter_labels: list[torch.Tensor]
    drafter_mask: list[torch.Tensor]
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    counts: dict[str, Any]
    reference_logprobs: torch.Tensor | None = None
    behaviour_logprobs: torch.Tensor | None = None
    staleness: torch.Tensor | None = None


@dataclass(frozen=True)
class RoundStats:
    """Decode rounds that ran under one configuration, `ms` in all; `accepted[i]` times a request accepted i drafts."""

    config: SpecConfig
    batch: int
    context_tokens: int
    rounds: int
    ms: float
    accepted: tuple[int, ...] = ()

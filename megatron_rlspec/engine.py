"""The Protocol of a rollout engine: everything that the loop, the pool and the health contract call on one.

`rollout/sglang/client/engine.py` (SGLang over HTTP) and `rollout/embedded/engine.py` (this process) implement it;
`tests/test_type_check.py` has mypy prove that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict, TypeVar

from megatron_rlspec.types import (
    Drafts,
    Partial,
    Request,
    RoundStats,
    Sample,
    Sampling,
    Scope,
    SpecConfig,
    Verifier,
)

if TYPE_CHECKING:
    import numpy as np

Answer = TypeVar("Answer")


class EngineError(RuntimeError):
    """The engine refused, failed or ended. The message is one line: the engine, the request, the answer.

    begun  request id -> partial sample, for requests that a failed `generate` left unfinished. `rollout/dispatch.py`
           lets other engines continue them. A request without an entry is sent again as it was
    """

    exit_code = 1

    begun: Mapping[str, Partial] = MappingProxyType({})


class RequestError(EngineError):
    """Says that an engine refuses a request because of what is in it. The engine itself goes on."""


class EngineDescription(TypedDict):
    """An engine's description of itself.

    `_describe` in `rollout/sglang/scheduler/control.py` and `describe` in `rollout/embedded/engine.py` fill it in. Only
    SGLang engines have the keys that are NotRequired.

    configs           the numbers of drafts that it can switch between, and "off" (`SpecConfig.to_json`)
    speculative       whether it has a drafter
    tensor_parallel   number of its tensor-parallel ranks
    max_total_tokens  size of its KV cache, tokens
    max_running_requests  most requests that it decodes together
    draft_vocabulary  number of tokens that drafts are chosen from; 0: all
    sharpness         factor s of coupled drafts, argmax(s · log q + noise) (docs/losslessness.md)
    eagle3            of an EAGLE-3 drafter: `taps`, the layers of the target whose inputs it reads, and `words`, the
                      fingerprint of the tokens that it drafts from; {} or absent without one
    held              the reason given to `hold` while speculation is disabled; "" if it is not
    even              why every request of a round verifies the same number of drafts; "" if a rule may choose the
                      number for each request (`spec.ragged`)
    unnamed           why the weights cannot be read under their checkpoint names. A push is then checked by the tensors
                      that the models' loaders were given; "" if it is checked by the tensors that the engine holds
    rule              what chooses among `configs`, in words; "" if nothing does
    kernels           what samples tokens: "triton" (the kernel of this package), "torch" or "sglang"
    attention         SGLang's attention backend
    graphs            the largest batch with a captured CUDA graph; 0: none
    overlap           whether SGLang's overlap scheduler runs
    device, dtype     of the model
    """

    verifier: Verifier
    drafts: Drafts
    configs: list[int | str]
    speculative: bool
    tensor_parallel: int
    max_total_tokens: int
    max_running_requests: int
    draft_vocabulary: int
    sharpness: float
    eagle3: NotRequired[dict[str, Any]]
    held: str
    even: NotRequired[str]
    unnamed: str
    rule: NotRequired[str]
    kernels: NotRequired[str]
    attention: NotRequired[str]
    graphs: NotRequired[int]
    overlap: NotRequired[bool]
    device: NotRequired[str]
    dtype: NotRequired[str]


class RolloutEngine(Protocol):
    """One engine. Calls block; `rollout/pool.py` spreads them over threads and engines, and has a name for each.

    In a run only rank 0 calls engines. An update of weights is `begin_update`, `send` for each bucket, and
    `end_update`, which must follow after a failure, too, with the error. `stats` and `spec_rule_report` reset what they
    return: a second reader would miss it.

    Every method raises EngineError if the engine refuses, fails or is gone; `alive` and `close` never do.
    """

    @property
    def bucket_memory(self) -> Any:
        """Return the `push.bucket.Memory` into which `send`'s buckets are packed; None: buckets hold plain tensors."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        """Generate one sample per request, returned in the order of the requests.

        Every sample carries log-probs, acceptance histogram and policy versions; aborted ones keep what they have.
        A request with a partial is continued after a prefill of prompt and partial, and its sample is the whole one.
        Under the position-keyed verifier the text equals that of a sample that was never interrupted. Under other
        verifiers SGLang refuses such a request.
        `on_sample` is called once per sample, at the latest before this returns, perhaps from another thread.
        Raises ValueError or EngineError if two requests have one id.
        """

    def begin_update(self, version: int, scope: Scope = "all") -> None:
        """Open an update of the weights of `scope`. Until `end_update` no request is decoded.

        version  number of the weights, which later samples carry in `policy_versions`
        """

    def send(self, bucket: Any, *others: Any) -> None:
        """Load a `push.bucket.Bucket` of full, unsharded tensors under Hugging Face checkpoint names.

        others  all other engines of the update, if they share one `bucket_memory` that is `joint`: this one call then
                serves them, too. Otherwise none
        """

    def end_update(self, error: str = "") -> None:
        """End an update. After an error the engine serves nothing until a later update succeeds.

        error  why it ends unfinished, or did not begin; "" if all buckets were sent
        """

    def set_config(self, config: SpecConfig, sharpness: float | None = None) -> None:
        """Run `config` in every later decode round, and end the use of a rule.

        sharpness  of coupled drafts; None: as before
        """

    def set_spec_rule(self, rule: Mapping[str, Any]) -> None:
        """Choose the configuration of every later decode round by `speculation.rule.SpecRule.from_json(rule)`."""

    def set_draft_vocabulary(self, words: np.ndarray) -> None:
        """Choose drafts from the token ids `words [S]` int64, no id twice, from the next round on. Texts stay the same.

        The drafter's head is then made of these rows of the target's head. Every later weight update makes it anew. An
        EAGLE-3 drafter has a head of its own, and its engine refuses the call.
        """

    def spec_rule_report(self) -> dict[str, Any]:
        """Return and reset `SpecRule.report`; {} under a fixed configuration and without speculation."""

    def hold(self, reason: str) -> None:
        """Disable speculation until `release`. Configurations and rules that are set meanwhile are stored. Repeatable.

        reason  stands in `describe()["held"]`; not empty
        """

    def release(self) -> None:
        """Enable speculation again under the latest configuration or rule. Does nothing if speculation is not held."""

    def sleep(self) -> None:
        """Release memory while the trainer has the GPU. Until `wake` it must neither generate nor take weights.

        `stats` and `spec_rule_report` are read meanwhile (`adapt` in `run/rollouts.py`).

        The embedded engine does nothing.

        An SGLang engine loses its weights. It keeps its running samples, and computes their KV cache anew.
        """

    def wake(self) -> None:
        """Take the memory back after `sleep`. An SGLang engine serves nothing until all weights are pushed."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the named samples, or all: their `generate` returns what they have, with status "aborted"."""

    def stats(self) -> list[RoundStats]:
        """Return and reset the counts and times of decode rounds, summed by (config, batch).

        `push/canary.py` calls it to drop the rounds of its own prompts.
        """

    def fingerprints(self) -> dict[str, int]:
        """Compute the fingerprint (`push/fingerprint.py`) of every tensor that the engine holds, by Hugging Face name.

        `push/push.py` compares them with those of the tensors sent.
        """

    def describe(self) -> EngineDescription:
        """Return the engine's sizes, what it can run, and what it runs now."""

    @property
    def alive(self) -> bool:
        """Return False if the engine has ended. An engine started elsewhere counts as alive until a call fails."""

    def close(self) -> None:
        """End the engine if this process started it; otherwise drop the connection. Repeatable."""


def ask_all(
    engines: Mapping[str, RolloutEngine], call: Callable[[RolloutEngine], Answer]
) -> tuple[dict[str, Answer], dict[str, EngineError]]:
    """Call every engine at once, each in a thread. Return the answers by name, and the errors of engines that failed.

    Any error of `call` other than EngineError is raised, after all calls have ended. Without engines: ({}, {}).
    """
    with ThreadPoolExecutor(max(1, len(engines))) as threads:
        futures = {name: threads.submit(call, engine) for name, engine in engines.items()}
    answers: dict[str, Answer] = {}
    errors: dict[str, EngineError] = {}
    for name, future in futures.items():
        try:
            answers[name] = future.result()
        except EngineError as error:
            errors[name] = error
    return answers, errors

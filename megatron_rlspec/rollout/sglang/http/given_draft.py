"""Check the draft of a request: take over what the engine's weights draw of it from the request's own seed.

The tokens are drawn in `scheduler/given_draft.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rlspec.rollout.sglang import ids
from megatron_rlspec.rollout.sglang.http.progress import logprobs
from megatron_rlspec.rollout.sglang.schemas import RequestBody
from megatron_rlspec.rollout.sglang.settings import DRAW_ALL
from megatron_rlspec.texts import StopStrings


@dataclass
class Checked:
    """What a response has after the check of its draft: the part of the weights of `version`.

    finish  SGLang's reason, if the response ends there or was aborted
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: str = ""
    finish: dict[str, Any] | None = None

    def before(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the last line of a sample with these tokens before its own ones."""
        count = len(self.tokens)
        if not count:
            return line
        spans = [{"version": self.version, "start": 0, "end": count}]
        for span in line["weight_versions"]:
            last = span["end"] + count
            if span["version"] == spans[-1]["version"]:
                spans[-1]["end"] = last
            else:
                spans.append(
                    {"version": span["version"], "start": span["start"] + count, "end": last}
                )
        return line | {
            "output_ids": self.tokens + line["output_ids"],
            "logprobs": self.logprobs + line["logprobs"],
            "drafted": [0] * count + line["drafted"],
            "weight_versions": spans,
        }


@dataclass(frozen=True)
class Ends:
    """Where a response ends.

    stops    token ids
    strings  or None
    limit    tokens
    """

    stops: Collection[int]
    strings: StopStrings | None
    limit: int

    def of(self, response: Sequence[int], first: int) -> tuple[int, dict[str, Any] | None]:
        """Return how many tokens a response has up to its end, and SGLang's reason, or None if it goes on.

        first  index of the first token that is not known to be before the end
        """
        stop = next(
            (i + 1 for i in range(first, len(response)) if response[i] in self.stops),
            len(response) + 1,
        )
        found = (
            self.strings.end(response[: min(stop, self.limit)], first)
            if self.strings is not None
            else None
        )
        stop = min(stop, len(response) + 1 if found is None else found[0])
        if stop <= min(len(response), self.limit):
            return stop, {"type": "stop"}
        if len(response) >= self.limit:
            return self.limit, {"type": "length"}
        return len(response), None


def taken(
    begun: list[int], draft: Sequence[int], drawn: Sequence[Sequence[Any]], ends: Ends, version: str
) -> Checked:
    """Return what holds of a draft: the tokens up to the first that differs, with the one drawn in its place.

    Behind it, tokens were drawn after a text that the weights would not have drawn.

    begun  the response before the draft
    drawn  of each position of the draft (log-prob, token, ...) of the token that the weights draw there
    """
    count = next(
        (
            i
            for i, (given, (_, token, *_)) in enumerate(zip(draft, drawn, strict=True))
            if given != token
        ),
        -1,
    )
    held = drawn if count < 0 else drawn[: count + 1]
    last, finish = ends.of(begun + [token for _, token, *_ in held], len(begun))
    held = held[: last - len(begun)]
    return Checked([token for _, token, *_ in held], logprobs(held), version, finish)


async def check(
    manager: Any,
    version: Callable[[Any], str],
    asked: RequestBody,
    ends: Ends,
    message: Callable[..., Any],
) -> Checked:
    """Have the engine draw at every position of a request's draft, in one extend pass, and return what holds.

    manager  SGLang's TokenizerManager; `version(manager)` is that of its weights
    message  SGLang's GenerateReqInput
    """
    given = asked.input_ids + asked.begun
    room = (
        min(manager.max_req_input_len, manager.context_len - manager.num_reserved_tokens)
        - 1
        - len(given)
    )
    draft = asked.draft[: max(0, min(room, ends.limit - len(asked.begun)))]
    if not draft:
        return Checked()
    sampling = asked.sampling.model_dump() | {"max_new_tokens": 1, "stop": []}
    while True:
        began = version(manager)
        request = message(
            rid=ids.inner(asked.id),
            input_ids=given + draft,
            sampling_params=dict(sampling),
            stream=False,
            return_logprob=True,
            logprob_start_len=len(given) - 1,
            token_ids_logprob=DRAW_ALL,
        )
        [answer] = [answer async for answer in manager.generate_request(request, None)]
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return Checked(finish=meta["finish_reason"])
        if version(manager) == began:  # else a push came meanwhile, and its weights draw anew
            # Of the position before the draft on, what it draws next; SGLang puts None before that.
            drawn = [position[0] for position in meta["input_token_ids_logprobs"][1:]]
            return taken(asked.begun, draft, drawn, ends, began)

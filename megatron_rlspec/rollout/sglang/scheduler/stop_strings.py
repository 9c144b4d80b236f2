"""Stop strings in SGLang's scheduler: a response ends where plain decoding ends it, whatever was drafted.

SGLang decodes the newest tokens, as many as its tokenizer makes of the longest stop string, or as many as the round
accepted if these are more. That has three faults:

- A string that was sampled in smaller tokens is found only if the round accepted enough of them.
- Of several strings the first of the list ends the response, not the first in the text.
- A string behind a stop token of the same round ends the response, in place of that token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_rlspec.texts import StopStrings

# in a request's `custom_params`: tokens of its response that SGLang has as a part of its input
BEGUN = "rlspec_begun"


def hooks() -> Iterator[tuple[str, Callable, str]]:
    """Yield the hook on SGLang's search for stop strings."""
    yield "sglang.srt.managers.schedule_batch.Req._check_str_based_finish", ends, "AROUND"


def ends(original: Callable, request: Any, new_accepted_len: int = 1) -> bool:
    """Return whether the newest tokens end the request, and set why, and with how many tokens."""
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR

    params, drawn = request.sampling_params, request.output_ids
    if not params.stop_strs or params.stop_regex_strs:
        return original(request, new_accepted_len)
    strings = StopStrings(params.stop_strs, request.tokenizer.decode)
    wanted = strings.window - 1 + new_accepted_len
    before = min((params.custom_params or {}).get(BEGUN, 0), max(0, wanted - len(drawn)))
    prompt = request.origin_input_ids
    tokens = [*prompt[len(prompt) - before :], *drawn[-wanted:]]
    ending = strings.end(tokens, len(tokens) - new_accepted_len)
    if ending is None:
        return False
    end = len(drawn) - len(tokens) + ending[0]
    if (
        not request._check_token_based_finish(drawn[-new_accepted_len:])
        or end < request.finished_len
    ):
        request.finished_reason = FINISH_MATCHED_STR(matched=ending[1])
        request.finished_len = end
    return True

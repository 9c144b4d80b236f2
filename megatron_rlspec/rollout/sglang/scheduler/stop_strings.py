"""Stop strings in SGLang's scheduler: a response ends where plain decoding ends it, whatever was drafted.

SGLang decodes as many tokens as its tokenizer makes of the longest string, and more if a round accepted more. So it
finds a string that was sampled in smaller tokens only if a round accepted enough of them; of several strings it takes
the first of the list, not of the text; and a string behind a stop token of the same round wins.
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

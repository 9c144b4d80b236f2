"""Aborted samples: one that reaches its end in the round in which it is aborted counts as ended, not as aborted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def hooks() -> Iterator[tuple[str, Callable, str]]:
    """Yield the hook on SGLang's check for the end of a sample."""
    yield "sglang.srt.managers.schedule_batch.Req.update_finish_state", end_first, "AROUND"


def end_first(original: Callable, request: Any, *args: Any, **kwargs: Any) -> None:
    """Let a round that reaches a sample's end be its end, even if it is to be aborted.

    SGLang looks for stop tokens only in requests that go on. Otherwise an aborted sample could hold its last token and
    further ones behind it, and continue there in the next step or in another engine.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = request.to_finish
    # by a client or a move, and not for an error
    if isinstance(reason, FINISH_ABORT) and reason.status_code is None:
        request.to_finish = None
        original(request, *args, **kwargs)
        if request.finished():
            return
        request.to_finish = reason
    original(request, *args, **kwargs)

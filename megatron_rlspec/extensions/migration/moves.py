"""Moves of running samples between SGLang engines: the source is cut off, and the target prefills and goes on.

A sample is always in exactly one place: on an engine, or in the hands of the mover as a request with what it has so
far. A move costs the prefill of prompt and response. The text stays the same, because every token's noise depends on
seed and position alone.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Collection

from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.rollout.dispatch import Dispatch
from megatron_rlspec.types import Request

ABORT_AGAIN = 0.2  # seconds
logger = logging.getLogger(__name__)


def cut_off(
    owner: Dispatch, name: str, engine: RolloutEngine, ids: Collection[str]
) -> list[Request]:
    """Have the samples `ids` leave an engine, called `name`. Returns those that did, as requests to continue.

    It waits until the engine has returned every sample. Samples that end meanwhile are not in the result, nor are those
    of an engine that is lost: its `generate` fails, and the pool continues them.
    """
    # Filled by the engine's thread, which calls the function given to `claim`. None: the sample will not come.
    returned: queue.SimpleQueue[tuple[str, Request | None]] = queue.SimpleQueue()
    left = set(owner.claim(name, ids, lambda id, request: returned.put((id, request))))
    requests = []
    while left:
        # An abort does nothing for a request that has not reached the engine yet, so it is repeated.
        try:
            engine.abort(sorted(left))
        except EngineError as error:
            logger.warning("%s does not give samples back: %s", name, error)
        try:
            while left:
                id, request = returned.get(timeout=ABORT_AGAIN)
                left.discard(id)
                if request is not None:
                    requests.append(request)
        except queue.Empty:
            continue
    return requests

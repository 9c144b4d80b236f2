"""Tell all tensor-parallel ranks of an engine how long rounds took, by the first rank's clock.

Every rank decides for itself and must learn the same. Before each round SGLang's first rank broadcasts the requests
that it has received, in `SchedulerRequestReceiver`. The durations of the last rounds travel with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rlspec.rollout.sglang.scheduler import decisions

TOGETHER = (
    4  # durations that travel together; the broadcasts between, without any request, are cheaper
)


@dataclass(frozen=True)
class SharedTimes:
    """What travels among SGLang's requests."""

    rounds: list[decisions.RoundTime]


def hooks() -> Iterator[tuple[str, Callable, str]]:
    receiver = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
    yield f"{receiver}._broadcast_reqs_across_ranks", _broadcast, "AROUND"


def _broadcast(
    original: Callable, receiver: Any, received: list[Any] | None, *rest: Any
) -> list[Any]:
    """Send this rank's times with its requests, if it is the first, and let the rule learn those that arrive.

    Every rank notes durations of the same rounds, so all of them clear their lists at the same broadcast.

    received  requests of the first rank; None on the others
    """
    unshared = decisions.decider.unshared_times
    if len(unshared) >= TOGETHER:
        if received is not None:
            received = [*received, SharedTimes([*unshared])]
        unshared.clear()
    requests = []
    for request in original(receiver, received, *rest):
        if not isinstance(request, SharedTimes):
            requests.append(request)
            continue
        for timed in request.rounds:
            decisions.decider.learn(timed)
    return requests

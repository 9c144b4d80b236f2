"""Routing replay of slime beside a drafter with experts: the trunk replays, the drafter's router chooses by itself.

Under `--use-routing-replay` every router of the model gets a list of recorded choices when it is built
(`slime.utils.routing_replay`), the MTP layer's, too. But engines record the trunk's layers only: a draft is another
pass, over other hidden states. And slime's own recording runs without the MTP layer. So the drafter's list would stay
empty, and replaying it would fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

STAGE = "ROUTING_REPLAY_STAGE"  # read by slime's top-k at every call


def leave_out(drafter: nn.Module) -> None:
    """Remove the drafter's routers from those that slime fills, checks and clears. Call it once the model is built."""
    for module in drafter.modules():
        if hasattr(module, "routing_replay"):
            from slime.utils.routing_replay import RoutingReplay

            replays = RoutingReplay.all_routing_replays
            replays[:] = [replay for replay in replays if replay is not module.routing_replay]


@contextmanager
def unreplayed() -> Iterator[None]:
    """Let the routers that run in the `with` block, forward or backward, choose by themselves."""
    stage = os.environ.get(STAGE)
    if stage is None:  # without --use-routing-replay
        yield
        return
    os.environ[STAGE] = "fallthrough"
    try:
        yield
    finally:
        os.environ[STAGE] = stage

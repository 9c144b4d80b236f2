"""Configurations that take turns in an engine while it generates."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import SpecConfig


@contextmanager
def taking_turns(engine: SGLangEngine, *configs: SpecConfig) -> Iterator[None]:
    """Set one configuration after the other, again and again; one alone stays. Each counts from the next round on."""
    ended = threading.Event()
    engine.set_config(configs[0])

    def change() -> None:
        for config in itertools.cycle(configs):
            if ended.is_set() or len(configs) == 1:
                break
            engine.set_config(config)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

"""Configurations that take turns in an engine while it generates."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import Sample, SpecConfig


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


def generate_in_turns(
    engine: SGLangEngine, configs: Sequence[SpecConfig], generate: Callable[[], list[Sample]]
) -> Iterator[list[Sample]]:
    """Yield the samples of `generate()` while the configurations take turns, until three of them, or all, were used.

    A busy machine may finish all samples before the second configuration arrives. Then they are generated again.
    """
    least = min(len(configs), 3)
    used = set()
    engine.stats()
    for _ in range(20):
        with taking_turns(engine, *configs):
            samples = generate()
        used |= {stats.config for stats in engine.stats()}
        yield samples
        if len(used) >= least:
            break
    assert used <= set(configs) and len(used) >= least

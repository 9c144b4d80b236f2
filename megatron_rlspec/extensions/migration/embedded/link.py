"""What a fleet measures once, because its plans may hold no clock: the link between two ranks, and a round's time."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from megatron_rlspec import files, wire
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.speculation.rule import Cost
from megatron_rlspec.types import Prompt, Request, Sampling

SIZE = 4 << 20  # bytes of a timed message
REPEATS = 4  # the first one opens connections
SAMPLES = 4  # of the timed rounds
TOKENS = 16  # of their prompts, and of their responses


class Link(msgspec.Struct, frozen=True):
    """gigabytes_per_second: that every rank sends while it receives; ms_per_unit: of the cost that plans count in."""

    gigabytes_per_second: float
    ms_per_unit: float


def once(path: Path, ranks: Ranks, engine: EmbeddedEngine, cost: Cost) -> Link:
    """Measure, or return what an earlier part of this run measured and wrote to `path`. The same on all ranks.

    All ranks call it, before the engine's first request. Raises FileError on rank 0 for a file that holds no Link.
    """
    known = b""
    if ranks.rank == 0 and path.exists():
        try:
            known = wire.encode(msgspec.json.decode(files.read_text(path), type=Link))
        except msgspec.DecodeError as error:
            raise files.FileError(f"{path}: {error}; remove the file to have it measured again") from None
    known = ranks.tell(known if ranks.rank == 0 else None)
    if known:
        return wire.decode(known, Link)
    own = wire.encode((_seconds(ranks), _ms_per_unit(engine, cost)))
    shared = [wire.decode(data, tuple[float, float]) for data in ranks.share(own)]
    found = Link(SIZE / max(seconds for seconds, _ in shared) / 1e9, max(ms for _, ms in shared))
    if ranks.rank == 0:
        files.write(path, msgspec.json.encode(found).decode() + "\n")
    return found


def _seconds(ranks: Ranks) -> float:
    """Return the seconds in which this rank sends a message to the next one and receives one from the one before."""
    message = torch.zeros(SIZE, dtype=torch.uint8)
    fastest = math.inf
    for _ in range(REPEATS):
        ranks.share(b"")  # begin together
        began = time.perf_counter()
        ranks.send((ranks.rank + 1) % ranks.size, message)
        ranks.receive((ranks.rank - 1) % ranks.size)
        ranks.flush()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def _ms_per_unit(engine: EmbeddedEngine, cost: Cost) -> float:
    """Return the median of ms over `cost`, of rounds that this engine runs for the purpose."""
    prompt = np.arange(1, TOKENS + 1) % engine.arch.vocab
    requests = [Request(f"link-{i}.", Prompt(i, prompt), i) for i in range(SAMPLES)]
    engine.generate(requests, Sampling(max_new_tokens=TOKENS, ignore_eos=True))
    ratios = []
    for config, batch, context, ms in engine.recent_rounds():
        if ms is not None:
            ratios.append(ms / float(cost.grid([config], np.array(batch), np.array(context))[0]))
    engine.stats()  # they are none of a rollout's
    return statistics.median(ratios)

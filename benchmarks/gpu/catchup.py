"""Generate without drafts for a while, then draft: what a round without drafts costs later, and catching up.

The drafter misses the tokens of rounds without drafts. Before it drafts again, it computes its KV cache of them.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import OFF, Sampling, SpecConfig

SPARE = 600  # tokens: what a rollout generates until it is told to draft, and after that
DRAFTED = 40  # rounds, after which the rollout ends
Round = tuple[SpecConfig, int, int, float | None]


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    engine = serving.attached(folder)["wide"]
    requests, _ = plan.off
    rounds = _generate(plan, engine)
    off = [ms for config, batch, _, ms in rounds if config == OFF and batch == requests and ms is not None]
    drafted = [ms for config, _, _, ms in rounds if config != OFF and ms is not None]
    part = max(1, min(200, len(off) // 4))
    first = statistics.median(off[:part])
    last = statistics.median(off[-part:])
    figures.say("a round without drafts, at first", first, "ms", f"{requests} requests")
    figures.say("a round without drafts, at last", last, "ms", f"after {len(off):,} rounds, of longer contexts, too")
    if not drafted:
        raise RuntimeError("no round drafted")
    steady = statistics.median(drafted[len(drafted) // 2 :])
    caught = max(drafted[:3]) - steady
    missed = requests * len(off)
    figures.say("a round with drafts", steady, "ms", f"{plan.drafts} drafts, {requests} requests")
    figures.say("catching up", caught, "ms", "the longest of the first three rounds that draft, less such a round")
    figures.say("catching up on a token", 1e3 * caught / missed, "us", f"{missed:,} tokens")


def _generate(plan: Plan, engine: SGLangEngine) -> list[Round]:
    """Return the rounds of a rollout that drafts after `plan.off` rounds without drafts."""
    count, rounds_off = plan.off
    engine.set_config(OFF)
    requests = serving.asked(plan, count)
    errors: list[EngineError] = []

    def work() -> None:
        try:
            engine.generate(requests, Sampling(max_new_tokens=rounds_off + SPARE, ignore_eos=True))
        except EngineError as error:
            errors.append(error)

    engine.recent_rounds()
    thread = threading.Thread(target=work)
    thread.start()
    rounds: list[Round] = []
    while thread.is_alive() and len(rounds) < rounds_off:
        time.sleep(0.2)
        rounds += engine.recent_rounds()
    engine.set_config(SpecConfig(plan.drafts))
    while thread.is_alive() and sum(config != OFF for config, *_ in rounds) < DRAFTED:
        time.sleep(0.1)
        rounds += engine.recent_rounds()
    engine.abort([request.id for request in requests])
    thread.join()
    if errors:
        raise errors[0]
    return rounds + engine.recent_rounds()

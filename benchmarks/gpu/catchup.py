"""Generate without drafts for a long time, then draft: what recording costs, and what catching up costs."""

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
from megatron_rlspec.types import OFF, Sampling, SpecConfig, SpecSchedule

SPARE = 600  # tokens: what a rollout generates until it is told to draft, and after that
DRAFTED = 40  # rounds, after which the rollout ends
Round = tuple[SpecConfig, int, int, float | None]


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    requests, rounds = plan.off
    drafts = max(plan.fixed)
    response = rounds + SPARE
    tokens = requests * (serving.PROMPT + response + 64)
    steps = ",".join(map(str, plan.steps))
    arguments = [*serving.options(plan, requests, tokens, 0.85, serving.UNCACHED), "--spec", "adaptive"]
    arguments += ["--candidate-steps", steps, "--num-steps", str(drafts)]
    with serving.launched(plan, folder, figures, "engine", arguments) as process:
        engine = SGLangEngine.of(process, timeout=240)
        found = _generate(plan, engine, requests, rounds, response, drafts)
    off = [ms for config, batch, _, ms in found if config == OFF and batch == requests and ms is not None]
    drafted = [(config, ms) for config, _, _, ms in found if config != OFF and ms is not None]
    part = max(1, min(200, len(off) // 4))
    first, last = statistics.median(off[:part]), statistics.median(off[-part:])
    figures.say("a round without drafts, at first", first, "ms", f"batch {requests}")
    figures.say("a round without drafts, at last", last, "ms", f"after {len(off):,} rounds, of longer contexts, too")
    if not drafted:
        raise RuntimeError("no round drafted")
    steady = statistics.median(ms for _, ms in drafted[len(drafted) // 2 :])
    turn = max(ms for _, ms in drafted[:3])
    figures.say("a round with drafts", steady, "ms", f"{drafts} drafts, batch {requests}")
    figures.say(
        "catching up", turn - steady, "ms", "the longest of the first three rounds that draft, less such a round"
    )


def _generate(plan: Plan, engine: SGLangEngine, requests: int, rounds: int, response: int, drafts: int) -> list[Round]:
    """Return the rounds of a rollout that drafts after `rounds` rounds."""
    engine.set_schedule(SpecSchedule.fixed(OFF))
    asked = serving.asked(plan, requests)
    errors: list[EngineError] = []

    def work() -> None:
        try:
            engine.generate(asked, Sampling(max_new_tokens=response, ignore_eos=True))
        except EngineError as error:
            errors.append(error)

    engine.recent_rounds()
    thread = threading.Thread(target=work)
    thread.start()
    found: list[Round] = []
    while thread.is_alive() and len(found) < rounds:
        time.sleep(0.2)
        found += engine.recent_rounds()
    engine.set_schedule(SpecSchedule.fixed(SpecConfig(drafts)))
    while thread.is_alive() and sum(config != OFF for config, *_ in found) < DRAFTED:
        time.sleep(0.1)
        found += engine.recent_rounds()
    engine.abort([request.id for request in asked])
    thread.join()
    if errors:
        raise errors[0]
    return found + engine.recent_rounds()

"""Compare rounds that verify the drafts worth it (`spec.ragged`) with the best number of drafts for all requests.

Both run in turns in one stream of requests, by the model's sizes as costs, corrected by the engine's own rounds. The
model is certain of most tokens and not of others, as a policy after RL; of a flat one little can be gained.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from adaptive_sglang import shares

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from gpu.variants import equal_texts
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, RoundStats


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    engine = serving.attached(folder)["uneven"]
    if even := engine.describe().get("even"):
        raise RuntimeError(f"the engine's rounds are even: {even}")
    _texts(plan, figures, engine)
    for requests, context in plan.uneven_points:
        point = f"{requests} requests of {context:,}"
        with figures.attempt(point), serving.stream(plan, engine, requests, context):
            _compare(plan, figures, engine, point)


def _texts(plan: Plan, figures: Figures, engine: SGLangEngine) -> None:
    """Write how many texts are those of rounds without drafts. In bfloat16 other kernels round otherwise."""
    requests = plan.uneven_points[0][0]
    texts = []
    engine.set_config(OFF)
    for _ in range(3):  # without drafts; while the rule learns; as it has learnt
        texts.append(serving.rollout(engine, serving.asked(plan, requests), plan.text_tokens)[1])
        engine.set_spec_rule({"roofline": Roofline.of_layers(plan.shape.layers).to_json(), "ragged": True})
    share, where = equal_texts(texts[0], texts[-1])
    figures.say(f"{requests} requests: equal texts", share, "", where)


def _compare(plan: Plan, figures: Figures, engine: SGLangEngine, point: str) -> None:
    rates: dict[str, list[float]] = {"even": [], "uneven": []}
    rounds: dict[str, list[RoundStats]] = {"even": [], "uneven": []}
    learning = Learning(plan.uneven_steps, Roofline.of_layers(plan.shape.layers))
    for turn in range(plan.turns):
        for name in sorted(rates, reverse=turn % 2 == 0):
            engine.set_spec_rule(learning.rule() | {"ragged": name == "uneven"})
            time.sleep(plan.settle)
            rate, stats = serving.window(engine, plan.window)
            rates[name].append(rate)
            rounds[name] += stats
            learning.observe(stats, [engine.spec_rule_report()])
    for name, measured in rates.items():
        figures.say(f"{point}: {name}", statistics.median(measured), "tokens/s", shares(rounds[name]))
        drafting = [stats for stats in rounds[name] if stats.config.num_steps]
        requests = sum(sum(stats.accepted) for stats in drafting)
        if not requests:
            continue
        verified = sum(stats.verified for stats in drafting) / requests
        accepted = sum(serving.tokens_of(stats) for stats in drafting) / requests - 1
        note = "drafts of a request and round that were verified, of those rounds that drafted"
        figures.say(f"{point}: {name}, verified", verified, "", note)
        figures.say(f"{point}: {name}, accepted", accepted, "")
    pairs = [uneven / even for uneven, even in zip(rates["uneven"], rates["even"], strict=True)]
    figures.say(f"{point}: uneven / even", statistics.median(pairs), "x", f"{min(pairs):.2f} to {max(pairs):.2f}")

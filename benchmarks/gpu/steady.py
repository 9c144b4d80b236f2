"""Compare adaptive drafts with rounds without drafts, in steady state: a request that ends is replaced at once.

A rollout of equally long responses would charge drafts for its end, where few requests are left. Both contestants run
in turns in one stream of requests. Beside the measured ratio stands what measured costs predict for these rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from adaptive_sglang import shares, tokens_per_round

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from gpu.profile import COSTS
from megatron_rlspec.extensions.migration.plans import round_costs
from megatron_rlspec.extensions.migration.plans.round_costs import RoundCosts
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, RoundStats


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    engine = serving.attached(folder)["wide"]
    path = figures.out.parent / COSTS
    costs = round_costs.read(path, [1])[1] if path.exists() else None
    for requests, context in plan.points:
        learning = Learning(plan.steps, Roofline.of_layers(plan.shape.layers))
        with figures.attempt(f"{requests} requests of {context:,}"), serving.stream(plan, engine, requests, context):
            _compare(plan, figures, engine, learning, costs, f"{requests} requests of {context:,}")


def _compare(
    plan: Plan, figures: Figures, engine: SGLangEngine, learning: Learning, costs: RoundCosts | None, point: str
) -> None:
    rates: dict[str, list[float]] = {"off": [], "adaptive": []}
    rounds: list[RoundStats] = []
    for turn in range(plan.turns):
        order = sorted(rates, reverse=turn % 2 == 0)
        for name in order:
            if name == "off":
                engine.set_config(OFF)
            else:
                engine.set_spec_rule(learning.rule())
            time.sleep(plan.settle)  # the drafter catches up
            rate, stats = serving.window(engine, plan.window)
            rates[name].append(rate)
            if name == "adaptive":
                learning.observe(stats, [engine.spec_rule_report()])
                rounds += stats
    for name, measured in rates.items():
        figures.say(f"{point}: {name}", statistics.median(measured), "tokens/s", f"{plan.turns} turns")
    pairs = [adaptive / off for adaptive, off in zip(rates["adaptive"], rates["off"], strict=True)]
    note = f"{min(pairs):.2f} to {max(pairs):.2f}; {tokens_per_round(rounds):.2f} tokens a round; {shares(rounds)}"
    figures.say(f"{point}: adaptive / off", statistics.median(pairs), "x", note)
    if costs is not None:
        figures.say(f"{point}: adaptive / off by measured costs", _predicted(costs, rounds), "x", "for these rounds")


def _predicted(costs: RoundCosts, rounds: Sequence[RoundStats]) -> float:
    """Return the ratio of speeds that measured costs predict: plain rounds for as many tokens, over these rounds."""
    plain_ms = ms = 0.0
    for stats in rounds:
        place = np.array([stats.batch]), np.array([max(stats.context_tokens, stats.batch)])
        taken, plain = costs.grid([stats.config, OFF], *place)[:, 0]
        length = serving.tokens_of(stats) / max(1, sum(stats.accepted))
        ms += stats.rounds * taken
        plain_ms += stats.rounds * length * plain
    return float(plain_ms / ms)

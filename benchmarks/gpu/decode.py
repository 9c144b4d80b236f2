"""Compare contestants on one speculating engine with engines that draft the likeliest tokens, and that do not draft.

Rounds of one batch size are profiled there, too.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from adaptive_sglang import ratio, share_a_key, shares, tokens_per_round

from gpu import rounds, serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.commands import profile
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

LIKELIEST = "likeliest tokens as drafts"
RIDGE = 256.0  # tokens in a pass from which an H100 computes longer than it reads weights; only without a cost table


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    share_a_key()
    steps = ",".join(map(str, plan.steps))
    adaptive = ["--spec", "adaptive", "--candidate-steps", steps, "--num-steps", str(max(plan.fixed))]
    likeliest = ["--spec", "fixed", "--num-steps", str(max(plan.fixed)), "--drafts", "argmax"]
    most = max(plan.batches)
    tokens = most * (serving.PROMPT + plan.tokens + 64)
    share = 0.85  # of the memory that is free when all start; `tokens` bounds their caches
    starts = {
        "speculating": [*serving.options(plan, most, tokens, share, serving.UNCACHED), *adaptive],
        "plain": [*serving.options(plan, most, tokens, share, serving.UNCACHED), "--spec", "off"],
    }
    if plan.likeliest:
        starts[LIKELIEST] = [*serving.options(plan, most, tokens, share, serving.UNCACHED), *likeliest]
    with serving.launched_together(plan, folder, figures, starts) as processes:
        serving.say_captures(figures, "speculating", f"candidates {steps}; up to batch {most}")
        engines = {name: SGLangEngine.of(process, timeout=300) for name, process in zip(starts, processes, strict=True)}
        cost = Roofline.of_layers(plan.shape.layers, ridge_tokens=RIDGE)
        table = ""
        with figures.attempt("cost table"):
            table = _cost_table(plan, folder, figures, engines["speculating"])
        learning = Learning(plan.steps, table, cost, learn=False)
        for batch in plan.batches:
            with figures.attempt(f"contestants at batch {batch}"):
                _compete(plan, figures, engines, learning, batch)
            if batch == plan.shared_batch:
                rounds.profile(plan, figures, engines["plain"], engines["speculating"])


def _compete(plan: Plan, figures: Figures, engines: dict[str, SGLangEngine], learning: Learning, batch: int) -> None:
    """Run all contestants in turn, and write tokens/s and ratios to plain within the same repetition."""
    fixed = {"off": OFF} | {f"k{k}": SpecConfig(k) for k in plan.fixed}
    spec = engines["speculating"]
    others = {name: engine for name, engine in engines.items() if engine is not spec}
    names = (*others, *fixed, "adaptive")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    ran: dict[str, list[Any]] = {name: [] for name in names}
    equal = []
    for repetition in range(-1, plan.repetitions):
        turn = max(repetition, 0) % len(names)
        texts = {}
        for name in (*names[turn:], *names[:turn]):
            if name == "adaptive":
                spec.set_spec_rule(learning.rule())
            elif name in fixed:
                spec.set_schedule(SpecSchedule.fixed(fixed[name]))
            engine = others.get(name, spec)
            engine.stats()
            spec.spec_rule_report()
            wanted = serving.asked(plan, batch, seed=1000 * batch + repetition + 1)
            taken, samples = serving.rollout(plan, engine, wanted, plan.tokens)
            texts[name] = [sample.tokens.tolist() for sample in samples]
            stats = engine.stats()
            if name == "adaptive":
                learning.observe(stats, [spec.spec_rule_report()])
            if repetition >= 0:
                seconds[name].append(taken)
                ran[name] += stats
        equal += [np.mean([texts[name][i] == texts["plain"][i] for i in range(batch)]) for name in names[1:]]
    for name in names:
        speed = batch * plan.tokens / statistics.median(seconds[name])
        per_round = "" if name == "plain" else f"{tokens_per_round(ran[name]):.2f} tokens a round; "
        chosen = "" if name == "plain" else f"rounds: {shares(ran[name])}"
        figures.say(f"{name}, batch {batch}", speed, "tokens/s", per_round + chosen)
    for name in names[1:]:
        middle, low, high = ratio(np.array(seconds["plain"]), np.array(seconds[name]))
        note = f"{low:.3f} to {high:.3f} over {plan.repetitions} repetitions"
        figures.say(f"{name} / plain, batch {batch}", middle, "x", note)
    note = "1 in float32; bf16 kernels differ between decode and verify"
    figures.say(f"texts equal to plain's, batch {batch}", float(np.mean(equal)), "", note)


def _cost_table(plan: Plan, folder: Path, figures: Figures, engine: SGLangEngine) -> str:
    """Profile the engine for the adaptive contestant, and write what rounds cost; "" if the profile fails."""
    path = folder / "table.json"
    points = ",".join(map(str, sorted({1, *plan.batches})))
    steps = ",".join(map(str, plan.steps))
    command = [str(path), "--url", engine.url, "--model", str(serving.directory(plan, folder))]
    command += ["--batches", points, "--lengths", "64", "--steps", steps, "--seconds", str(plan.profile_seconds)]
    if profile.main(command):
        figures.without("cost table", "failed", "rlspec profile; the adaptive rule goes by a roofline")
        return ""
    table = CostTable.load(path)
    for batch in plan.batches:
        for config in (OFF, *map(SpecConfig, plan.fixed)):
            figures.say(f"a round, {config}, batch {batch}", table.ms(config, batch, 64 * batch), "ms")
    return str(path)

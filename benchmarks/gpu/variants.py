"""Compare engines that draft with plain ones: equal texts and tokens/s, as served and in SGLang's other modes.

In bfloat16 kernels of decoding and of verification round differently, so texts part where two tokens are nearly
equally likely. SGLang's deterministic inference has kernels whose rounding does not depend on the batch. The engine
with a draft vocabulary shows what the drafter's smaller head saves of a round; its drafts mean nothing with random
weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from adaptive_sglang import tokens_per_round

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import Sample

REPETITIONS = 2  # of each rollout, the first of which does not count
FIRST = "as served"
FEWER = "draft vocabulary"
DETERMINISTIC = "deterministic"


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    engines = serving.attached(folder)
    variants = []
    for name in engines:
        variant = name.removesuffix(", plain")
        if variant != name and f"{variant}, drafts" in engines:
            variants.append(variant)
    if not serving.has_flashinfer():
        figures.without("FlashInfer", "not installed", "the archive for machines without a network has a stub of it")
    for batch in plan.texts:
        with figures.attempt(f"{batch} requests"):
            speeds = {}
            for variant in variants:
                speeds[variant] = _compare(plan, figures, engines, variant, batch)
            if DETERMINISTIC in speeds:
                price = 1 - speeds[DETERMINISTIC] / speeds[FIRST]
                figures.say(f"{DETERMINISTIC}, {batch} requests: price", price, "", "of the tokens/s with drafts")
            _head(plan, figures, engines, batch)


def _compare(plan: Plan, figures: Figures, engines: dict[str, SGLangEngine], variant: str, batch: int) -> float:
    """Write what one variant's two engines do, and return the tokens per second of the one that drafts."""
    plain = _run(plan, engines[f"{variant}, plain"], batch)
    drafts = _run(plan, engines[f"{variant}, drafts"], batch)
    point = f"{variant}, {batch} requests"
    equal, where = equal_texts(plain.samples, drafts.samples)
    figures.say(f"{point}: equal texts", equal, "", where)
    figures.say(f"{point}: plain", plain.speed, "tokens/s")
    note = f"{drafts.per_round:.2f} tokens a round"
    figures.say(f"{point}: {plan.drafts} drafts / plain", drafts.speed / plain.speed, "x", note)
    return drafts.speed


def _head(plan: Plan, figures: Figures, engines: dict[str, SGLangEngine], batch: int) -> None:
    """Write ms of a round that drafts from the whole vocabulary, less one that drafts from a part of it."""
    whole = _run(plan, engines[f"{FIRST}, drafts"], batch)
    fewer = _run(plan, engines[f"{FEWER}, drafts"], batch)
    note = f"{whole.round_ms:.2f} ms with the whole vocabulary, {fewer.round_ms:.2f} with {plan.draft_vocabulary:,}"
    figures.say(f"{FEWER}, {batch} requests: a round is shorter by", whole.round_ms - fewer.round_ms, "ms", note)


class _Rollout:
    """What the last of some equal rollouts did: its samples, tokens per second, tokens and ms of a round."""

    def __init__(self, engine: SGLangEngine, samples: list[Sample], speed: float) -> None:
        self.samples = samples
        self.speed = speed
        stats = engine.stats()
        self.per_round = tokens_per_round(stats)
        self.round_ms = sum(row.ms for row in stats) / sum(row.rounds for row in stats)


def _run(plan: Plan, engine: SGLangEngine, batch: int) -> _Rollout:
    speeds = []
    samples: list[Sample] = []
    for _ in range(REPETITIONS):
        engine.stats()
        seconds, samples = serving.rollout(engine, serving.asked(plan, batch, seed=batch), plan.text_tokens)
        speeds.append(batch * plan.text_tokens / seconds)
    return _Rollout(engine, samples, statistics.median(speeds[1:]))


def equal_texts(first: Sequence[Sample], second: Sequence[Sample]) -> tuple[float, str]:
    """Return the share of equal texts, and where the others part for the first time."""
    parts = []
    for one, other in zip(first, second, strict=True):
        differ = np.flatnonzero(one.response != other.response)
        if len(differ):
            parts.append(int(differ[0]))
    share = 1 - len(parts) / len(first)
    if not parts:
        return share, ""
    return share, f"the others part at token {statistics.median(parts):.0f} (median)"

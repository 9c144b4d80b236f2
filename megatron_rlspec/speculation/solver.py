"""The configuration with the most expected tokens per ms, by a cost and acceptance rates (ReSpec, section 5.2).

`rlspec plan` prints it. An engine uses `rule` instead, which follows what happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.round_times import Cost
from megatron_rlspec.types import SpecConfig, SpecSchedule


@dataclass(frozen=True)
class Choice:
    """One candidate in one situation. `tokens` are per request and round; `rate` is tokens per ms of one request."""

    config: SpecConfig
    tokens: float
    ms: float

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


def choices(
    cost: Cost,
    rates: Sequence[float],
    batch: int,
    context: int,
    candidates: Sequence[SpecConfig],
) -> list[Choice]:
    """Rate every candidate at this batch and total context, best first; of equals, the one that drafts less first."""
    ms = cost.grid(candidates, np.array(batch), np.array(context)).tolist()
    found = []
    for config, duration in zip(candidates, ms, strict=True):
        found.append(Choice(config, expected_tokens(config, rates), duration))
    return sorted(found, key=lambda choice: (-choice.rate, choice.config))


def compile_schedule(
    cost: Cost,
    rates: Sequence[float],
    candidates: Sequence[SpecConfig],
    *,
    max_batch: int = 256,
    lengths: Sequence[int] = (64, 32_768),
) -> SpecSchedule:
    """Tabulate the best candidate by batch (1..max_batch) and octave of total context. Equal neighbours are merged.

    `lengths` are the shortest and longest mean context per request to plan for.
    """
    shortest = min(lengths)
    longest = max(lengths)
    first = int(np.log2(shortest))
    last = int(np.ceil(np.log2(max_batch * longest)))
    octaves = [2**i for i in range(first, last + 1)]
    batch = np.arange(1, max_batch + 1)[:, None]
    context = np.clip(np.sqrt(2) * np.array(octaves), batch * shortest, batch * longest)
    ordered = sorted(candidates)
    tokens = np.array([expected_tokens(config, rates) for config in ordered])
    best = (tokens[:, None, None] / cost.grid(ordered, batch, context)).argmax(axis=0)

    # the first batch and context of each range of equal neighbours
    rows = [i for i in range(len(best)) if i == 0 or any(best[i] != best[i - 1])]
    columns = [j for j in range(len(octaves)) if j == 0 or any(best[:, j] != best[:, j - 1])]
    configs = []
    for i in rows:
        configs.append(tuple(ordered[best[i, j]] for j in columns))
    edges = [octaves[j] if j else 0 for j in columns]
    return SpecSchedule(tuple(i + 1 for i in rows), tuple(edges), tuple(configs))


def explain(
    cost: Cost,
    rates: Sequence[float],
    batch: int,
    context: int,
    candidates: Sequence[SpecConfig],
) -> str:
    """Format each candidate's tokens and cost, and how many tokens per round it would need to be the best."""
    ranked = choices(cost, rates, batch, context, candidates)
    best = ranked[0]
    head = f"batch {batch}, context {context} tokens: {best.config}"
    for choice in ranked:
        if choice.config.off:
            head += f", {best.rate / choice.rate:.2f} x plain decoding"
    lines = [
        head,
        "acceptance by depth: " + " ".join(f"{rate:.2f}" for rate in rates),
        f"{'config':>12} {'tokens/round':>13} {'ms/round':>9} {'tokens/s':>9}  verdict",
    ]
    for choice in ranked:
        needed = best.rate * choice.ms
        verdict = f"would need {needed:.2f} tokens per round"
        most = choice.config.num_steps + 1
        if choice is best:
            verdict = "chosen"
        elif needed > most and not choice.config.off:
            verdict += f", more than its maximum of {most}"
        speed = 1e3 * batch * choice.rate
        lines.append(
            f"{choice.config!s:>12} {choice.tokens:13.2f} {choice.ms:9.3f} {speed:9.0f}  {verdict}"
        )
    return "\n".join(lines)

"""Choose the configuration (num_steps, topk, num_draft_tokens), or OFF, with the most expected tokens per ms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

RoundCosts = CostTable | Roofline  # a table of one TP (`table.at(tp)`)


@dataclass(frozen=True)
class Choice:
    """One candidate in one situation. `tokens` are per request and round; `rate` is tokens per ms of one request."""

    config: SpecConfig
    tokens: float
    ms: float
    extrapolated: bool

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


def choices(
    cost: RoundCosts,
    rates: Sequence[float],
    batch: int,
    context: int,
    candidates: Sequence[SpecConfig],
) -> list[Choice]:
    """Rate every candidate at this batch and total context, best first; of equals, the one that drafts less first."""
    ms = cost.grid(candidates, np.array(batch), np.array(context))
    found = [
        Choice(c, expected_tokens(c, rates), float(t), cost.extrapolates(c, batch, context))
        for c, t in zip(candidates, ms, strict=True)
    ]
    return sorted(found, key=lambda o: (-o.rate, o.config))


def compile_schedule(
    cost: RoundCosts,
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
    octaves = [
        2**i for i in range(int(np.log2(shortest)), int(np.ceil(np.log2(max_batch * longest))) + 1)
    ]
    edges = [0, *octaves[1:]]
    batch = np.arange(1, max_batch + 1)
    middle = np.sqrt(2) * np.array(octaves)
    context = np.clip(middle[None, :], batch[:, None] * shortest, batch[:, None] * longest)
    tokens = np.array([expected_tokens(c, rates) for c in candidates])
    order = sorted(range(len(candidates)), key=lambda i: candidates[i])
    rate = tokens[order, None, None] / cost.grid(
        [candidates[i] for i in order], batch[:, None], context
    )
    best = [[candidates[order[i]] for i in row] for row in rate.argmax(axis=0)]
    rows = [i for i in range(len(best)) if i == 0 or best[i] != best[i - 1]]
    columns = [
        j for j in range(len(edges)) if j == 0 or any(best[i][j] != best[i][j - 1] for i in rows)
    ]
    return SpecSchedule(
        tuple(int(batch[i]) for i in rows),
        tuple(edges[j] for j in columns),
        tuple(tuple(best[i][j] for j in columns) for i in rows),
    )


def explain(
    cost: RoundCosts,
    rates: Sequence[float],
    batch: int,
    context: int,
    candidates: Sequence[SpecConfig],
) -> str:
    """Format each candidate's tokens and cost, and how many tokens per round it would need to be the best."""
    ranked = choices(cost, rates, batch, context, candidates)
    best = ranked[0]
    off = next((o for o in ranked if o.config.off), None)
    lines = [
        f"batch {batch}, context {context} tokens: {best.config}"
        + (f", {best.rate / off.rate:.2f} x plain decoding" if off else ""),
        "acceptance by depth: " + " ".join(f"{rate:.2f}" for rate in rates),
        f"{'config':>12} {'tokens/round':>13} {'ms/round':>9} {'tokens/s':>9}  verdict",
    ]
    for o in ranked:
        needed = best.rate * o.ms
        verdict = "chosen" if o is best else f"would need {needed:.2f} tokens per round"
        if o is not best and not o.config.off and needed > o.config.num_steps + 1:
            verdict += f", more than its maximum of {o.config.num_steps + 1}"
        verdict += " (cost extrapolated)" if o.extrapolated else ""
        lines.append(
            f"{o.config!s:>12} {o.tokens:13.2f} {o.ms:9.3f} {1e3 * batch * o.rate:9.0f}  {verdict}"
        )
    return "\n".join(lines)


def chains(steps: Sequence[int], real_off: bool = True) -> tuple[SpecConfig, ...]:
    """Make candidates of these step counts. 0 is `OFF`; with `real_off=False` it is SGLang's step 0."""
    zero = OFF if real_off else SpecConfig(0)
    return tuple(zero if k == 0 else SpecConfig(k) for k in sorted(set(steps)))

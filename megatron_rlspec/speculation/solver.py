"""Choose the configuration (num_steps, topk, num_draft_tokens), or OFF, with the most expected tokens per ms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def sglang_adaptive_config(
    cost: RoundCosts,
    rates: Sequence[float],
    candidates: Sequence[SpecConfig],
    *,
    length: int = 2048,
    max_batch: int = 256,
    band: float = 0.1,
) -> dict[str, Any]:
    """Make a file for `--speculative-adaptive-config`: the useful steps at each batch size of `length` tokens each.

    SGLang (0.5.23, `speculative/adaptive_spec_params.py`) picks among a slot's `candidate_steps` by an average of
    accepted drafts. A slot therefore gets the best steps for the given rates, for rates lower by `band` and for rates
    higher by `band`.
    SGLang's step 0 still runs a drafter pass: include `SpecConfig(0)` if it was measured. `--speculative-num-steps`
    must be among the steps of the result. Raises ValueError without a chain.
    """
    chains = [c for c in candidates if c.topk <= 1]
    if not any(c.num_steps > 0 for c in chains):
        raise ValueError(
            f"candidates {[str(c) for c in candidates]} hold no chain: SGLang adapts topk=1 only"
        )
    if SpecConfig(0) in chains:
        chains = [c for c in chains if not c.off]
    slots: dict[str, Any] = {}
    previous: list[int] = []
    shifted = [[min(max(rate + shift, 0.0), 1.0) for rate in rates] for shift in (-band, 0.0, band)]
    best = [_best_steps(cost, moved, chains, max_batch, length) for moved in shifted]
    for batch, found in enumerate(zip(*best, strict=True), 1):
        steps = sorted(set(found))
        if steps != previous:
            previous = steps
            slots[str(batch)] = {"candidate_steps": steps}
    return slots


def vllm_batch_schedule(
    cost: RoundCosts,
    rates: Sequence[float],
    candidates: Sequence[SpecConfig],
    *,
    length: int = 2048,
    max_batch: int = 256,
) -> dict[str, Any]:
    """Make vLLM's `speculative_config` entries: `[first batch, last batch, num_speculative_tokens]`, ends included."""
    chains = [c for c in candidates if c.topk <= 1]
    if not chains:
        raise ValueError(
            f"candidates {[str(c) for c in candidates]} hold no chain: vLLM adapts topk=1 only"
        )
    ranges: list[list[int]] = []
    for batch, steps in enumerate(_best_steps(cost, rates, chains, max_batch, length), 1):
        if ranges and ranges[-1][2] == steps:
            ranges[-1][1] = batch
        else:
            ranges.append([batch, batch, steps])
    most = max(c.num_steps for c in chains)
    return {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": ranges}


def _best_steps(
    cost: RoundCosts,
    rates: Sequence[float],
    candidates: Sequence[SpecConfig],
    max_batch: int,
    length: int,
) -> list[int]:
    """Return num_steps of the best candidate at every batch 1..max_batch of `length` tokens each."""
    ordered = sorted(candidates)
    batch = np.arange(1, max_batch + 1)
    tokens = np.array([expected_tokens(c, rates) for c in ordered])
    rate = tokens[:, None] / cost.grid(ordered, batch, batch * length)
    return [ordered[i].num_steps for i in rate.argmax(axis=0)]


def chains(steps: Sequence[int], real_off: bool = True) -> tuple[SpecConfig, ...]:
    """Make candidates of these step counts. 0 is `OFF`; with `real_off=False` it is SGLang's step 0."""
    zero = OFF if real_off else SpecConfig(0)
    return tuple(zero if k == 0 else SpecConfig(k) for k in sorted(set(steps)))

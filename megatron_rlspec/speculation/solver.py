"""The configuration with the most expected tokens per ms, by a cost and acceptance rates (ReSpec, section 5.2).

`rlspec plan` prints it. An engine uses `rule` instead, which follows what happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.round_times import Cost
from megatron_rlspec.types import SpecConfig


@dataclass(frozen=True)
class Choice:
    """One candidate in one situation."""

    config: SpecConfig
    tokens: float  # that a round is expected to deliver to one request
    ms: float  # of a round

    @property
    def rate(self) -> float:
        """Return tokens per ms of one request. The largest one wins."""
        return self.tokens / self.ms


def choices(
    cost: Cost,
    rates: Sequence[float],
    batch: int,
    context: int,
    candidates: Sequence[SpecConfig],
) -> list[Choice]:
    """Rate every candidate, best first; of equals, the one that drafts less first.

    rates    [D] probability that the draft of a depth is accepted if the ones before it were
    batch    requests
    context  tokens in the KV cache, of all requests together
    """
    ms = cost.grid(candidates, np.array(batch), np.array(context)).tolist()
    rated = []
    for config, duration in zip(candidates, ms, strict=True):
        rated.append(Choice(config, expected_tokens(config, rates), duration))
    return sorted(rated, key=lambda choice: (-choice.rate, choice.config))


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

"""Test that drafts leave the distribution of tokens as it is, also where bfloat16 changes single texts.

Many samples of one prompt, each with seeds of its own: by the plain engine, by the drafting one, and by the plain one
at another temperature, which the test must reject.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from gpu import serving
from gpu.figures import Figures
from gpu.plan import Plan
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.types import Prompt, Sampling

TOKENS = 3  # of a sample; the last of them is compared
WRONG = 0.7  # temperature of the control
RAREST = 10  # expected samples of a token, below which tokens are counted together


def run(plan: Plan, folder: Path, figures: Figures) -> None:
    engines = serving.attached(folder)
    plain, drafts = engines["as served, plain"], engines["as served, drafts"]
    expected = _last_tokens(plan, plain, 1, 1.0)
    contestants = {
        "drafts": _last_tokens(plan, drafts, 2, 1.0),
        "plain again": _last_tokens(plan, plain, 3, 1.0),
        f"plain at temperature {WRONG}": _last_tokens(plan, plain, 4, WRONG),
    }
    for name, tokens in contestants.items():
        p, kinds = homogeneity(expected, tokens)
        note = f"chi-squared over {kinds} kinds of tokens, {plan.draws:,} samples each"
        figures.say(f"{name}: probability of such a difference", p, "", note)


def _last_tokens(plan: Plan, engine: SGLangEngine, part: int, temperature: float) -> list[int]:
    """Return the last token of each of `plan.draws` samples. `part` gives them seeds that no other part has."""
    prompt = np.random.default_rng(0).integers(3, plan.shape.vocab, serving.PROMPT)
    requests = serving.requests_of([Prompt(i, prompt) for i in range(plan.draws)], part * plan.draws)
    sampling = Sampling(temperature, max_new_tokens=TOKENS, ignore_eos=True)
    return [int(sample.tokens[-1]) for sample in engine.generate(requests, sampling)]


def homogeneity(first: Sequence[int], second: Sequence[int]) -> tuple[float, int]:
    """Return the p-value of the test that both have one distribution, and how many kinds of tokens it compares.

    Rare tokens count as one kind, by both sides' counts together.
    """
    counts = [Counter(first), Counter(second)]
    total = counts[0] + counts[1]
    common = [token for token, number in total.items() if number >= 2 * RAREST]
    table = [[side[token] for token in common] for side in counts]
    for row, side in zip(table, (first, second), strict=True):
        row.append(len(side) - sum(row))
    columns = np.array(table)[:, np.sum(table, 0) > 0]
    if columns.shape[1] < 2:
        return 1.0, columns.shape[1]
    return float(stats.chi2_contingency(columns).pvalue), columns.shape[1]

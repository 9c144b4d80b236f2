"""Cost tables of machines that are rooflines, with errors as profiles have them: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rlspec.speculation.cost_table import CostTable, PrefillCost, Provenance, RoundCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SpecConfig


def roofline_table(
    cost: Roofline,
    configs: Sequence[SpecConfig],
    batches: Sequence[int],
    lengths: Sequence[int],
    provenance: Provenance,
    *,
    systematic: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> CostTable:
    """Simulate the cost table of such a machine.

    systematic  standard deviation of a relative error per configuration, and of one per batch size (clocks, kernel
                choices)
    noise       standard deviation of the relative error of every cell
    seed        two seeds simulate two profiles of the same machine
    """
    rng = np.random.default_rng(seed)
    by_config = np.exp(systematic * rng.standard_normal((len(configs), 1, 1)))
    by_batch = np.exp(systematic * rng.standard_normal((1, len(batches), 1)))
    cells = np.exp(noise * rng.standard_normal((len(configs), len(batches), len(lengths))))
    batch = np.array(batches)[:, None]
    length = np.array(lengths)[None, :]
    ms = cost.grid(configs, batch, batch * length) * by_config * by_batch * cells
    rounds = []
    for i, config in enumerate(configs):
        for j, b in enumerate(batches):
            for k, n in enumerate(lengths):
                median = float(ms[i, j, k])
                spread = float(ms[i, j, k] * noise)
                rounds.append(RoundCost(1, b, b * n, config, round(median, 6), spread, 20))
    prefill = []
    for n in sorted(set(lengths)):
        tokens = np.array(float(n))
        prefill.append(PrefillCost(1, 1, n, cost.host_ms + float(cost.target_ms(tokens, tokens))))
    return CostTable(provenance, rounds, prefill, switch_ms=cost.switch_ms, catch_up_ms=cost.catch_up_ms)

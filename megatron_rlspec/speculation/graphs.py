"""CUDA graphs of an SGLang engine that switches between step counts: which step count needs them at which batch sizes.

For every step count (number of drafts), SGLang captures a graph of each of its passes at every batch size of a list.
That takes memory and time at the engine's start. A step count that never pays off at a large batch needs none there.

`integrations/slime/plan.py` passes the result of `adaptive_config` to SGLang; `rollout/sglang/http/serve.py` first adds
step 0 to every range, for `hold`. The rule does not choose a step count at a batch size without its graph
(`SpecRule.limit`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SpecConfig

# The highest acceptance rates that get graphs: MOST_ACCEPTANCE * DECAY ** (d - 1) at depth d. With higher ones the best
# step count of a large batch can lack a graph, and then the rule cannot choose it.
MOST_ACCEPTANCE = 0.95
DECAY = 0.95
# An H100's `ridge_tokens` (`Roofline.of_layers`). In tokens: as many as a pass computes in the time of reading the
# weights. On a GPU with more, drafts pay at larger batches than planned here.
WIDEST_RIDGE = 300.0


def graph_sizes(max_batch: int) -> list[int]:
    """List the batch sizes that SGLang captures for speculation, ascending (0.5.23, `arg_groups/cuda_graph_hook.py`).

    A copy of SGLang's list, which `tests/rollout/test_graph_ranges.py` compares with an installed SGLang. With another
    list `adaptive_config` ends ranges at sizes without a graph, and `memory_estimate.py` counts the wrong graphs.
    """
    sizes = {
        *range(1, 9),
        *range(10, 33, 2),
        *range(40, 65, 4),
        *range(72, 257, 8),
        *range(272, max_batch + 1, 16),
        max_batch,
    }
    return sorted(size for size in sizes if size <= max_batch)


def largest_batches(
    candidates: Sequence[SpecConfig], max_batch: int, layers: int
) -> dict[SpecConfig, int]:
    """Return the largest batch at which each candidate could be the best, by the model's `layers` and no measurement.

    The best has the most expected tokens per ms of a roofline in which contexts cost nothing. The acceptance rates
    tried are a_d = a_1 * DECAY ** (d - 1), with a_1 from 0 to MOST_ACCEPTANCE.

    A candidate that is never the best gets batch 1. A shallower candidate gets at least the batches of each deeper one,
    and the shallowest one gets every batch, so the rule can always draft less.

    candidates  at least one; without equal ones, as `chains` makes them
    max_batch   the largest batch of the engine
    layers      of the target; the drafter counts as one layer, also an EAGLE-3 drafter with more
    """
    ordered = sorted(candidates)
    batch = np.arange(1, max_batch + 1)
    roofline = Roofline.of_layers(layers, ridge_tokens=WIDEST_RIDGE)
    # the second `batch` stands for context tokens; any number would do, because they cost nothing in this roofline
    ms = roofline.grid(ordered, batch, batch)
    largest = [1] * len(ordered)
    depths = DECAY ** np.arange(max(config.num_steps for config in ordered) or 1)
    for first_rate in np.linspace(0.0, MOST_ACCEPTANCE, 20):
        rates = (first_rate * depths).tolist()
        tokens = np.array([expected_tokens(config, rates) for config in ordered])
        best = (tokens[:, None] / ms).argmax(axis=0)
        for i in range(len(ordered)):
            chosen = np.flatnonzero(best == i)
            if len(chosen):
                largest[i] = max(largest[i], int(chosen[-1]) + 1)  # index 0 is batch 1

    # from the deepest on: a shallower candidate needs at least the batches of the deeper ones
    deeper = 1
    for i in reversed(range(len(ordered))):
        deeper = largest[i] = max(largest[i], deeper)
    largest[0] = max_batch
    return dict(zip(ordered, largest, strict=True))


def adaptive_config(largest: Mapping[SpecConfig, int], max_batch: int) -> dict[str, Any]:
    """Make SGLang's `--speculative-adaptive-config`: from each batch size on, the step counts that get graphs.

    largest  the largest batch of each configuration, as `largest_batches` returns it. One configuration must have
             `max_batch`, as the shallowest of `largest_batches` has, or the last range is empty. No two may have one
             `num_steps`, as `OFF` and `SpecConfig(0)` do: the later one would replace the other

    Returns {batch size as text: {"candidate_steps": [...]}}, in SGLang's names. A key is the first batch size of a
    range that ends before the next key. SGLang pads a batch to the next of `graph_sizes`, so a range ends at one of
    these.
    """
    sizes = graph_sizes(max_batch)
    ends = {}
    for config, batch in largest.items():
        padded = min(bisect_left(sizes, batch), len(sizes) - 1)
        ends[config.num_steps] = sizes[padded]
    starts = {1}
    for end in ends.values():
        if end < sizes[-1]:
            starts.add(end + 1)
    ranges = {}
    for start in sorted(starts):
        steps = [k for k, end in ends.items() if end >= start]
        ranges[str(start)] = {"candidate_steps": sorted(steps)}
    return ranges


def chains(steps: Sequence[int]) -> tuple[SpecConfig, ...]:
    """Return the configurations of these step counts, ascending. 0 becomes `OFF`, not SGLang's step 0."""
    return tuple(SpecConfig.of(k) for k in sorted(set(steps)))

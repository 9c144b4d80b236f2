"""Acceptance of slime's samples: counted from SGLang's histogram, and reported as ratios of sums.

Of `meta_info`, slime keeps only what `Sample.SpecInfo.add` reads, and that reads keys that SGLang no longer sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_rlspec.rollout.sglang.settings import DRAFTED
from megatron_rlspec.speculation.acceptance import accept_length, delivered, pooled, runs


def metrics(infos: Iterable[Any]) -> dict[str, float]:
    """Compute over all samples: tokens per round, and the acceptance rate at every depth.

    The rate at depth d is the share of rounds that accepted draft d among those that accepted draft d - 1. It is a
    lower bound if engines drafted fewer than d steps in some rounds.
    """
    total = pooled(getattr(info, "histogram", ()) for info in infos).tolist()
    rounds = sum(total)
    if not rounds:
        return {}
    found = {"accept_length": accept_length(total), "accept_rounds": float(rounds)}
    for depth in range(1, len(total)):
        reached = sum(total[depth - 1 :])
        found[f"accept_depth_{depth}"] = sum(total[depth:]) / reached if reached else 0.0
    return found


def with_histogram(slimes_add: Callable[..., None]) -> Callable[..., None]:
    """Wrap `SpecInfo.add`: fill slime's counts from the keys that SGLang sends, and keep the histogram."""

    def add(self: Any, meta_info: Mapping[str, Any]) -> None:
        renamed = dict(meta_info)
        for sglangs, slimes in (
            ("spec_num_correct_drafts", "spec_accept_token_num"),
            ("spec_num_proposed_drafts", "spec_draft_token_num"),
        ):
            if sglangs in renamed:
                renamed.setdefault(slimes, renamed[sglangs])
        slimes_add(self, meta_info=renamed)
        histogram = meta_info.get("spec_correct_drafts_histogram") or ()
        if DRAFTED in meta_info:
            # SGLang's histogram counts drafts past the end of the sample, too.
            drafted = meta_info[DRAFTED]
            histogram = delivered(sum(histogram), runs(drafted), len(drafted))
        self.histogram = pooled([getattr(self, "histogram", ()), histogram]).tolist()

    return add
